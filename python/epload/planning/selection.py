"""Selects the tensors of a checkpoint that are loaded, and their places in the model."""

from __future__ import annotations

from collections.abc import Sequence, Set
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

    loaded: int
    """Index into the manifest."""
    left_out: int
    dtype: torch.dtype
    """The parameter's."""
    names: tuple[str, str]
    """The parameter's names that they are for."""


class Selection(NamedTuple):
    """The tensors that are loaded, and those that are not and why."""

    tensors: list[int]
    """Checkpoint tensors that are loaded, by number, ascending."""
    placed: list[tuple[Place, ...]]
    """Places of each checkpoint tensor."""
    filled: Set[int]
    """Targets that the places fill."""
    tied: tuple[str, ...]
    """Names of the checkpoint left out because another name of the same parameter is in it."""
    twins: tuple[Twin, ...]
    """Tied tensors that are left out, each with the checkpoint tensor that fills the same elements."""
    unplaced: list[int]
    """Checkpoint tensors that have no place, by number."""


def select(manifest: Metadata, targets: Targets, placed: list[tuple[Place, ...]], wanted: Set[int]) -> Selection:
    """Leaves out what has no place and is not ``wanted``, and a tied name whose parameter another name already fills.

    Raises:
        ModelMismatch: a tied name would fill other elements than those that the checkpoint has under another name.
    """
    index = targets.index
    filled: dict[int, str] = {}
    left_out: list[tuple[int, int, str, View]] = []
    tensors, remaining, tied, unplaced = [], list(placed), [], []
    for i, places in enumerate(placed):
        others = [place for place in places if filled.setdefault(index[place[0]], place[0]) != place[0]]
        if others:
            left_out += [(index[name], i, name, view) for name, view in others]
            remaining[i] = tuple(place for place in places if place not in others)
        if remaining[i] or i in wanted:
            tensors.append(i)
        elif places:
            tied.append(manifest.names[i])
        if not places:
            unplaced.append(i)
    twins = _twins(manifest, targets, placed, filled, left_out)
    return Selection(tensors, remaining, filled.keys(), tuple(tied), twins, unplaced)


def _twins(
    manifest: Metadata,
    targets: Targets,
    placed: Sequence[tuple[Place, ...]],
    filled: dict[int, str],
    left_out: list[tuple[int, int, str, View]],
) -> tuple[Twin, ...]:
    """Returns what is left out with the checkpoint tensors that fill the same elements.

    Args:
        filled: the name under which a target is filled.
        left_out: places, each as target, checkpoint tensor, name and view.
    """
    if not left_out:
        return ()
    names = {filled[target] for target, *_ in left_out}
    tensor_of = {(name, view): i for i, places in enumerate(placed) for name, view in places if name in names}
    twins = {}
    for target, i, name, view in left_out:
        source = tensor_of.get((filled[target], view))
        if source is None:
            raise ModelMismatch(
                f"the model ties {filled[target]} and {name}, and {manifest.source} holds both, divided in different ways "
                f"(one by {manifest.names[i]}), so that they cannot be compared; leave one of them out of the checkpoint"
            )
        if source != i:
            twins[source, i, target] = Twin(source, i, targets.dtypes[target], (filled[target], name))
    return tuple(twins.values())


def check_dtypes(manifest: Metadata, targets: Targets, placed: Sequence[tuple[Place, ...]], scaled: Set[int]) -> int:
    """Returns the number of tensors whose dtype is converted. Raises ModelMismatch where it cannot be.

    Args:
        placed: the places of each tensor that is loaded.
        scaled: targets that are multiplied with scales after the load.
    """
    index, dtype_of = targets.index, targets.dtypes
    pairs = {
        (dtype_of[index[name]], source)
        for places, source in zip(placed, manifest.dtypes, strict=True)
        for name, _ in places
    }
    if all(a is b for a, b in pairs):
        return 0
    casts = 0
    for i, (places, source) in enumerate(zip(placed, manifest.dtypes, strict=True)):
        others = [target for name, _ in places if dtype_of[target := index[name]] is not source]
        casts += bool(others)
        for target in others:
            if target not in scaled and not dtypes.converts(source, dtype_of[target]):
                raise ModelMismatch(
                    f"{manifest.names[i]} is {dtypes.name(source)} in the checkpoint, which the model's "
                    f"{targets.names[target]} of {dtypes.name(dtype_of[target])} cannot take"
                )
    return casts
