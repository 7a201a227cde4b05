"""Applies conversions: groups the checkpoint tensors that one conversion takes together, and runs its operations on them."""

from __future__ import annotations

import re
from collections.abc import Mapping as MappingType
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from epload.core.views import Assembly, Shape
from epload.errors import ModelMismatch
from epload.mapping.mapping import Convert, expand, number_by_digits, split_scope
from epload.mapping.operations import Concatenate, ConversionTargets, Stack, TensorLists

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


def match_conversions(converts: Sequence[Convert], names: Sequence[str]) -> tuple[list[ConversionGroup], list[int]]:
    """Returns the groups of all conversions, and the numbers of the tensors that no conversion takes.

    Raises:
        ModelMismatch: what a conversion takes for an index is no integer.
    """
    if not converts:
        return [], list(range(len(names)))
    rules = [
        (convert, number, re.compile(convert.sources[number]))
        for convert in converts
        for number in sorted(range(len(convert.sources)), key=lambda number: -len(convert.sources[number]))
    ]
    sources = [text for convert in converts for text in (*convert.sources, *convert.scopes)]
    if any("\\" in target for convert in converts for target in convert.targets):
        sources.append("0")  # a target may hold digits of the name
    # The match in one name holds for all that differ from it only in digits.
    kinds, firsts = number_by_digits(names, *sources)
    matches = [_first_match(rules, names[first]) for first in firsts]
    groups: dict[tuple[int, str], ConversionGroup] = {}
    others = []
    for i, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        if (rule := matches[kind]) is None:
            others.append(i)
            continue
        convert, number, match, offset = rule
        before, after = name[: match.start() + offset], name[match.end() + offset :]
        targets = [expand(match, target) for target in convert.targets]
        key = id(convert), f"{before}{targets[0]}{after}"
        if key not in groups:
            full = tuple(f"{before}{target}{after}" for target in targets)
            groups[key] = ConversionGroup(convert, full, [], [], [])
        groups[key].sources.append(i)
        groups[key].inputs.append(number)
        groups[key].indices.append(_index(name, match, offset) if "index" in match.re.groupindex else -1)
    return list(groups.values()), others


def _index(name: str, match: re.Match[str], offset: int) -> int:
    """Returns the integer at the group ``index`` of a match, which may be in a name that differs only in digits."""
    begin, end = match.span("index")
    text = name[begin + offset : end + offset] if begin >= 0 else ""
    try:
        return int(text)
    except ValueError:
        raise ModelMismatch(f"expected an integer as the index in {name!r}, got {text!r}") from None


def _first_match(
    rules: Sequence[tuple[Convert, int, re.Pattern[str]]], name: str
) -> tuple[Convert, int, re.Match[str], int] | None:
    """Returns the first rule that matches: the conversion, the number of its source, the match, and where the text starts that
    the match is in."""
    for convert, number, pattern in rules:
        prefix, rest = split_scope(name, convert.scopes)
        if prefix is not None and (match := pattern.search(rest)):
            return convert, number, match, len(prefix)
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
        """Returns a list of tensors for each target, whose name in the model is None if it lacks it; sources are numbered within
        the group. Raises ModelMismatch for tensors that are missing or duplicate, or an operation that cannot be applied."""
        shapes = [self._shapes[source] for source in group.sources]
        target_shapes = [None if name is None else self._targets.get(name) for name in targets]
        key = (id(group.convert), tuple(group.inputs), tuple(group.indices), tuple(shapes), tuple(target_shapes))
        if key in self._outputs:
            return self._outputs[key]
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
        patterns = group.convert.targets
        if len(tensors) != len(patterns) or any(
            len(output) != 1 and "{index}" not in pattern for output, pattern in zip(tensors, patterns, strict=True)
        ):
            count = sum(map(len, tensors))
            problem = f"expected one tensor for each target, but the operations make {count}; add Stack or Concatenate"
            raise self.error(group, present, problem)
        self._outputs[key] = tensors
        return tensors

    def _check_complete(self, group: ConversionGroup, target: str, target_shapes: Sequence[Shape | None]) -> None:
        """Raises ModelMismatch unless each input is there once, with each index from 0 to the last."""
        convert = group.convert
        sources: dict[tuple[int, int], int] = {}
        for source, number, index in zip(group.sources, group.inputs, group.indices, strict=True):
            if index < 0 and _INDEX in convert.sources[number]:
                raise self.error(group, target, f"{self._names[source]} has index {index}, expected 0 or more")
            if (other := sources.setdefault((number, index), source)) != source:
                both = f"{self._names[other]} and {self._names[source]}"
                raise self.error(group, target, f"{both} are for the same part of it")
        count = max(group.indices) + 1
        if (stacked := _stacked_count(convert, target_shapes)) is not None:
            if count > stacked:
                name = self._names[group.sources[group.indices.index(count - 1)]]
                raise self.error(group, target, f"{name} has index {count - 1}, but the last index is {stacked - 1}")
            count = stacked
        optional = bool(convert.operations) and convert.operations[0].optional_inputs
        required = [
            range(count) if _INDEX in pattern else range(-1, 0)
            for pattern in (convert.sources[:1] if optional else convert.sources)
        ]
        # Counted, not listed: an index in a malformed checkpoint may have any number of digits.
        total = sum(indices.stop - indices.start for indices in required)
        if missing := total - sum(number < len(required) for number, _ in sources):
            keys = ((number, index) for number, indices in enumerate(required) for index in indices)
            number, index = next(key for key in keys if key not in sources)
            first = re.sub(r"\(\?P<index>[^)]*\)", str(index), convert.sources[number])
            first = re.sub(r"\(\?[^)]*\)|[\\^$]", "", first)
            text = f"the checkpoint lacks {missing} of {total}, the first is {first}, as renamed"
            raise self.error(group, target, text)

    def error(self, group: ConversionGroup, target: str, problem: str) -> ModelMismatch:
        """Returns the error for a target that a group cannot fill."""
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
