"""Applies conversions: groups the checkpoint tensors that one conversion takes together, and runs its operations on them."""

from __future__ import annotations

import re
from collections.abc import Mapping as MappingType
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from epload.core.views import Assembly, Shape
from epload.errors import ModelMismatch
from epload.mapping.operations import Concatenate, ConversionTargets, Stack, TensorLists
from epload.mapping.rules import Convert, expand, ignores_digits, number_by_digits, split_scope

_INDEX = "(?P<index>"


@dataclass
class ConversionGroup:
    """Checkpoint tensors that one conversion turns into the same targets."""

    convert: Convert
    targets: tuple[str, ...]
    """Full names, with ``{index}`` where the output is a list."""
    sources: list[int]
    """Numbers of the checkpoint tensors; the lists below are parallel to it."""
    inputs: list[int]
    """Index of the conversion's input that each tensor belongs to."""
    indices: list[int]
    """Index of each tensor in its input; -1 if the input is not a list."""


class _Match(NamedTuple):
    """A match of a conversion in a name. Spans count characters."""

    convert: Convert
    input: int
    """Index among the conversion's inputs."""
    span: tuple[int, int]
    place: tuple[int, int] | tuple[None, None]
    """Span of the index in the name; (None, None) if the pattern has no group ``index``."""
    targets: tuple[str, ...]
    """Texts that replace the match, one per target of the conversion."""


def match_conversions(converts: Sequence[Convert], names: Sequence[str]) -> tuple[list[ConversionGroup], list[int]]:
    """The groups of all conversions, and the numbers of the tensors that no conversion takes.

    Raises:
        ModelMismatch: what a conversion takes for an index is no integer.
    """
    rules = [
        (convert, number, re.compile(convert.sources[number]))
        for convert in converts
        for number in sorted(range(len(convert.sources)), key=lambda number: -len(convert.sources[number]))
    ]
    if not rules:
        return [], list(range(len(names)))
    names = list(names)
    sources = [text for convert in converts for text in (*convert.sources, *convert.scopes)]
    constant = not any("\\" in target for convert in converts for target in convert.targets)
    # What is found in one name holds for all that differ from it only in digits.
    if constant and ignores_digits(*sources):
        kinds, firsts = number_by_digits(names)
    else:
        kinds = firsts = list(range(len(names)))
    found = [_find(rules, names[first]) for first in firsts]
    groups: dict[tuple[int, str], ConversionGroup] = {}
    others = []
    for i, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        match = found[kind]
        if match is None:
            others.append(i)
            continue
        before, after = name[: match.span[0]], name[match.span[1] :]
        key = id(match.convert), f"{before}{match.targets[0]}{after}"
        group = groups.get(key)
        if group is None:
            targets = tuple(f"{before}{target}{after}" for target in match.targets)
            group = groups[key] = ConversionGroup(match.convert, targets, [], [], [])
        group.sources.append(i)
        group.inputs.append(match.input)
        group.indices.append(_index(name, *match.place))
    return list(groups.values()), others


def _index(name: str, begin: int | None, end: int | None) -> int:
    """Returns the integer in ``name[begin:end]``, -1 if ``begin`` is None."""
    if begin is None:
        return -1
    try:
        return int(name[begin:end])
    except ValueError:
        raise ModelMismatch(f"expected an integer as the index in {name!r}, got {name[begin:end]!r}") from None


def _find(rules: Sequence[tuple[Convert, int, re.Pattern[str]]], name: str) -> _Match | None:
    """The first rule that matches: a conversion, the number of one of its sources, and the pattern of that."""
    for convert, number, pattern in rules:
        prefix, rest = split_scope(name, convert.scopes) if convert.scopes else ("", name)
        if prefix is None or not (match := pattern.search(rest)):
            continue
        begin, end = match.span()
        place: tuple[int, int] | tuple[None, None] = (None, None)
        if "index" in pattern.groupindex:
            first, last = match.span("index")
            # Of a group that took no part in the match, the empty text, which is no index.
            place = (first + len(prefix), last + len(prefix)) if first >= 0 else (0, 0)
        targets = tuple(expand(match, target) for target in convert.targets)
        return _Match(convert, number, (begin + len(prefix), end + len(prefix)), place, targets)
    return None


