"""Checkpoints whose tensors, or parts of them, are byte ranges of files, in any format and in any byte store.

A format is one module with two functions, which ``FORMATS`` in :mod:`epload.checkpoint.opening` lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.byte_store import ByteStore
from epload.checkpoint.manifest import Manifest, TensorLocations
from epload.checkpoint.open_files import OpenFiles, StoredTensor
from epload.core.chunks import Chunks
from epload.core.columns import column
from epload.core.copy_table import CopyTable
from epload.core.pieces import Piece, Pieces
from epload.core.regions import Regions
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
        """Returns the checkpoint of open files. Arguments and errors are those of :meth:`OpenFiles.tensors`."""
        tensors = opened.tensors(stored, ignored, shapes)
        shape_of, chunks_of = zip(*tensors.values(), strict=True) if tensors else ((), ())
        located = list(chain.from_iterable(chunks_of))
        dtypes = tuple(chunks[0].dtype for chunks in chunks_of)
        table = None
        if len(located) > len(tensors):
            boxes = [[chunk.box for chunk in chunks] for chunks in chunks_of]
            table = Chunks.of(shape_of, [dtype.itemsize for dtype in dtypes], boxes)
        locations = TensorLocations(
            tuple(opened.facts),
            column([chunk.file for chunk in located]),
            column([chunk.offset for chunk in located]),
            "" if opened.index is None else opened.index.digest,
            table,
        )
        return FileCheckpoint(
            opened.store, Manifest(tuple(tensors), shape_of, dtypes, opened.source, locations, tuple(ignored))
        )

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
