"""Tied weights that a checkpoint holds under several names: one of them is loaded, so all of them must have one value.

A config can claim a tie that the weights do not have. transformers then gives up the tie; here a tied parameter is one tensor,
often sharded as one, which cannot be taken apart any more, so that the load is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.core.pieces import Piece
from epload.errors import ModelMismatch
from epload.planning.plan import Twin

_CHUNK = 4 << 20
"""Elements that are compared at a time."""


class Comparison:
    """Compares twins, and remembers which were equal until a file changes."""

    def __init__(self) -> None:
        self._equal: set[tuple[object, ...]] = set()

    def check(
        self, checkpoint: Checkpoint, manifest: Manifest, twins: Iterable[Twin], progress: Callable[[int], None]
    ) -> None:
        """Reads each pair once, in bounded memory, unless it lies in the same place or was compared before.

        Args:
            progress: told of the bytes read, from time to time.

        Raises:
            ModelMismatch: a pair differs; it names both.
            CheckpointError: they cannot be read.
        """
        facts = _identity(manifest)
        equal: set[tuple[object, ...]] = set()
        for twin in twins:
            known = (
                None if facts is None else (facts, manifest.names[twin.kept], manifest.names[twin.left_out], twin.dtype)
            )
            if known is None or known not in self._equal:
                _check(checkpoint, manifest, twin, progress)
            if known is not None:
                equal.add(known)
        self._equal = equal


def _identity(manifest: Manifest) -> tuple[object, ...] | None:
    """What changes when somebody writes to the checkpoint's files; None if it has none that can be asked."""
    if manifest.locations is None:
        return None
    source = Path(manifest.source)
    folder = source if source.is_dir() else source.parent
    try:
        seen = [os.stat(folder / facts.name) for facts in manifest.locations.files]
    except OSError:
        return None
    return manifest.digest, tuple((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in seen)


def _check(checkpoint: Checkpoint, manifest: Manifest, twin: Twin, progress: Callable[[int], None]) -> None:
    numbers = twin.kept, twin.left_out
    kept, left_out = (manifest.names[number] for number in numbers)
    said = f"the model ties {twin.names[0]} and {twin.names[1]}, and {manifest.source} holds {kept} and {left_out} for them"
    way_out = "Set tie_word_embeddings=False in the config that the model is built from, or leave one of the two out"
    if manifest.shapes[numbers[0]] != manifest.shapes[numbers[1]]:
        raise ModelMismatch(f"{said}, of different shapes. {way_out}")
    locations = manifest.locations
    if (
        locations is not None
        and len({(int(locations.file[n]), int(locations.offset[n]), manifest.dtypes[n]) for n in numbers}) == 1
    ):
        return
    first, second = (checkpoint.tensor(number) for number in numbers)
    if first is not None and second is not None:
        if first.data_ptr() == second.data_ptr() and first.stride() == second.stride() and first.dtype == second.dtype:
            return
        chunks: Iterator[tuple[Tensor, Tensor]] = zip(_rows(first), _rows(second), strict=True)
    elif checkpoint.read_once:
        raise ModelMismatch(f"{said}, which cannot be compared, as the checkpoint can be read only once. {way_out}")
    else:
        chunks = zip(*(_read(checkpoint, manifest, number) for number in numbers), strict=True)
    for a, b in chunks:
        progress(a.nbytes + b.nbytes)
        if not _same(a.to(twin.dtype), b.to(twin.dtype)):
            raise ModelMismatch(f"{said}, with different values. {way_out}")


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _rows(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor in memory in runs of rows."""
    if not tensor.ndim:
        yield tensor.detach()
        return
    step = max(1, _CHUNK * len(tensor) // max(1, tensor.numel()))
    for begin in range(0, len(tensor), step):
        yield tensor.detach()[begin : begin + step]


def _read(checkpoint: Checkpoint, manifest: Manifest, number: int) -> Iterator[Tensor]:
    """A tensor of a checkpoint in runs of elements, each in the same memory."""
    dtype = manifest.dtypes[number]
    total = manifest.nbytes_of()[number]
    buffer = torch.empty(min(total, _CHUNK * dtype.itemsize), dtype=torch.uint8)
    for begin in range(0, total, len(buffer)):
        part = buffer[: min(len(buffer), total - begin)]
        checkpoint.fill(part, [Piece(number, begin, 0, len(part))])
        yield part.view(dtype)
