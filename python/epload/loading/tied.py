"""Tied weights that a checkpoint has under several names: only one of them is loaded, so their values must be equal.

A config can declare a tie that the weights do not have. transformers then unties them. Here a tied parameter is one tensor, which
may be sharded already and can no longer be untied, so the load fails.
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
"""Elements compared at a time."""


class TiedWeightCheck:
    """Compares tied weights, and remembers which are equal until a file changes."""

    def __init__(self) -> None:
        self._equal: set[tuple[object, ...]] = set()

    def check(
        self, checkpoint: Checkpoint, manifest: Manifest, twins: Iterable[Twin], progress: Callable[[int], None]
    ) -> None:
        """Reads each pair once, in bounded memory, unless both are at the same offset or were compared before.

        Args:
            progress: called with the number of bytes read, repeatedly.

        Raises:
            ModelMismatch: the values of a pair differ; names both.
            CheckpointError: a tensor cannot be read.
        """
        identity = _identity(manifest)
        equal: set[tuple[object, ...]] = set()
        for twin in twins:
            key = (identity, manifest.names[twin.kept], manifest.names[twin.left_out], twin.dtype)
            if identity is None or key not in self._equal:
                _check(checkpoint, manifest, twin, progress)
            if identity is not None:
                equal.add(key)
        self._equal = equal


def _identity(manifest: Manifest) -> tuple[object, ...] | None:
    """A value that changes if the checkpoint's files do; None if it has no files, or they cannot be inspected."""
    if manifest.places is None:
        return None
    source = Path(manifest.source)
    folder = source if source.is_dir() else source.parent
    try:
        stats = [os.stat(folder / file.name) for file in manifest.places.files]
    except OSError:
        return None
    return manifest.digest, tuple((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats)


def _check(checkpoint: Checkpoint, manifest: Manifest, twin: Twin, progress: Callable[[int], None]) -> None:
    numbers = twin.kept, twin.left_out
    kept, left_out = (manifest.names[number] for number in numbers)
    first_name, second_name = twin.names
    pair = f"the model ties {first_name} and {second_name}, but in {manifest.source} {kept} and {left_out} have"
    fix = "Set tie_word_embeddings=False in the model's config before building it, or remove one of them from the checkpoint"
    if manifest.shapes[numbers[0]] != manifest.shapes[numbers[1]]:
        raise ModelMismatch(f"{pair} different shapes. {fix}")
    places = manifest.places
    if (
        places is not None
        and len({(int(places.file[n]), int(places.offset[n]), manifest.dtypes[n]) for n in numbers}) == 1
    ):
        return
    first, second = (checkpoint.tensor(number) for number in numbers)
    if first is not None and second is not None:
        if first.data_ptr() == second.data_ptr() and first.stride() == second.stride() and first.dtype == second.dtype:
            return
        chunks: Iterator[tuple[Tensor, Tensor]] = zip(_rows(first), _rows(second), strict=True)
    elif checkpoint.once:
        raise ModelMismatch(f"{pair} values that cannot be compared: this checkpoint can be read only once. {fix}")
    else:
        chunks = zip(*(_read(checkpoint, manifest, number) for number in numbers), strict=True)
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


def _read(checkpoint: Checkpoint, manifest: Manifest, number: int) -> Iterator[Tensor]:
    """A tensor of a checkpoint, as chunks of elements. All chunks share one buffer."""
    dtype = manifest.dtypes[number]
    total = manifest.nbytes_of()[number]
    buffer = torch.empty(min(total, _CHUNK * dtype.itemsize), dtype=torch.uint8)
    for begin in range(0, total, len(buffer)):
        part = buffer[: min(len(buffer), total - begin)]
        checkpoint.fill(part, [Piece(number, begin, 0, len(part))])
        yield part.view(dtype)
