"""Checkpoints whose tensors, or parts of them, are byte ranges of files, in any format and in any byte store.

A format is one module with two functions, which ``FORMATS`` in :mod:`epload.checkpoint.opening` lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from math import prod

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.byte_store import ByteStore, StoredFile
from epload.checkpoint.file_sets import SINGLE
from epload.checkpoint.manifest import Manifest, OpenFiles, StoredTensor, TensorLocations
from epload.core.chunks import Chunks
from epload.core.columns import column
from epload.core.copy_table import CopyTable
from epload.core.pieces import Piece, Pieces
from epload.core.placement import Box, intersect
from epload.core.regions import Regions
from epload.errors import CheckpointError
from epload.native.ops import Pipe


class FileCheckpoint(Checkpoint):
    """Files in which each tensor, or each chunk of it, is one byte range."""

    _store: ByteStore

    def __init__(self, store: ByteStore, manifest: Manifest) -> None:
        """Takes ownership of the store. ``manifest`` has locations, which refer to the files of the store."""
        assert manifest.locations is not None
        self._store = store
        self._manifest = manifest
        self._locations = manifest.locations

    @classmethod
    def of(
        cls,
        opened: OpenFiles,
        stored: Iterable[StoredTensor],
        ignored: Sequence[str] = (),
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> FileCheckpoint:
        """Returns the checkpoint of open files.

        Args:
            stored: tensors in the files, or chunks of tensors, in the order of their bytes.
            ignored: names of entries that hold no tensor.
            shapes: of tensors that are stored in chunks, by name; by default the smallest that have room for the chunks.

        Raises:
            CheckpointError: a tensor is in two files, the index names one that is in none, or chunks are missing or overlap.
        """
        index, files = opened.index, opened.store.files
        chunks_of: dict[str, list[StoredTensor]] = {}
        for tensor in stored:
            file = files[tensor.file]
            if index is None or index.places(tensor.name, file.name):
                chunks_of.setdefault(tensor.name, []).append(tensor)
            elif file.name == SINGLE:  # which transformers reads whatever an index says
                raise CheckpointError(
                    f"{tensor.name} is both in {index.weight_map[tensor.name]} and in {file}: one is out of date"
                )
        if index is not None:
            index.check_complete({*chunks_of, *ignored})
        shape_of = []
        for name, chunks in chunks_of.items():
            shape = chunks[0].shape
            if len(chunks) > 1 or chunks[0].start is not None:
                shape = _shape(chunks, files) if shapes is None else shapes[name]
                chunks[:] = [chunk for chunk in chunks if 0 not in chunk.shape] or chunks[:1]
                if fault := _fault(shape, tuple(chunk.box for chunk in chunks)):
                    raise CheckpointError(f"{opened.source}: {name} of shape {list(shape)} {fault}")
            shape_of.append(shape)
        located = list(chain.from_iterable(chunks_of.values()))
        dtypes = tuple(chunks[0].dtype for chunks in chunks_of.values())
        table = None
        if len(located) > len(chunks_of):
            boxes = [[chunk.box for chunk in chunks] for chunks in chunks_of.values()]
            table = Chunks.of(shape_of, [dtype.itemsize for dtype in dtypes], boxes)
        locations = TensorLocations(
            tuple(opened.facts),
            column([chunk.file for chunk in located]),
            column([chunk.offset for chunk in located]),
            "" if index is None else index.digest,
            table,
        )
        names, source = tuple(chunks_of), opened.source
        return FileCheckpoint(opened.store, Manifest(names, tuple(shape_of), dtypes, source, locations, tuple(ignored)))

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        if self._locations.chunks is not None:
            self._fill_regions(bucket, pieces)
            return
        tensor, tensor_offset, bucket_offset, nbytes = Pieces.of(pieces).columns.unbind(1)
        offset = self._locations.offset[tensor] + tensor_offset
        self._store.read(torch.stack([self._locations.file[tensor], offset, bucket_offset, nbytes], 1), bucket)

    def fill_on_device(self, bucket: Tensor, pieces: Sequence[Piece], pipe: Pipe) -> bool:
        self._fill_regions(bucket, pieces, pipe)
        return True

    def _fill_regions(self, bucket: Tensor, pieces: Sequence[Piece], pipe: Pipe | None = None) -> None:
        columns, chunks = Pieces.of(pieces).columns, self._locations.chunks
        if chunks is not None:
            regions = Regions(*chunks.fill(bucket, columns), pipe)
        else:
            copies = CopyTable.of_bytes(columns[:, 2], columns[:, 3])
            regions = Regions([bucket], copies, columns[:, :2].contiguous(), pipe)
        self._read(regions)

    def read_regions(self, regions: Regions) -> int | None:
        chunks = self._locations.chunks
        parts = regions if chunks is None else regions.split(chunks)
        return None if parts is None else self._read(parts)

    def _read(self, regions: Regions) -> int:
        """Reads regions of chunks, or of tensors where these are not in chunks. Returns the bytes read."""
        return self._store.read_regions(self._locations.file, self._locations.offset, regions)


def _shape(chunks: Sequence[StoredTensor], files: Sequence[StoredFile]) -> tuple[int, ...]:
    """Returns the shape of the tensor that these are the chunks of, which files describe one by one."""
    first = chunks[0]
    for chunk in chunks:
        if chunk.start is None:
            raise CheckpointError(f"{first.name} is both in {files[first.file]} and in {files[chunks[1].file]}")
        if not len(chunk.start) == len(chunk.shape) == len(first.shape) or chunk.dtype != first.dtype:
            raise CheckpointError(
                f"{files[chunk.file]}: {first.name} has other dims or another dtype than its part in another file"
            )
    ends = (map(int.__add__, *chunk.box) for chunk in chunks)
    return tuple(map(max, zip(*ends, strict=True)))


@lru_cache
def _fault(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """Returns why boxes do not cover a shape exactly once; empty if they do."""
    for start, size in boxes:
        if any(a + n > length for a, n, length in zip(start, size, shape, strict=True)):
            return f"has a chunk at {list(start)} of {list(size)}, which reaches outside"
    covered = sum(prod(size) for _, size in boxes)
    if covered < prod(shape):
        return f"has chunks for only {covered} of its {prod(shape)} elements: files are missing, or it was not saved whole"
    # Along the dim that is divided most: all begin at 0 along another.
    dim = max(range(len(shape)), key=lambda d: len({start[d] for start, _ in boxes}), default=0)
    ordered = sorted(boxes, key=lambda box: box[0][dim : dim + 1])
    for i, a in enumerate(ordered):
        for b in ordered[i + 1 :]:
            if shape and b[0][dim] >= a[0][dim] + a[1][dim]:
                break  # as are all after it
            if intersect(a, b) is not None:
                return f"has chunks at {list(a[0])} and {list(b[0])} that overlap"
    return ""
