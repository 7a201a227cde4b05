"""Checking a checkpoint by itself: its headers, that every byte can be read, and what is in it that is no number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.core.pieces import Piece

_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class Oddity:
    """A tensor with values that are no numbers."""

    name: str
    nans: int
    infs: int
    count: int
    """Of all its elements."""

    def __str__(self) -> str:
        return f"{self.name}: {self.nans} NaN and {self.infs} Inf in {self.count} elements"


def oddities(checkpoint: Checkpoint) -> Iterator[Oddity]:
    """Reads all of an opened checkpoint, whose headers are then already checked, with a buffer of 16 MiB.

    Raises:
        CheckpointError: a file is gone, cannot be read or ends too early.
    """
    manifest = checkpoint.manifest
    buffer = torch.empty(_PIECE_BYTES, dtype=torch.uint8)
    for number, (name, dtype, nbytes) in enumerate(
        zip(manifest.names, manifest.dtypes, manifest.nbytes_of(), strict=True)
    ):
        nans = infs = 0
        for begin in range(0, nbytes, _PIECE_BYTES):
            part = buffer[: min(_PIECE_BYTES, nbytes - begin)]
            checkpoint.fill(part, [Piece(number, begin, 0, len(part))])
            if dtype.is_floating_point or dtype.is_complex:
                values = _real(part.view(dtype))
                nans += int(values.isnan().sum())
                infs += int(values.isinf().sum())
        if nans or infs:
            yield Oddity(name, nans, infs, nbytes // dtype.itemsize)


def _real(values: Tensor) -> Tensor:
    """Of a dtype that can be asked: complex numbers as pairs, float8 widened."""
    if values.is_complex():
        return torch.view_as_real(values)
    return values.float() if values.dtype.itemsize == 1 else values
