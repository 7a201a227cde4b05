"""Determines where a checkpoint's tensors go in a model, by the rules of a mapping. Pure: names and shapes in, regions out."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from collections.abc import Mapping as MappingType
from math import prod
from typing import NamedTuple

from epload.core.views import Assembly, Shape, View
from epload.errors import ModelMismatch
from epload.mapping.conversion import ConversionGroup, Converter, match_conversions
from epload.mapping.mapping import Mapping, Placed
from epload.mapping.rules import apply_renames

Place = tuple[str, View]
"""The name of a target (a tensor of the model), and the view of a checkpoint tensor that fills a box of it. Equal views of one
rule are one object."""


class ShapeMismatch(NamedTuple):
    """A target that has another shape in the checkpoint, so that nothing is placed in it."""

    target: str
    sources: tuple[int, ...]
    """The checkpoint tensors for it, by number."""
    message: str
    """Names and both shapes."""


def place(
    mapping: Mapping,
    names: Sequence[str],
    shapes: Sequence[Shape],
    targets: MappingType[str, Shape],
    mismatches: list[ShapeMismatch] | None = None,
) -> list[tuple[Place, ...]]:
    """The places that each checkpoint tensor fills; empty if the model has no place for it.

    Args:
        names: names of the checkpoint's tensors.
        shapes: their shapes.
        targets: global shapes of the model's tensors by name.
        mismatches: if given, targets of mismatched shape are appended to it and left out, instead of raising.

    Raises:
        ModelMismatch: mismatched shapes (without ``mismatches``), two tensors for one region, an incomplete set of tensors,
            rules that match nothing. Names the keys.
    """
    if isinstance(mapping, Placed):
        return list(mapping.places)
    target_of = _unwrapped_names(mapping, targets) if mapping.aliases else {}
    inner = {name: targets[target] for name, target in target_of.items()} if mapping.aliases else targets
    placer = _Placer(mapping, names, shapes, inner)
    placed, found = placer.run(), placer.mismatches
    if mapping.aliases:
        placed = [tuple((target_of[name], view) for name, view in places) for places in placed]
        found = [mismatch._replace(target=target_of[mismatch.target]) for mismatch in found]
    if mismatches is not None:
        mismatches += found
    elif found:
        raise ModelMismatch("; ".join(mismatch.message for mismatch in found))
    return placed


def _unwrapped_names(mapping: Mapping, targets: Iterable[str]) -> dict[str, str]:
    """The model's names by their names without wrappers."""
    targets = list(targets)
    target_of: dict[str, str] = {}
    for name, target in zip(apply_renames(mapping.aliases, targets), targets, strict=True):
        if (other := target_of.setdefault(name, target)) != target:
            raise ModelMismatch(f"the model's {other} and {target} have the same name without their wrappers: {name}")
    return target_of


def reverse(
    mapping: Mapping, names: Sequence[str], shapes: Sequence[Shape], targets: MappingType[str, Shape]
) -> dict[str, tuple[Place, ...]]:
    """The direction of saving: for each checkpoint tensor the regions of the model's tensors that make it up.

    Raises:
        ModelMismatch: elements of a checkpoint tensor are not in the model, or more than once; names it.
    """
    found = {}
    for name, shape, places in zip(names, shapes, place(mapping, names, shapes, targets), strict=True):
        count = sum(prod(view.size) for _, view in places)
        if count != prod(shape) and places:
            raise ModelMismatch(f"cannot make {name} from the model, which has {count} of its {prod(shape)} elements")
        if places:
            found[name] = places
    return found


def destinations(mapping: Mapping, names: Sequence[str], targets: MappingType[str, Shape]) -> list[tuple[str, ...]]:
    """Returns the names of the model that tensors of each of these names would fill, whatever their shapes."""
    if isinstance(mapping, Placed):
        return [()] * len(names)
    target_of = _unwrapped_names(mapping, targets) if mapping.aliases else {name: name for name in targets}
    placer = _Placer(mapping, names, [()] * len(names), {name: targets[target] for name, target in target_of.items()})
    return [tuple(map(target_of.__getitem__, filled)) for filled in placer.destinations()]


