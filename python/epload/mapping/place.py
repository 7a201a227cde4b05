"""Where the tensors of one checkpoint land in one model, by the rules of a mapping. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from collections.abc import Mapping as MappingType
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from epload.core.views import Assembly, Shape, View
from epload.errors import ModelMismatch
from epload.mapping.operations import Concatenate, Stack, Wanted
from epload.mapping.rules import Convert, expanded, scoped

if TYPE_CHECKING:
    from epload.mapping.mapping import Mapping

Place = tuple[str, View]
"""The name of a target, and the box of it that a region of the checkpoint tensor fills. Equal views of one rule are one
object."""
_INDEX = "(?P<index>"


class Misfit(NamedTuple):
    """A target that the checkpoint has in another shape, so that nothing of it is placed there."""

    target: str
    sources: tuple[int, ...]
    """The checkpoint tensors that were meant for it, by number."""
    text: str
    """Names and shapes, for an error."""


@dataclass
class _Group:
    """Checkpoint tensors that one conversion turns into the same targets."""

    convert: Convert
    targets: tuple[str, ...]
    """Full names, with ``{index}`` where a list is made."""
    sources: list[int]
    """Which checkpoint tensors; the lists below are parallel to it."""
    parts: list[int]
    indices: list[int]


class Placing:
    """One use: places the tensors of one checkpoint in one model."""

    def __init__(
        self, mapping: Mapping, names: Sequence[str], shapes: Sequence[Shape], targets: MappingType[str, Shape]
    ) -> None:
        self.mapping = mapping
        self.names = names
        self.shapes = shapes
        self.targets = targets
        self.placed: list[tuple[Place, ...]] = [()] * len(names)
        self.filled: dict[str, int] = {}
        """Target to one of the checkpoint tensors that fill it."""
        self.misfits: list[Misfit] = []
        self.whole = {shape: Assembly.of(0, shape) for shape in dict.fromkeys(shapes)}
        self.made: dict[Any, list[list[Assembly]]] = {}
        """What groups alike but for their names become."""

    def run(self) -> list[tuple[Place, ...]]:
        renamed = list(self.names)
        if self.mapping.only:
            known = dict(self.mapping.only)
            renamed = [known.get(name, name) for name in renamed]
        for alias in self.mapping.aliases:
            # A name that the model has is not a wrapper's.
            renamed = [
                name if name in self.targets else other
                for name, other in zip(renamed, alias.apply(renamed), strict=True)
            ]
        for rename in self.mapping.renames:
            renamed = rename.apply(renamed)
        groups, others = self._match(renamed)
        self._place_whole(others, renamed)
        if self.mapping.required and (self.mapping.renames or self.mapping.converts):
            self._check_used(renamed, groups)
        for group in groups:
            self._convert(group)
        self._tie()
        return self.placed

    def _check_used(self, renamed: list[str], groups: list[_Group]) -> None:
        known = {source for misfit in self.misfits for source in misfit.sources}
        lost = [name for i, name in enumerate(self.names) if not self.placed[i] and i not in known]
        if groups or renamed != list(self.names) or not lost:
            return
        rules = [rename.source for rename in self.mapping.renames]
        rules += [source for convert in self.mapping.converts for source in convert.sources]
        raise ModelMismatch(
            f"the mapping matches nothing: none of its patterns {rules[:5]} is found in a name of the checkpoint "
            f"({', '.join(self.names[:3])}, ...), and the model has no place for {len(lost)} of them ({', '.join(lost[:3])}, ...)"
        )

    def _match(self, renamed: list[str]) -> tuple[list[_Group], list[int]]:
        """The groups of all conversions, and the checkpoint tensors that none of them takes."""
        rules = [
            (convert, part, re.compile(convert.sources[part]))
            for convert in self.mapping.converts
            for part in sorted(range(len(convert.sources)), key=lambda part: -len(convert.sources[part]))
        ]
        if not rules:
            return [], list(range(len(renamed)))
        groups: dict[tuple[int, str], _Group] = {}
        others = []
        for i, name in enumerate(renamed):
            for convert, part, pattern in rules:
                prefix, rest = scoped(name, convert.scopes) if convert.scopes else ("", name)
                if prefix is None or not (match := pattern.search(rest)):
                    continue
                before, after = prefix + rest[: match.start()], rest[match.end() :]
                key = (id(convert), f"{before}{expanded(match, convert.targets[0])}{after}")
                if (group := groups.get(key)) is None:
                    made = tuple(f"{before}{expanded(match, target)}{after}" for target in convert.targets)
                    group = groups[key] = _Group(convert, made, [], [], [])
                group.sources.append(i)
                group.parts.append(part)
                group.indices.append(int(match["index"]) if "index" in pattern.groupindex else -1)
                break
            else:
                others.append(i)
        return list(groups.values()), others

    def _place_whole(self, sources: Iterable[int], renamed: Sequence[str]) -> None:
        """Tensors that become one target each as they are."""
        names, shapes, targets, filled, placed = self.names, self.shapes, self.targets, self.filled, self.placed
        views = {shape: assembly.parts[0][1] for shape, assembly in self.whole.items()}
        for source in sources:
            name, shape = names[source], shapes[source]
            target: str | None = renamed[source]
            if target not in targets or self.mapping.base:
                target = self._find(renamed[source]) or self._find(name)
            if target is None:
                continue
            if shape != targets[target]:
                wanted = list(targets[target])
                text = f"{name} has shape {list(shape)} in the checkpoint but the model's {target} has {wanted}"
                self.misfits.append(Misfit(target, (source,), text))
                continue
            if filled.setdefault(target, source) != source:
                raise self._taken(target, source)
            placed[source] = ((target, views[shape]),)

    def _find(self, name: str) -> str | None:
        """The model's name for it, with or without the base module's; None if it has none."""
        if base := self.mapping.base:
            prefix = f"{base}."
            if name.startswith(prefix) and name[len(prefix) :] in self.targets:
                return name[len(prefix) :]
            if prefix + name in self.targets:
                return prefix + name
        return name if name in self.targets else None

    def _taken(self, target: str, source: int) -> ModelMismatch:
        names = f"{self.names[self.filled[target]]} and {self.names[source]}"
        return ModelMismatch(f"both {names} would fill the model's {target}")

    @cached_property
    def _lists(self) -> set[str]:
        """Names of the model with one of their numbers as ``{index}``."""
        return {
            f"{name[: match.start()]}{{index}}{name[match.end() :]}"
            for name in self.targets
            for match in re.finditer(r"\d+", name)
        }

    def _tie(self) -> None:
        origin: dict[str, str] = {}
        more = True
        while more:  # one value may have any number of names, in pairs of any order
            more = False
            for a, b in self.mapping.ties:
                for held, lacking in ((a, b), (b, a)):
                    source = held if held in self.filled else origin.get(held)
                    if source is None or lacking in self.filled or lacking in origin:
                        continue
                    if lacking in self.targets and self.targets[lacking] == self.targets[source]:
                        origin[lacking] = source
                        more = True
        if not origin:
            return
        partners: dict[str, list[str]] = defaultdict(list)
        for lacking, source in origin.items():
            partners[source].append(lacking)
        for number, places in enumerate(self.placed):
            copies = tuple((other, view) for target, view in places for other in partners.get(target, ()))
            if copies:
                self.placed[number] = places + copies

    def _find_list(self, name: str) -> str | None:
        """As :meth:`_find`, for a name with ``{index}``."""
        base = f"{self.mapping.base}."
        return next((form for form in (name, base + name, name.removeprefix(base)) if form in self._lists), None)

    def _convert(self, group: _Group) -> None:
        wanted = [self._find_list(name) if "{index}" in name else self._find(name) for name in group.targets]
        if not any(wanted):
            self._place_whole(group.sources, self.names)
            return
        places: dict[int, list[Place]] = defaultdict(list)
        for target, made in zip(wanted, self._assemble(group, wanted), strict=True):
            if target is None:
                continue
            for index, assembly in enumerate(made):
                name = target.replace("{index}", str(index))
                if name not in self.targets:
                    continue
                if assembly.shape != self.targets[name]:
                    text = str(self._refuse(group, name, f"they make {list(assembly.shape)}"))
                    self.misfits.append(Misfit(name, tuple(group.sources), text))
                    continue
                if self.filled.setdefault(name, group.sources[0]) != group.sources[0]:
                    raise self._taken(name, group.sources[0])
                for source, view in assembly.parts:
                    places[source].append((name, view))
        for position, found in places.items():
            self.placed[group.sources[position]] = tuple(found)

    def _assemble(self, group: _Group, wanted: Sequence[str | None]) -> list[list[Assembly]]:
        """What the group's tensors become, a list of tensors for each target; sources count within the group."""
        shapes = [self.shapes[source] for source in group.sources]
        lengths = [None if name is None else self.targets.get(name) for name in wanted]
        key = (id(group.convert), *group.parts, *group.indices, *shapes, *lengths)
        if (made := self.made.get(key)) is not None:
            return made
        self._check_complete(group, lengths)
        order = sorted(range(len(shapes)), key=lambda i: (group.parts[i], group.indices[i]))
        parts: list[list[Assembly]] = [[] for _ in group.convert.sources]
        for i in order:
            assembly = self.whole[shapes[i]]
            parts[group.parts[i]].append(replace(assembly, parts=tuple((i, view) for _, view in assembly.parts)))
        try:
            for operation in group.convert.operations:
                parts = operation(parts, Wanted(lengths, group.convert.targets))
        except ValueError as error:
            raise self._refuse(group, next(filter(None, wanted)), str(error)) from error
        several = ["{index}" in target for target in group.convert.targets]
        if len(parts) != len(several) or any(len(p) != 1 and not many for p, many in zip(parts, several, strict=False)):
            raise self._refuse(
                group,
                next(filter(None, wanted)),
                "nothing keeps them apart: its operations do not end in one tensor a target",
            )
        self.made[key] = parts
        return parts

    def _check_complete(self, group: _Group, lengths: Sequence[Shape | None]) -> None:
        """Every part is there once, with every index from 0 to the last."""
        convert = group.convert
        found: dict[tuple[int, int], int] = {}
        target = next(
            (name for name, shape in zip(group.targets, lengths, strict=True) if shape is not None), group.targets[0]
        )
        for source, key in zip(group.sources, zip(group.parts, group.indices, strict=True), strict=True):
            if key in found:
                both = f"both {self.names[found[key]]} and {self.names[source]} would fill one region of it"
                raise self._refuse(group, target, both)
            found[key] = source
        count = max(group.indices) + 1
        if (known := _stacked(convert, lengths)) is not None:
            if count > known:
                source = group.sources[group.indices.index(count - 1)]
                raise self._refuse(group, target, f"{self.names[source]} has index {count - 1}")
            count = known
        wanted = [
            (part, index)
            for part, source_pattern in enumerate(convert.sources)
            for index in (range(count) if _INDEX in source_pattern else [-1])
        ]
        absent = [key for key in wanted if key not in found]
        if absent:
            part, index = absent[0]
            like = re.sub(r"\(\?P<index>[^)]*\)", str(index), convert.sources[part])
            first = re.sub(r"\(\?[^)]*\)|[\\^$]", "", like)
            raise self._refuse(
                group, target, f"{len(absent)} of its {len(wanted)} parts are missing, the first {first}"
            )

    def _refuse(self, group: _Group, target: str, what: str) -> ModelMismatch:
        names = [self.names[source] for source in group.sources]
        listed = ", ".join(names[:2]) + (f", ... {names[-1]}" if len(names) > 2 else "")
        shape = self.targets.get(target)
        wants = f" has shape {list(shape)}" if shape is not None else ""
        shapes = ", ".join(str(list(shape)) for shape in dict.fromkeys(self.shapes[source] for source in group.sources))
        return ModelMismatch(
            f"the model's {target}{wants}, but of {len(names)} checkpoint tensors for it ({listed}; {shapes}) {what}"
        )


def _stacked(convert: Convert, lengths: Sequence[Shape | None]) -> int | None:
    """How many tensors a target stacks, if that can be told from its shape."""
    first = convert.operations[0] if convert.operations else None
    shape = lengths[0] if len(lengths) == 1 else None
    if not isinstance(first, Stack) or shape is None or not 0 <= first.dim < len(shape):
        return None
    others = convert.operations[1:]
    if any(not isinstance(other, Concatenate) or other.dim % len(shape) == first.dim for other in others):
        return None
    return shape[first.dim]
