"""Checkpoints whose tensors, or parts of them, are byte ranges of files, in any format and in any byte store."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.byte_store import ByteStore, StoredFile
from epload.checkpoint.index import Index
from epload.checkpoint.manifest import FileFacts, FileLayout, Manifest, TensorLocations
from epload.core.columns import column
from epload.core.copy_table import CopyTable
from epload.core.pieces import Piece, Pieces
from epload.core.regions import Regions
from epload.errors import CheckpointError
from epload.native.ops import Pipe


class FileCheckpoint(Checkpoint):
    """Files in which each tensor, or each chunk of it, is one byte range. Adjacent ranges are read with one request."""

    _store: ByteStore

    def __init__(self, store: ByteStore, manifest: Manifest) -> None:
        """Takes ownership of the store. ``manifest`` has locations, which refer to the files of the store."""
        assert manifest.locations is not None
        self._store = store
        self._manifest = manifest
        self._locations = manifest.locations

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        columns, locations = Pieces.of(pieces).columns, self._locations
        if locations.chunks is not None:
            targets, copies, origins = locations.chunks.fill(bucket, columns)
            self._store.read_regions(locations.file, locations.offset, Regions(targets, copies, origins))
            return
        tensor, tensor_offset, bucket_offset, nbytes = columns.unbind(1)
        offset = locations.offset[tensor] + tensor_offset
        self._store.read(torch.stack(_coalesced(locations.file[tensor], offset, bucket_offset, nbytes), 1), bucket)

    def fill_on_device(self, bucket: Tensor, pieces: Sequence[Piece], pipe: Pipe) -> bool:
        columns, locations = Pieces.of(pieces).columns, self._locations
        if locations.chunks is not None:
            regions = Regions(*locations.chunks.fill(bucket, columns), pipe)
        else:
            regions = Regions(
                [bucket], CopyTable.of_bytes(columns[:, 2], columns[:, 3]), columns[:, :2].contiguous(), pipe
            )
        self._store.read_regions(locations.file, locations.offset, regions)
        return True

    def read_regions(self, regions: Regions) -> int | None:
        locations = self._locations
        parts = regions if locations.chunks is None else regions.split(locations.chunks)
        return None if parts is None else self._store.read_regions(locations.file, locations.offset, parts)


def _coalesced(file: Tensor, offset: Tensor, position: Tensor, nbytes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Joins ranges that follow each other both in the file and in the buffer. Columns are int64 [n]."""
    apart = (
        (file[1:] != file[:-1]) | (offset[1:] != (offset + nbytes)[:-1]) | (position[1:] != (position + nbytes)[:-1])
    )
    first = torch.cat([torch.ones_like(file[:1], dtype=torch.bool), apart])
    run = first.cumsum(0) - 1
    total = torch.zeros(int(first.sum()), dtype=torch.int64).index_add_(0, run, nbytes)
    return file[first], offset[first], position[first], total


def merge_layouts(
    files: Sequence[StoredFile],
    layouts: Sequence[FileLayout],
    facts: Sequence[FileFacts],
    source: str,
    index: Index | None,
) -> Manifest:
    """The manifest of files with these layouts.

    Args:
        files: all of one format.
        layouts, facts: of each file.
        source: for error messages.
        index: names the file of each tensor, if there is an index.

    Raises:
        CheckpointError: a tensor is in two files, or the index names one that is in none.
    """
    numbers: list[int] = []
    offsets: list[int] = []
    file_of: dict[str, int] = {}
    shapes: list[tuple[int, ...]] = []
    kinds: list[torch.dtype] = []
    ignored: dict[str, None] = {}
    for number, (file, layout) in enumerate(zip(files, layouts, strict=True)):
        ignored |= dict.fromkeys(layout.ignored)
        order = layout.order
        if index is not None:
            order = [i for i in order if index.places(layout.names[i], file.name)]
        names, ordered_shapes, types, begins = layout.names, layout.shapes, layout.dtypes, layout.offsets
        if order != range(len(names)):
            names, ordered_shapes = [names[i] for i in order], [ordered_shapes[i] for i in order]
            types, begins = [types[i] for i in order], [begins[i] for i in order]
        if (twice := next(filter(file_of.__contains__, names), None)) is not None:
            raise CheckpointError(f"{twice} is both in {files[file_of[twice]]} and in {file}")
        file_of.update(dict.fromkeys(names, number))
        shapes += ordered_shapes
        kinds += types
        numbers += [number] * len(names)
        offsets += begins
    if index is not None:
        index.check_complete({*file_of, *ignored})
    locations = TensorLocations(
        tuple(facts),
        column(numbers),
        column(offsets),
        "" if index is None else index.digest,
    )
    return Manifest(tuple(file_of), tuple(shapes), tuple(kinds), source, locations, tuple(ignored))