class _Placer:
    """Places the tensors of one checkpoint in one model. Runs once."""

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
        self.mismatches: list[ShapeMismatch] = []
        self.whole = {shape: Assembly.of(0, shape) for shape in dict.fromkeys(shapes)}
        self.converter = Converter(names, shapes, targets, self.whole)

    def run(self) -> list[tuple[Place, ...]]:
        renamed = self._rename()
        groups, others = match_conversions(self.mapping.converts, renamed)
        self._place_whole(others, renamed)
        if self.mapping.required and (self.mapping.renames or self.mapping.converts):
            self._check_used(renamed, groups)
        for group in groups:
            self._convert(group)
        self._tie()
        return self.placed

    def destinations(self) -> list[list[str]]:
        """Returns what :func:`destinations` does, by the model's names without wrappers."""
        renamed = self._rename()
        groups, others = match_conversions(self.mapping.converts, renamed)
        filled: list[list[str]] = [[] for _ in self.names]
        for source in others:
            target = self._find(renamed[source]) or self._find(self.names[source])
            filled[source] = [target] if target is not None else []
        for group in groups:
            forms = [form for name in group.targets if (form := self._find(name)) is not None]
            patterns = [re.compile(r"\d+".join(map(re.escape, form.split("{index}")))) for form in forms]
            names = [name for name in self.targets if any(pattern.fullmatch(name) for pattern in patterns)]
            for source in group.sources:
                filled[source] = names
        return filled

    def _rename(self) -> list[str]:
        renamed = list(self.names)
        if self.mapping.only:
            known = dict(self.mapping.only)
            renamed = [known.get(name, name) for name in renamed]
        for alias in self.mapping.aliases:
            # A name that the model has does not contain a wrapper.
            renamed = [
                name if name in self.targets else other
                for name, other in zip(renamed, alias.apply(renamed), strict=True)
            ]
        return apply_renames(self.mapping.renames, renamed)

    def _check_used(self, renamed: list[str], groups: list[ConversionGroup]) -> None:
        known = {source for mismatch in self.mismatches for source in mismatch.sources}
        lost = [name for i, name in enumerate(self.names) if not self.placed[i] and i not in known]
        if groups or renamed != list(self.names) or not lost:
            return
        rules = [rename.source for rename in self.mapping.renames]
        rules += [source for convert in self.mapping.converts for source in convert.sources]
        raise ModelMismatch(
            f"no rule of the mapping matches any checkpoint key, and the model lacks {len(lost)} of the {len(self.names)} keys "
            f"({', '.join(lost[:3])}{', ...' * (len(lost) > 3)}); the patterns are {', '.join(map(repr, rules[:5]))}"
        )

    def _place_whole(self, sources: Iterable[int], renamed: Sequence[str]) -> None:
        """Places tensors that are not converted, each in one target."""
        names, shapes, targets, filled, placed = self.names, self.shapes, self.targets, self.filled, self.placed
        views = {shape: assembly.parts[0][1] for shape, assembly in self.whole.items()}
        for source in sources:
            name, shape = names[source], shapes[source]
            target: str | None = renamed[source]
            if target not in targets or self.mapping.base_model_prefix:
                target = self._find(renamed[source]) or self._find(name)
            if target is None:
                continue
            if shape != targets[target]:
                other = "" if target == name else f"{target} has shape "
                text = (
                    f"{name} has shape {list(shape)} in the checkpoint but {other}{list(targets[target])} in the model"
                )
                self.mismatches.append(ShapeMismatch(target, (source,), text))
                continue
            if filled.setdefault(target, source) != source:
                raise self._duplicate(target, source)
            placed[source] = ((target, views[shape]),)

    def _find(self, name: str) -> str | None:
        """The model's name for ``name``, which may have ``{index}``, with or without the base model's prefix."""
        known = self.converter.indexed_names if "{index}" in name else self.targets
        prefix = self.mapping.base_model_prefix and f"{self.mapping.base_model_prefix}."
        inner = name.removeprefix(prefix)
        forms = (prefix + name, name) if inner == name else (inner, prefix + name, name)
        return next((form for form in forms if form in known), None)

    def _duplicate(self, target: str, source: int) -> ModelMismatch:
        return ModelMismatch(
            f"checkpoint tensors {self.names[self.filled[target]]} and {self.names[source]} both map to the model's {target}; "
            "change the mapping so that only one does"
        )

    def _convert(self, group: ConversionGroup) -> None:
        found = [self._find(name) for name in group.targets]
        if not any(found):
            self._place_whole(group.sources, self.names)
            return
        made: list[tuple[str, Assembly]] = []
        for target, outputs in zip(found, self.converter.convert(group, found), strict=True):
            if target is None:
                continue
            for index, assembly in enumerate(outputs):
                name = target.replace("{index}", str(index))
                if name not in self.targets:
                    continue
                if assembly.shape != self.targets[name]:
                    text = str(self.converter.error(group, name, f"the result has shape {list(assembly.shape)}"))
                    self.mismatches.append(ShapeMismatch(name, tuple(group.sources), text))
                    continue
                if self.filled.setdefault(name, group.sources[0]) != group.sources[0]:
                    raise self._duplicate(name, group.sources[0])
                made.append((name, assembly))
        self._add_places(group, made)

    def _add_places(self, group: ConversionGroup, made: Sequence[tuple[str, Assembly]]) -> None:
        """Places the tensors of a group in what is made of them. The parts of an assembly number these tensors from 0 on."""
        placed, sources = self.placed, group.sources
        if len(made) == 1 and len({position for position, _ in made[0][1].parts}) == len(made[0][1].parts):
            ((name, assembly),) = made
            for position, view in assembly.parts:
                placed[sources[position]] = ((name, view),)
            return
        places: dict[int, list[Place]] = defaultdict(list)
        for name, assembly in made:
            for position, view in assembly.parts:
                places[position].append((name, view))
        for position, views in places.items():
            placed[sources[position]] = tuple(views)

    def _tie(self) -> None:
        """Fills tied targets that no checkpoint tensor fills from those that one does."""
        origin: dict[str, str] = {}
        changed = True
        while changed:  # one value may have any number of names, in pairs of any order
            changed = False
            for a, b in self.mapping.ties:
                for filled, empty in ((a, b), (b, a)):
                    source = filled if filled in self.filled else origin.get(filled)
                    if source is None or empty in self.filled or empty in origin:
                        continue
                    if empty in self.targets and self.targets[empty] == self.targets[source]:
                        origin[empty] = source
                        changed = True
        if not origin:
            return
        copies_of: dict[str, list[str]] = defaultdict(list)
        for empty, source in origin.items():
            copies_of[source].append(empty)
        for number, places in enumerate(self.placed):
            copies = tuple((other, view) for target, view in places for other in copies_of.get(target, ()))
            if copies:
                self.placed[number] = places + copies