class Converter:
    """Runs the operations of groups; groups that differ only in names share the result."""

    def __init__(
        self,
        names: Sequence[str],
        shapes: Sequence[Shape],
        targets: MappingType[str, Shape],
        whole: MappingType[Shape, Assembly],
    ) -> None:
        """``whole``: a checkpoint tensor as it is, by shape."""
        self._names, self._shapes, self._targets, self._whole = names, shapes, targets, whole
        self._outputs: dict[Any, TensorLists] = {}

    @cached_property
    def indexed_names(self) -> set[str]:
        """Names of the model with one of their numbers replaced by ``{index}``."""
        return {
            f"{name[: match.start()]}{{index}}{name[match.end() :]}"
            for name in self._targets
            for match in re.finditer(r"\d+", name)
        }

    def convert(self, group: ConversionGroup, targets: Sequence[str | None]) -> TensorLists:
        """A list of tensors for each target; sources are numbered within the group.

        Args:
            targets: names of the targets in the model; None for those that it lacks.

        Raises:
            ModelMismatch: tensors of the group are missing or duplicate, or an operation cannot be applied.
        """
        shapes = [self._shapes[source] for source in group.sources]
        target_shapes = [None if name is None else self._targets.get(name) for name in targets]
        key = (id(group.convert), tuple(group.inputs), tuple(group.indices), tuple(shapes), tuple(target_shapes))
        if (known := self._outputs.get(key)) is not None:
            return known
        present = next(filter(None, targets))
        self._check_complete(group, present, target_shapes)
        tensors: TensorLists = [[] for _ in group.convert.sources]
        for i in sorted(range(len(shapes)), key=lambda i: (group.inputs[i], group.indices[i])):
            assembly = self._whole[shapes[i]]
            tensors[group.inputs[i]].append(Assembly(assembly.shape, tuple([(i, view) for _, view in assembly.parts])))
        try:
            for operation in group.convert.operations:
                tensors = operation(tensors, ConversionTargets(target_shapes, group.convert.targets))
        except ValueError as error:
            raise self.error(group, present, str(error)) from error
        lists = ["{index}" in target for target in group.convert.targets]
        if len(tensors) != len(lists) or any(
            len(output) != 1 and not many for output, many in zip(tensors, lists, strict=False)
        ):
            count = sum(map(len, tensors))
            problem = f"expected one tensor for each target, but the operations make {count}; add Stack or Concatenate"
            raise self.error(group, present, problem)
        self._outputs[key] = tensors
        return tensors

    def _check_complete(self, group: ConversionGroup, target: str, target_shapes: Sequence[Shape | None]) -> None:
        """Raises ModelMismatch unless each input is there once, with each index from 0 to the last."""
        convert = group.convert
        found: dict[tuple[int, int], int] = {}
        for source, key in zip(group.sources, zip(group.inputs, group.indices, strict=True), strict=True):
            number, index = key
            if index < 0 and _INDEX in convert.sources[number]:
                raise self.error(group, target, f"{self._names[source]} has index {index}, expected 0 or more")
            if key in found:
                both = f"{self._names[found[key]]} and {self._names[source]}"
                raise self.error(group, target, f"{both} are for the same part of it")
            found[key] = source
        count = max(group.indices) + 1
        if (stacked := _stacked_count(convert, target_shapes)) is not None:
            if count > stacked:
                name = self._names[group.sources[group.indices.index(count - 1)]]
                raise self.error(group, target, f"{name} has index {count - 1}, but the last index is {stacked - 1}")
            count = stacked
        optional = bool(convert.operations) and convert.operations[0].optional_inputs
        required = convert.sources[:1] if optional else convert.sources
        counts = [count if _INDEX in pattern else 1 for pattern in required]
        if missing := sum(counts) - sum(number < len(required) for number, _ in found):
            every = (
                (number, index)
                for number, pattern in enumerate(required)
                for index in (range(count) if _INDEX in pattern else [-1])
            )
            number, index = next(key for key in every if key not in found)
            first = re.sub(r"\(\?P<index>[^)]*\)", str(index), convert.sources[number])
            first = re.sub(r"\(\?[^)]*\)|[\\^$]", "", first)
            text = f"the checkpoint lacks {missing} of {sum(counts)}, the first is {first}, as renamed"
            raise self.error(group, target, text)

    def error(self, group: ConversionGroup, target: str, problem: str) -> ModelMismatch:
        """The error for a target that a group cannot fill."""
        names = [self._names[source] for source in group.sources]
        listed = ", ".join(names if len(names) <= 3 else [*names[:2], "...", names[-1]])
        shape = self._targets.get(target)
        of_shape = f" of shape {list(shape)}" if shape is not None else ""
        distinct = dict.fromkeys(self._shapes[source] for source in group.sources)
        shapes = "shapes " * (len(distinct) > 1) + ", ".join(str(list(shape)) for shape in distinct)
        count = "1 checkpoint tensor" if len(names) == 1 else f"{len(names)} checkpoint tensors"
        return ModelMismatch(f"cannot make {target}{of_shape} from {count} ({listed}; {shapes}): {problem}")


def _stacked_count(convert: Convert, target_shapes: Sequence[Shape | None]) -> int | None:
    """Returns the number of tensors that the target stacks; None if its shape does not show it."""
    first = convert.operations[0] if convert.operations else None
    shape = target_shapes[0] if len(target_shapes) == 1 else None
    if not isinstance(first, Stack) or shape is None or not 0 <= first.dim < len(shape):
        return None
    others = convert.operations[1:]
    if any(not isinstance(other, Concatenate) or other.dim % len(shape) == first.dim for other in others):
        return None
    return shape[first.dim]
