"""Checkpoints whose tensors, or parts of them, are byte ranges of files, in any format and in any byte store.

A format is one module with a :class:`Format`, which ``FORMATS`` in :mod:`epload.checkpoint.opening` lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.byte_store import ByteStore, StoredFile
from epload.checkpoint.index import Index
from epload.checkpoint.manifest import FileFacts, Manifest, StoredTensor, TensorLocations
from epload.checkpoint.state_dict import StateDictCheckpoint
from epload.core.columns import column
from epload.core.copy_table import CopyTable
from epload.core.pieces import Piece, Pieces, Quantization
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

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def declare(self, quantization: Quantization | None) -> None:
        """Adds what a configuration next to the files declares to the manifest."""
        self._manifest = self._manifest.with_quantization(quantization)

    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        columns, locations = Pieces.of(pieces).columns, self._locations
        if locations.chunks is not None:
            regions = Regions(*locations.chunks.fill(bucket, columns))
            self._store.read_regions(locations.file, locations.offset, regions)
            return
        tensor, tensor_offset, bucket_offset, nbytes = columns.unbind(1)
        offset = locations.offset[tensor] + tensor_offset
        self._store.read(torch.stack([locations.file[tensor], offset, bucket_offset, nbytes], 1), bucket)

    def fill_on_device(self, bucket: Tensor, pieces: Sequence[Piece], pipe: Pipe) -> bool:
        columns, locations = Pieces.of(pieces).columns, self._locations
        if locations.chunks is not None:
            regions = Regions(*locations.chunks.fill(bucket, columns), pipe)
        else:
            copies = CopyTable.of_bytes(columns[:, 2], columns[:, 3])
            regions = Regions([bucket], copies, columns[:, :2].contiguous(), pipe)
        self._store.read_regions(locations.file, locations.offset, regions)
        return True

    def read_regions(self, regions: Regions) -> int | None:
        locations = self._locations
        parts = regions if locations.chunks is None else regions.split(locations.chunks)
        return None if parts is None else self._store.read_regions(locations.file, locations.offset, parts)


@dataclass(frozen=True)
class OpenFiles:
    """The files of a checkpoint that is not described yet."""

    files: Sequence[StoredFile]
    facts: Sequence[FileFacts]
    """One entry per file."""
    store: ByteStore
    """The store of these files."""
    source: str
    """The path, for messages."""
    index: Index | None
    """The index that names the files, if there is one."""

    def checkpoint(self, layouts: Sequence[Sequence[StoredTensor]], ignored: Sequence[str] = ()) -> FileCheckpoint:
        """Returns the checkpoint of files with these tensors.

        Args:
            layouts: the tensors of each file.
            ignored: names of entries that hold no tensor.

        Raises:
            CheckpointError: a tensor is in two files, or the index names one that is in none.
        """
        tensors: dict[str, tuple[int, StoredTensor]] = {}
        for number, (file, layout) in enumerate(zip(self.files, layouts, strict=True)):
            for tensor in layout:
                if self.index is None or self.index.places(tensor.name, file.name):
                    if tensor.name in tensors:
                        raise CheckpointError(
                            f"{tensor.name} is both in {self.files[tensors[tensor.name][0]]} and in {file}"
                        )
                    tensors[tensor.name] = number, tensor
        if self.index is not None:
            self.index.check_complete({*tensors, *ignored})
        files, stored = zip(*tensors.values(), strict=True) if tensors else ((), ())
        digest = "" if self.index is None else self.index.digest
        offsets = column([tensor.offset for tensor in stored])
        locations = TensorLocations(tuple(self.facts), column(files), offsets, digest)
        shapes, dtypes = tuple(tensor.shape for tensor in stored), tuple(tensor.dtype for tensor in stored)
        return FileCheckpoint(
            self.store, Manifest(tuple(tensors), shapes, dtypes, self.source, locations, tuple(ignored))
        )


class Format(NamedTuple):
    """A format of files with tensors."""

    suffixes: tuple[str, ...]
    """The suffixes of its files; "" for files of all names that no other format has."""
    facts: Callable[[StoredFile], FileFacts]
    """Returns the facts of a file. Raises CheckpointError if it has changed, OSError if it cannot be read."""
    read: Callable[[OpenFiles], FileCheckpoint | StateDictCheckpoint]
    """Parses files. Raises CheckpointError if they are malformed, OSError if they cannot be read."""
