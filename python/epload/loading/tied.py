"""Tied weights that a checkpoint has under several names: only one of them is loaded, so their values must be equal.

A config can declare a tie that the weights do not have. transformers then unties them. Here a tied parameter is one tensor, which
may be sharded already and can no longer be untied, so the load fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint, read_in_chunks
from epload.checkpoint.manifest import Manifest
from epload.core import dtypes
from epload.core.attempt import Attempt
from epload.errors import ModelMismatch
from epload.planning.selection import Twin
from epload.ranks.control import Control

_CHUNK = 4 << 20
"""Elements compared at a time."""


def compare(control: Control, checkpoint: Checkpoint, manifest: Manifest, twins: Sequence[Twin]) -> None:
    """Reads each pair once, in bounded memory, unless it lies in the same place.

    Raises:
        ModelMismatch: the values of a pair differ; names both.
        CheckpointError: a tensor cannot be read.
    """

    def progress(nbytes: int) -> None:
        control.progress += nbytes

    for twin in twins:
        control.doing = "comparing tied weights"
        _check(checkpoint, manifest, twin, progress)


def compare_anywhere(
    control: Control, src: int, checkpoint: Checkpoint | None, manifest: Manifest, twins: Sequence[Twin]
) -> None:
    """Compares the pairs of all ranks on rank ``src``, where ranks hold different modules, so that it need not have the tie
    itself. Collective."""
    mine = [[*twin[:2], dtypes.name(twin.dtype), *twin.names] for twin in twins]

    def union(views: dict[int, list[list[Any]]]) -> list[list[Any]]:
        return list({tuple(twin[:3]): twin for view in views.values() for twin in view}.values())

    anywhere: list[list[Any]] = control.settle("comparing tied weights", None, mine, union)
    if not anywhere:
        return
    all_twins = [Twin(a, b, dtypes.from_name(kind), (x, y)) for a, b, kind, x, y in anywhere]
    here = checkpoint if control.rank == src else None
    compared = Attempt(lambda: compare(control, here, manifest, all_twins) if here is not None else None)
    control.settle("comparing tied weights", compared.failure, patience=2)


def _check(checkpoint: Checkpoint, manifest: Manifest, twin: Twin, progress: Callable[[int], None]) -> None:
    numbers = twin.loaded, twin.left_out
    first_key, second_key = (manifest.names[number] for number in numbers)
    first_name, second_name = twin.names
    pair = f"the model ties {first_name} and {second_name}, but in {manifest.source} {first_key} and {second_key} have"
    fix = "Set tie_word_embeddings=False in the model's config before building it, or remove one of them from the checkpoint"
    if manifest.shapes[numbers[0]] != manifest.shapes[numbers[1]]:
        raise ModelMismatch(f"{pair} different shapes. {fix}")
    locations = manifest.locations
    if locations is not None and len({(locations.of_tensor(n), manifest.dtypes[n]) for n in numbers}) == 1:
        return
    first, second = (checkpoint.tensor(number) for number in numbers)
    if first is not None and second is not None:
        if first.data_ptr() == second.data_ptr() and first.stride() == second.stride() and first.dtype == second.dtype:
            return
        chunks: Iterator[tuple[Tensor, Tensor]] = zip(_rows(first), _rows(second), strict=True)
    elif checkpoint.read_once:
        raise ModelMismatch(f"{pair} values that cannot be compared: this checkpoint can be read only once. {fix}")
    else:
        chunks = zip(*(read_in_chunks(checkpoint, number, _CHUNK) for number in numbers), strict=True)
    for a, b in chunks:
        progress(a.nbytes + b.nbytes)
        if not _equal(a.to(twin.dtype), b.to(twin.dtype)):
            raise ModelMismatch(f"{pair} different values. {fix}")


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _rows(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor in memory, as chunks of rows."""
    if not tensor.ndim:
        yield tensor.detach()
        return
    step = max(1, _CHUNK * len(tensor) // max(1, tensor.numel()))
    for begin in range(0, len(tensor), step):
        yield tensor.detach()[begin : begin + step]
