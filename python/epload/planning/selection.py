"""Selects the tensors of a checkpoint that are loaded, and their places in the model."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from epload.core import dtypes
from epload.core.columns import arange, column
from epload.core.pieces import Metadata, distinct_values
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


@dataclass(frozen=True, eq=False)
class Selection:
    """Checkpoint tensors that are loaded, in manifest order, and the places of each."""

    tensor: Tensor
    """int64 [t]: index into the manifest."""
    first: Tensor
    """int64 [t + 1]: places [first[i], first[i + 1]) are those of tensor i."""
    target: Tensor
    """int64 [p]: of each place."""
    view: Tensor
    """int64 [p]: of each place, an index into ``views``."""
    views: list[View]


class Choice(NamedTuple):
    """The tensors that are loaded, and those that are not and why."""

    chosen: Selection
    tied: tuple[str, ...]
    """Names of the checkpoint left out because another name of the same parameter is in it."""
    twins: tuple[Twin, ...]
    """Tied tensors that are left out, each with the checkpoint tensor that fills the same elements."""
    unplaced: list[int]
    """Checkpoint tensors that have no place, by number."""


def select(manifest: Metadata, targets: Targets, placed: list[tuple[Place, ...]], wanted: Set[int]) -> Choice:
    """Leaves out what has no place and is not ``wanted``, and a tied name whose parameter another name already fills.

    Raises:
        ModelMismatch: a tied name would fill other elements than those that the checkpoint has under another name.
    """
    index = targets.index
    tensor: list[int] = []
    first = [0]
    target_of: list[int] = []
    view_of: list[int] = []
    views: dict[int, tuple[int, View]] = {}  # by id; equal views of different tensors are mostly one object
    filled: dict[int, str] = {}
    left_out: list[tuple[int, int, str, View]] = []
    tied, unplaced = [], []
    for i, places in enumerate(placed):
        for name, view in places:
            target = index[name]
            if filled.setdefault(target, name) != name:
                left_out.append((target, i, name, view))
                continue
            target_of.append(target)
            view_of.append(views.setdefault(id(view), (len(views), view))[0])
        if not places:
            unplaced.append(i)
        if len(target_of) > first[-1] or i in wanted:
            tensor.append(i)
            first.append(len(target_of))
        elif places:
            tied.append(manifest.names[i])
    chosen = Selection(
        column(tensor), column(first), column(target_of), column(view_of), [view for _, view in views.values()]
    )
    return Choice(chosen, tuple(tied), _twins(manifest, targets, placed, filled, left_out), unplaced)


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
    sources, source_of = manifest.kinds.dtypes, manifest.kinds.dtype_of
    wanted, wanted_of = distinct_values(targets.dtypes)
    tensor_of = torch.repeat_interleave(arange(len(chosen.tensor)), chosen.first.diff())
    pair = source_of[chosen.tensor[tensor_of]] * len(wanted) + wanted_of[chosen.target]
    pairs = list(product(sources, wanted))
    differs = _flags([a is not b for a, b in pairs])[pair]
    is_scaled = torch.isin(chosen.target, column(list(scaled)))
    refused = _flags([a is not b and not dtypes.converts(a, b) for a, b in pairs])[pair] & ~is_scaled
    if refused.any():
        place = int(refused.nonzero()[0])
        target, tensor = int(chosen.target[place]), int(chosen.tensor[tensor_of[place]])
        raise ModelMismatch(
            f"{manifest.names[tensor]} is {dtypes.name(manifest.dtypes[tensor])} in the checkpoint, which the model's "
            f"{targets.names[target]} of {dtypes.name(targets.dtypes[target])} cannot take"
        )
    return len(torch.unique(tensor_of[differs]))


def _flags(values: list[bool]) -> Tensor:
    return torch.tensor(values, dtype=torch.bool, device="cpu")
