"""Tensors that are stored in parts, each a box of its tensor: chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from epload.checkpoint.file_checkpoint import FileCheckpoint, OpenFiles
from epload.checkpoint.manifest import Manifest, StoredTensor, TensorLocations
from epload.core.chunks import Chunks
from epload.core.columns import column
from epload.core.placement import Box, intersect
from epload.errors import CheckpointError


@dataclass
class ChunkedTensor:
    """A tensor and its chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[Box] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    """Number of the file, and offset in it, of each box."""


def of_shards(opened: OpenFiles, layouts: Sequence[Sequence[StoredTensor]]) -> FileCheckpoint:
    """Returns the checkpoint of safetensors files that each have one rank's parts of tensors.

    Raises:
        CheckpointError: parts are missing or overlap, or differ in what they are parts of.
    """
    tensors: dict[str, ChunkedTensor] = {}
    for number, (file, layout) in enumerate(zip(opened.files, layouts, strict=True)):
        for name, dtype, size, offset, part in layout:
            start = part if part is not None else (0,) * len(size)
            tensor = tensors.setdefault(name, ChunkedTensor(size, dtype))
            if len(start) != len(size) or len(size) != len(tensor.shape) or dtype != tensor.dtype:
                raise CheckpointError(f"{file}: {name} has other dims or another dtype than its part in another file")
            tensor.shape = tuple(max(n, a + b) for n, a, b in zip(tensor.shape, start, size, strict=True))
            if 0 not in size:
                tensor.boxes.append((start, size))
                tensor.places.append((number, offset))
    check_covered(tensors, opened.source)
    return checkpoint_of(tensors, opened)


def checkpoint_of(tensors: dict[str, ChunkedTensor], opened: OpenFiles, ignored: Sequence[str] = ()) -> FileCheckpoint:
    """Returns the checkpoint of tensors whose chunks have places.

    Args:
        tensors: by name.
        opened: the files.
        ignored: names of entries that hold no tensor.
    """
    names = tuple(sorted(tensors, key=lambda name: tensors[name].places[:1]))
    ordered = [tensors[name] for name in names]
    shapes, dtypes = tuple(tensor.shape for tensor in ordered), tuple(tensor.dtype for tensor in ordered)
    chunks = None
    if any(len(tensor.boxes) != 1 for tensor in ordered):
        chunks = Chunks.of(shapes, [dtype.itemsize for dtype in dtypes], [tensor.boxes for tensor in ordered])
    file, offset = (column([place[i] for tensor in ordered for place in tensor.places]) for i in (0, 1))
    digest = "" if opened.index is None else opened.index.digest
    locations = TensorLocations(tuple(opened.facts), file, offset, digest, chunks)
    return FileCheckpoint(opened.store, Manifest(names, shapes, dtypes, opened.source, locations, tuple(ignored)))


def check_covered(tensors: dict[str, ChunkedTensor], source: str) -> None:
    """Raises CheckpointError if the chunks of a tensor do not cover it exactly once."""
    checked: set[tuple[object, ...]] = set()
    for name, tensor in tensors.items():
        key = (tensor.shape, *tensor.boxes)
        if key not in checked and (fault := _fault(tensor.shape, tensor.boxes)):
            raise CheckpointError(f"{source}: {name} of shape {list(tensor.shape)} {fault}")
        checked.add(key)


def _fault(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """Returns why boxes do not cover a shape exactly once; empty if they do."""
    for start, size in boxes:
        if any(a + n > length for a, n, length in zip(start, size, shape, strict=True)):
            return f"has a chunk at {list(start)} of {list(size)}, which reaches outside"
    covered, ordered = sum(prod(size) for _, size in boxes), sorted(boxes)
    if covered < prod(shape):
        return (
            f"has chunks for only {covered} of its {prod(shape)} elements: files are missing, or it was not saved whole"
        )
    for i, a in enumerate(ordered):
        for b in ordered[i + 1 :]:
            if shape and b[0][0] >= a[0][0] + a[1][0]:
                break  # as are all after it
            if intersect(a, b) is not None:
                return f"has chunks at {list(a[0])} and {list(b[0])} that overlap"
    return ""
