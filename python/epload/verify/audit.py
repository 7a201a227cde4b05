"""Checking a checkpoint without a model: that every byte can be read, and which tensors have NaN or Inf values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from epload.checkpoint.base import Checkpoint
from epload.core.pieces import Piece

_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class NonFinite:
    """A tensor with values that are not finite."""

    name: str
    nans: int
    infs: int
    count: int
    """Number of elements."""


def find_non_finite(checkpoint: Checkpoint, progress: Callable[[int], object] | None = None) -> Iterator[NonFinite]:
    """Reads all of an open checkpoint, whose headers were checked when it was opened. Raises CheckpointError.

    ``progress``: called with the number of bytes after each read.
    """
    manifest = checkpoint.manifest
    buffer = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
    tensors = zip(manifest.names, manifest.dtypes, manifest.nbytes_of(), strict=True)
    for index, (name, dtype, nbytes) in enumerate(tensors):
        nans = infs = 0
        for begin in range(0, nbytes, _CHUNK_BYTES):
            chunk = buffer[: min(_CHUNK_BYTES, nbytes - begin)]
            checkpoint.fill(chunk, [Piece(index, begin, 0, len(chunk))])
            if progress is not None:
                progress(len(chunk))
            if dtype.is_floating_point or dtype.is_complex:
                values = chunk.view(dtype)
                if dtype.is_complex:  # as pairs: torch counts neither kind in complex numbers
                    values = torch.view_as_real(values)
                elif dtype.itemsize == 1:  # torch has no isinf for float8
                    values = values.float()
                nans += int(values.isnan().sum())
                infs += int(values.isinf().sum())
        if nans or infs:
            yield NonFinite(name, nans, infs, nbytes // dtype.itemsize)
