"""Which tensors of a checkpoint are loaded, and into which places of the model."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from epload.core import dtypes
from epload.core.pieces import Metadata
from epload.core.views import View
from epload.errors import ModelMismatch
from epload.mapping.place import Place
from epload.model.targets import Targets


class Twin(NamedTuple):
    """Two checkpoint tensors that would fill the same elements of one parameter, and of which one is loaded."""

    kept: int
    """Index into the manifest."""
    left_out: int
    dtype: torch.dtype
    """The parameter's."""
    names: tuple[str, str]
    """The parameter's names that they are for."""


@dataclass
class Selection:
    """Checkpoint tensors that are loaded, in manifest order, and the places of each."""

    tensor: list[int] = field(default_factory=list)
    """Index into the manifest."""
    first: list[int] = field(default_factory=lambda: [0])
    """Places [first[i], first[i + 1]) are those of tensor i."""
    target: list[int] = field(default_factory=list)
    """Of each place."""
    view: list[int] = field(default_factory=list)
    """Of each place, an index into ``views``."""
    views: list[View] = field(default_factory=list)


def select(
    manifest: Metadata, targets: Targets, placed: Sequence[tuple[Place, ...]], wanted: Set[int]
) -> tuple[Selection, tuple[str, ...], tuple[Twin, ...]]:
    """Leaves out what has no place, and a tied name whose parameter another name already fills."""
    chosen = Selection()
    tied = []
    left_out: list[tuple[int, int, str, View]] = []
    filled: dict[int, str] = {}
    numbers: dict[int, int] = {}
    target_of, view_of, first = chosen.target, chosen.view, chosen.first
    for i, places in enumerate(placed):
        for name, view in places:
            target = targets.index[name]
            if filled.setdefault(target, name) != name:
                left_out.append((target, i, name, view))
                continue
            number = numbers.get(id(view))
            if number is None:
                number = numbers[id(view)] = len(chosen.views)
                chosen.views.append(view)
            target_of.append(target)
            view_of.append(number)
        if (end := len(target_of)) > first[-1] or i in wanted:
            chosen.tensor.append(i)
            first.append(end)
        elif places:
            tied.append(manifest.names[i])
    return chosen, tuple(tied), _twins(manifest, targets, placed, filled, left_out)


def _twins(
    manifest: Metadata,
    targets: Targets,
    placed: Sequence[tuple[Place, ...]],
    filled: dict[int, str],
    left_out: list[tuple[int, int, str, View]],
) -> tuple[Twin, ...]:
    """For what a tied name leaves out the checkpoint tensor that fills the same elements."""
    if not left_out:
        return ()
    names = {filled[target] for target, *_ in left_out}
    kept = {(name, view): i for i, places in enumerate(placed) for name, view in places if name in names}
    twins = {}
    for target, i, name, view in left_out:
        source = kept.get((filled[target], view))
        if source is None:
            raise ModelMismatch(
                f"the model ties {filled[target]} and {name}, and {manifest.source} holds both, divided in different ways "
                f"(one by {manifest.names[i]}), so that they cannot be compared; leave one of them out of the checkpoint"
            )
        if source != i:
            twins[source, i, target] = Twin(source, i, targets.dtypes[target], (filled[target], name))
    return tuple(twins.values())


def check_dtypes(manifest: Metadata, targets: Targets, chosen: Selection, scaled: Set[int]) -> int:
    """Number of tensors whose dtype is converted. Raises ModelMismatch where it cannot be.

    Args:
        scaled: targets that are multiplied with scales after the load.
    """
    wanted = [targets.dtypes[target] for target in chosen.target]
    casts = set()
    for i, begin, end in zip(chosen.tensor, chosen.first, chosen.first[1:], strict=False):
        source = manifest.dtypes[i]
        if end == begin + 1 and wanted[begin] is source:
            continue
        for place in range(begin, end):
            dtype = wanted[place]
            if dtype is source:
                continue
            if not dtypes.converts(source, dtype) and chosen.target[place] not in scaled:
                raise ModelMismatch(
                    f"{manifest.names[i]} is {dtypes.name(source)} in the checkpoint, which the model's "
                    f"{targets.names[chosen.target[place]]} of {dtypes.name(dtype)} cannot take"
                )
            casts.add(i)
    return len(casts)
