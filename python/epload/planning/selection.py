"""Selects the tensors of a checkpoint that are loaded, and their places in the model."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import torch

from epload.core import dtypes
from epload.core.pieces import Metadata
from epload.errors import ModelMismatch
from epload.mapping.place import Place
from epload.model.targets import Targets


class TiedPair(NamedTuple):
    """Two checkpoint tensors that would fill the same elements of one parameter, and of which one is loaded."""

    loaded: int
    """Index into the manifest."""
    skipped: int
    dtype: torch.dtype
    """The parameter's."""
    names: tuple[str, str]
    """The parameter's names that they are for."""


def select(
    manifest: Metadata, targets: Targets, placed: list[tuple[Place, ...]], required: Set[int], scaled: Set[int]
) -> tuple[list[int], list[tuple[Place, ...]], Set[int], tuple[str, ...], tuple[TiedPair, ...], int]:
    """Skips what has no place and is not ``required``, and a tied name whose parameter another name already fills.

    Args:
        placed: the places of each tensor.
        scaled: targets that are multiplied with scales after the load.

    Returns:
        The tensors that are loaded, by number, ascending; the places of each tensor; the targets that they fill; the names of the
        checkpoint that are skipped because another name of the same parameter is in it; the pairs of those; and the number of
        tensors whose dtype is converted.

    Raises:
        ModelMismatch: a dtype cannot be converted, or a tied name would fill other elements than those that the checkpoint has
            under another name.
    """
    index, dtype_of = targets.index, targets.dtypes
    filled: dict[int, str] = {}
    skipped: list[tuple[int, Place]] = []
    tensors, remaining, tied, casts = [], [], [], 0
    for i, (places, source) in enumerate(zip(placed, manifest.dtypes, strict=True)):
        selected, converts = places, False
        for place in places:
            target = index[place[0]]
            if filled.setdefault(target, place[0]) != place[0]:
                skipped.append((i, place))
                selected = tuple(other for other in selected if other is not place)
            elif (dtype := dtype_of[target]) is not source:
                converts = True
                if target not in scaled and not dtypes.converts(source, dtype):
                    raise ModelMismatch(
                        f"{manifest.names[i]} is {dtypes.name(source)} in the checkpoint, which the model's "
                        f"{targets.names[target]} of {dtypes.name(dtype)} cannot take{_way_out(source, dtype)}"
                    )
        casts += converts
        remaining.append(selected)
        if selected or i in required:
            tensors.append(i)
        elif places:
            tied.append(manifest.names[i])
    pairs = _pair(manifest, targets, placed, filled, skipped) if skipped else ()
    return tensors, remaining, filled.keys(), tuple(tied), pairs, casts


def _way_out(source: torch.dtype, dtype: torch.dtype) -> str:
    to_fp8 = dtypes.is_wide(source) and dtype in dtypes.FP8
    return "; pass mapping=epload.mapping.Quantize() to quantize it" if to_fp8 else ""


def _pair(
    manifest: Metadata,
    targets: Targets,
    placed: Sequence[tuple[Place, ...]],
    filled: dict[int, str],
    skipped: Sequence[tuple[int, Place]],
) -> tuple[TiedPair, ...]:
    """Pairs what is skipped with the checkpoint tensors that fill the same elements.

    Args:
        filled: the name under which each target is filled.
        skipped: checkpoint tensors, each with the place that is skipped.
    """
    tensor_of = {place: i for i, places in enumerate(placed) for place in places}
    pairs = {}
    for i, (name, view) in skipped:
        target = targets.index[name]
        loaded = tensor_of.get((filled[target], view))
        if loaded is None:
            raise ModelMismatch(
                f"the model ties {filled[target]} and {name}, and {manifest.source} holds both, divided in different ways "
                f"(one by {manifest.names[i]}), so that they cannot be compared; leave one of them out of the checkpoint"
            )
        if loaded != i:
            pairs[loaded, i, target] = TiedPair(loaded, i, targets.dtypes[target], (filled[target], name))
    return tuple(pairs.values())
