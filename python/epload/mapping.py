"""From checkpoint names and layouts to regions of the model's parameters. Pure: names and shapes in, placements out.

A checkpoint tensor lands in one box of one target, in row-major order. Renaming changes which target; stacking per-expert
tensors puts each at its index of a leading dim; concatenating puts each part behind the one before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as MappingType
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from epload.errors import ModelMismatch
from epload.placement import Box

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rename:
    """Where the regular expression ``source`` is first found in a checkpoint name, it becomes ``target`` (as in re.sub)."""

    source: str
    target: str


@dataclass(frozen=True)
class Merge:
    """Several checkpoint tensors form one target.

    Each source pattern, a regular expression matched at the end of a name, is one part; parts are concatenated along
    ``concat_dim`` in the order given. A group named ``index`` in it (an expert's number) is stacked along ``stack_dim``, a
    dim that the sources do not have. ``target`` replaces the matched end of the name. Dims are the target's.
    """

    sources: tuple[str, ...]
    target: str
    stack_dim: int | None = None
    concat_dim: int | None = None


Placed = tuple[str, Box]
"""Where one checkpoint tensor lands: a target's name and a box of it. Equal boxes of one call are one object."""


@dataclass(frozen=True)
class Mapping:
    """Rules that are applied in order: all renames, then the first merge that matches."""

    renames: tuple[Rename, ...] = ()
    merges: tuple[Merge, ...] = ()

    @classmethod
    def identity(cls) -> Mapping:
        """Names and shapes as they are."""
        return cls()

    @classmethod
    def from_transformers(cls, model: Any) -> Mapping:
        """The conversion that the transformers library (5.x) declares for ``model``.

        Renames, stacking of per-expert tensors and concatenation are understood. A declared conversion of another kind is
        left out; its keys then show up as missing and unexpected rather than being loaded wrongly.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

        renames: list[Rename] = []
        merges: list[Merge] = []
        for transform in get_model_conversion_mapping(model):
            if getattr(transform, "scope_prefix", None):
                continue
            if type(transform) is WeightRenaming:
                if "\\" not in transform.target_patterns[0]:  # a back-reference would count the library's own groups
                    renames.append(Rename(transform.compiled_sources.pattern, transform.target_patterns[0]))
            elif isinstance(transform, WeightConverter) and len(transform.target_patterns) == 1:
                stack = [op for op in transform.operations if isinstance(op, MergeModulelist)]
                concat = [op for op in transform.operations if isinstance(op, Concatenate)]
                if len(stack) + len(concat) == len(transform.operations) and len(stack) <= 1 and len(concat) <= 1:
                    merges.append(
                        Merge(
                            tuple(_from_glob(pattern) for pattern in transform.source_patterns),
                            transform.target_patterns[0],
                            stack[0].dim if stack else None,
                            concat[0].dim if concat else None,
                        )
                    )
        return cls(tuple(renames), tuple(merges))

    def place(
        self, names: Sequence[str], shapes: Sequence[Shape], targets: MappingType[str, Shape]
    ) -> list[Placed | None]:
        """For each checkpoint tensor the box of a target that it fills, or None if the model has no place for it.

        Raises:
            ModelMismatch: a shape that does not fit, two sources for one region, an incomplete set; names the keys.
        """
        placed: list[Placed | None] = [None] * len(names)
        parts: dict[str, list[_Part]] = {}
        filled: dict[str, str] = {}
        merges = [
            (merge, part, re.compile(f"(?:{source})$"))
            for merge in self.merges
            for part, source in enumerate(merge.sources)
        ]
        renames = [(re.compile(rename.source), rename.target) for rename in self.renames]
        whole = {shape: ((0,) * len(shape), shape) for shape in dict.fromkeys(shapes)}
        for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            target = name
            if target not in targets:
                for pattern, replacement in renames:
                    target = pattern.sub(replacement, target, count=1)
                if (part := _match(merges, i, target, targets)) is not None:
                    parts.setdefault(part.target, []).append(part)
                    continue
            wanted = targets.get(target)
            if wanted is None:
                continue
            if shape != wanted:
                raise ModelMismatch(
                    f"{name} has shape {list(shape)} in the checkpoint but the model's {target} has {list(wanted)}"
                )
            if target in filled:
                raise ModelMismatch(f"both {filled[target]} and {name} would fill the model's {target}")
            filled[target] = name
            placed[i] = (target, whole[shape])
        boxes: dict[Box, Box] = {}
        for target, sources in parts.items():
            if target in filled:
                other = names[sources[0].tensor]
                raise ModelMismatch(
                    f"both {filled[target]} and, as one of its parts, {other} would fill the model's {target}"
                )
            for source, box in zip(sources, _assemble(target, targets[target], sources, names, shapes), strict=True):
                placed[source.tensor] = (target, boxes.setdefault(box, box))
        return placed


@dataclass(frozen=True)
class _Part:
    tensor: int
    target: str
    merge: Merge
    part: int
    index: int | None


def _match(
    merges: Sequence[tuple[Merge, int, re.Pattern[str]]], tensor: int, name: str, targets: MappingType[str, Shape]
) -> _Part | None:
    for merge, number, pattern in merges:
        if match := pattern.search(name):
            target = name[: match.start()] + merge.target
            index = match.groupdict().get("index")
            return (
                _Part(tensor, target, merge, number, None if index is None else int(index))
                if target in targets
                else None
            )
    return None


def _from_glob(pattern: str) -> str:
    """transformers writes ``mlp.experts.*.gate_proj.weight``; the star is the expert's number."""
    start = "" if pattern.startswith(".") else r"(?<![^.])"
    return start + re.escape(pattern.lstrip("^").rstrip("$")).replace(r"\*", r"(?P<index>\d+)", 1)


def _assemble(
    target: str, wanted: Shape, sources: list[_Part], names: Sequence[str], shapes: Sequence[Shape]
) -> list[Box]:
    """Boxes of the parts of one target, checked to fill it exactly once."""
    merge = sources[0].merge
    stack, concat = merge.stack_dim, merge.concat_dim
    for part in sources:
        if part.merge != merge:
            raise ModelMismatch(
                f"{names[sources[0].tensor]} and {names[part.tensor]} would fill {target} by two different rules"
            )

    def name(part: _Part) -> str:
        return names[part.tensor]

    def refuse(what: str) -> ModelMismatch:
        return ModelMismatch(f"the model's {target} has shape {list(wanted)}, but {what}")

    for which, dim in (("stacked", stack), ("concatenated", concat)):
        if dim is not None and not 0 <= dim < len(wanted):
            raise refuse(f"{name(sources[0])} would be {which} along its dim {dim}")
    if concat is None and len(merge.sources) > 1:
        raise refuse(f"nothing keeps {name(sources[0])} and its other parts apart: the rule has no concat_dim")
    seen: dict[tuple[int, int | None], _Part] = {}
    for part in sources:
        if (key := (part.part, part.index)) in seen:
            raise refuse(f"both {name(seen[key])} and {name(part)} would fill one region of it")
        seen[key] = part
        if stack is not None and (part.index is None or part.index >= wanted[stack]):
            raise refuse(f"{name(part)} has index {part.index}")

    indices: Sequence[int | None] = range(wanted[stack]) if stack is not None else [None]
    absent = [(p, e) for e in indices for p in range(len(merge.sources)) if (p, e) not in seen]
    if absent:
        number, index = absent[0]
        which = re.sub(r"\(\?P<index>[^)]*\)", str(index), merge.sources[number])
        which = which.replace("(?<![^.])", "").replace("\\", "")
        raise refuse(f"{len(absent)} of its {len(indices) * len(merge.sources)} parts are missing, the first {which}")

    boxes: list[Box] = [((), ())] * len(sources)
    position = {part: i for i, part in enumerate(sources)}
    for index in indices:
        at = 0
        for number in range(len(merge.sources)):
            part = seen[(number, index)]
            shape = shapes[part.tensor]
            if stack is not None:
                shape = (*shape[:stack], 1, *shape[stack:])
            offset = [0] * len(wanted)
            if stack is not None:
                offset[stack] = index or 0
            if concat is not None and len(shape) == len(wanted):
                offset[concat] = at
                at += shape[concat]
            if len(shape) != len(wanted) or any(o + n > w for o, n, w in zip(offset, shape, wanted, strict=True)):
                raise refuse(f"{name(part)} has shape {list(shapes[part.tensor])}")
            boxes[position[part]] = (tuple(offset), shape)
    filled = sum(prod(size) for _, size in boxes)
    if filled != prod(wanted):
        raise refuse(f"its parts fill {filled} of its {prod(wanted)} elements ({name(sources[0])}, ...)")
    return boxes


def resolve(mapping: Mapping | str, model: Any) -> Mapping:
    """What ``mapping=`` means for this model: ``"auto"`` is what a transformers model declares, else names as they are.

    Raises:
        ValueError: neither a Mapping nor ``"auto"``.
    """
    if isinstance(mapping, Mapping):
        return mapping
    if mapping != "auto":
        raise ValueError(f"expected mapping to be 'auto' or an epload.Mapping, got {mapping!r}")
    if any(cls.__module__.split(".")[0] == "transformers" for cls in type(model).__mro__):
        return Mapping.from_transformers(model)
    return Mapping.identity()
