"""Folders with what has changed since another checkpoint, their base: the format, and reading. docs/saving.md describes it.

A tensor is divided into boxes, the chunks, each with the checksum of its bytes in the base and of those that it stands for. Both
are computed again of every chunk that is read, so that no base but the one that was compared gives a tensor. Not trusted.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from epload.checkpoint import file_sets, hub
from epload.checkpoint.base import Checkpoint, regions_of_boxes
from epload.checkpoint.byte_store import ByteStore, Source, StoredFile
from epload.checkpoint.file_checkpoint import FileCheckpoint
from epload.checkpoint.finding import open_named
from epload.checkpoint.index import Index, is_plain
from epload.checkpoint.local_store import LocalStore
from epload.checkpoint.manifest import FileFacts, Manifest, OpenFiles, StoredTensor
from epload.checkpoint.quantization import quantization_of
from epload.core import dtypes
from epload.core.columns import batches, column
from epload.core.copy_table import ALIGNMENT
from epload.core.pieces import Piece
from epload.core.placement import Box, contiguous_runs, row_major_strides
from epload.core.regions import Regions
from epload.errors import CheckpointError
from epload.native import ops

VERSION = 2
MAX_LINKS = 16
"""Maximum number of deltas that a chain has before it ends in a whole checkpoint."""
MAX_CHUNK_BYTES = 64 << 20
_MAX_INDEX_BYTES = 1 << 30
BATCH_BYTES = 16 << 20
"""Approximate number of bytes of chunks that are read at a time, in each delta of a chain."""
_SAMPLES, _SAMPLE_BYTES = 16, 512


class DeltaChunk(NamedTuple):
    """A box of a tensor, and the changes in it. A row of the index has the same, its box without parentheses."""

    file: int
    """Index of the file that holds the encoded changes."""
    offset: int
    """Offset of the changes in the file, in bytes."""
    nbytes: int
    """Bytes of the changes, encoded by ``ops.encode_changes``; 0 if there are none."""
    before: int
    """Checksum of the chunk's bytes in the base; 0 if the base has no such tensor, and the changes are those of zeros."""
    after: int
    """Checksum of the chunk's bytes."""
    box: Box

    def to_row(self) -> list[int]:
        return [*self[:-1], *self.box[0], *self.box[1]]

    @classmethod
    def from_row(cls, row: Sequence[int], dims: int) -> DeltaChunk:
        """Raises ValueError for a row that is malformed."""
        if len(row) != 5 + 2 * dims or not all(type(n) is int and 0 <= n < 1 << 64 for n in row):
            raise ValueError(f"expected {5 + 2 * dims} integers for a chunk, got {str(row)[:100]}")
        file, offset, nbytes, before, after, *box = row
        return cls(file, offset, nbytes, before, after, (tuple(box[:dims]), tuple(box[dims:])))


Tensors = Mapping[str, tuple[torch.dtype, tuple[int, ...], list[DeltaChunk]]]
"""Dtype, shape and chunks of each tensor, by name."""
_Patched = tuple[str, int, DeltaChunk]
"""The name of a tensor, its number in the base, -1 if the base has none, and a chunk of it."""


class DeltaIndex(Index):
    """The index of a folder with changes."""

    def __init__(self, file: StoredFile) -> None:
        """Raises CheckpointError if the index is malformed, or of another version."""
        super().__init__(file, _MAX_INDEX_BYTES)
        self.weight_map = {}  # every tensor is in one place
        try:
            content = json.loads(self.raw)
            version = content["version"]
            if version != VERSION:
                raise ValueError(f"expected version {VERSION}, got {version!r}")
            base, self.content_digest = content["base"], str(content["digest"])
            self.base, self.base_digest = str(base["path"]), str(base["digest"])
            self.config = {str(name): str(text).encode() for name, text in content["config"].items()}
            declared = (json.loads(text) for name, text in self.config.items() if name in file_sets.CONFIGS)
            self.quantization = next(filter(None, map(quantization_of, declared)), None)
            self.files = [(str(name), int(nbytes)) for name, nbytes in content["files"]]
            self.tensors: Tensors = {
                name: (
                    dtypes.SAFETENSORS[dtype],
                    tuple(shape),
                    self._chunks(name, dtypes.SAFETENSORS[dtype], shape, rows),
                )
                for name, (dtype, shape, rows) in content["tensors"].items()
            }
            path = self.base.removeprefix(hub.SCHEME)
            if path.startswith("/") or "://" in path or "\0" in path or not path:
                raise ValueError(f"expected the base as a relative path, or a model on the Hub, got {self.base[:200]!r}")
            if not self.files or not all(map(is_plain, [*self.config, *(name for name, _ in self.files)])):
                raise ValueError("expected plain names of files in the folder")
            if any(name.endswith(file_sets.WRITTEN) for name in self.config):
                raise ValueError("expected files of a configuration next to the changes")
            if sum(prod(shape) * dtype.itemsize for dtype, shape, _ in self.tensors.values()) >= 1 << 62:
                raise ValueError("more bytes than a checkpoint can have")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise CheckpointError(
                f"{file}: not the index of a folder with changes ({type(error).__name__}: {str(error)[:200]}); copy the folder "
                "again, or read it with the version of epload that has written it"
            ) from error

    def _chunks(self, name: str, dtype: torch.dtype, shape: list[int], rows: list[list[int]]) -> list[DeltaChunk]:
        if not all(type(n) is int and 0 <= n < 1 << 62 for n in shape):
            raise ValueError(f"{name} has shape {str(shape)[:100]}")
        chunks = [DeltaChunk.from_row(row, len(shape)) for row in rows]
        for chunk in chunks:
            nbytes = prod(chunk.box[1]) * dtype.itemsize
            if nbytes > MAX_CHUNK_BYTES:
                raise ValueError(f"{name} has a chunk of {nbytes} bytes, expected at most {MAX_CHUNK_BYTES}")
            if chunk.offset + chunk.nbytes > self.files[chunk.file][1]:
                raise ValueError(f"{name} has changes that end outside their file")
            if not chunk.nbytes and not chunk.before == chunk.after > 0:
                raise ValueError(f"{name} lacks changes")
        if not chunks and 0 not in shape:
            raise ValueError(f"{name} has no chunks")
        return chunks


def encode_index(
    base: str, base_digest: str, digest: str, config: Mapping[str, bytes], files: Sequence[tuple[str, int]],
    tensors: Tensors,
) -> bytes:  # fmt: skip
    """Returns the content of an index; the arguments are the attributes of :class:`DeltaIndex`."""
    described = {
        name: [dtypes.SAFETENSORS_NAMES[dtype], shape, [chunk.to_row() for chunk in sorted(chunks, key=lambda chunk: chunk.box)]]
        for name, (dtype, shape, chunks) in tensors.items()
    }
    content = {
        "format": "epload delta",
        "version": VERSION,
        "base": {"path": base, "digest": base_digest},
        "digest": digest,
        "config": {name: text.decode() for name, text in config.items()},
        "files": files,
        "tensors": described,
    }
    return json.dumps(content, separators=(",", ":")).encode()


class DeltaCheckpoint(FileCheckpoint):
    """Changes, and the base that they are of.

    The manifest describes the chunks of all tensors as if they lay one after the other in a file. They are read from the base,
    and changed.
    """

    files: Sequence[StoredFile] = ()
    """None: those of the base are in another store."""

    def __init__(self, store: ByteStore, base: Checkpoint, index: DeltaIndex) -> None:
        """Takes ownership of the store, in which the files of the index are open, and of the base. Raises CheckpointError if the
        base is another one."""
        numbers = {name: i for i, name in enumerate(base.manifest.names)}
        dtype_of, shape_of = base.manifest.dtypes, base.manifest.shapes
        stored: list[StoredTensor] = []
        self._chunks: list[_Patched] = []
        end = 0
        for name, (dtype, shape, chunks) in index.tensors.items():
            number = numbers.get(name, -1)
            if number >= 0 and (dtype_of[number], shape_of[number]) != (dtype, shape):
                number = -1
            empty = [DeltaChunk(0, 0, 0, 0, 0, ((0,) * len(shape), shape))] if 0 in shape else []
            for chunk in empty or chunks:
                if chunk.before and number < 0:
                    raise _other_base(index, base, f"tensors: no {name} of {dtypes.name(dtype)} {list(shape)}")
                start, size = chunk.box
                stored.append(StoredTensor(name, dtype, size, end, start))
                self._chunks.append((name, number, chunk))
                end += prod(size) * dtype.itemsize
        self._begins = column([chunk.offset for chunk in stored])
        self._sizes = column([prod(chunk.shape) * chunk.dtype.itemsize for chunk in stored])
        shapes = {name: shape for name, (_, shape, _) in index.tensors.items()}
        facts = [FileFacts.of(file) for file in (index.file, *store.files)]
        manifest = FileCheckpoint.of(OpenFiles(store, facts, str(store), index), stored, shapes=shapes).manifest
        if not {*dtypes.FP8, *dtypes.INTEGERS}.isdisjoint(manifest.dtypes):
            manifest = replace(manifest, quantization=index.quantization)
        super().__init__(store, manifest)
        self.base, self._index = base, index
        self.config = index.config
        """Content of the small files that belong to the model, such as its ``config.json``, by name."""
        self.digest = index.content_digest
        """Equal to :func:`content_digest` of a whole checkpoint with the same tensors."""

    def changed(self) -> str:
        return super().changed() or self.base.changed()

    def reopen(self) -> None:
        super().reopen()
        self.base.reopen()

    def configure_reads(self, direct: bool, threads: int | None = None) -> None:
        self.base.configure_reads(direct, threads)

    def close(self) -> None:
        super().close()
        self.base.close()

    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        self._fill_regions(bucket, pieces)

    def _read(self, regions: Regions) -> int:
        copies, origins = regions.copies, regions.origins
        rows = copies.nbytes().nonzero().flatten()
        begin = (self._locations.offset[origins[:, 0]] + origins[:, 1])[rows]
        chunk_of = torch.searchsorted(self._begins, begin, right=True) - 1
        chunks, number_of = torch.unique(chunk_of, return_inverse=True)
        sizes = self._sizes[chunks]
        aligned = -(sizes // -ALIGNMENT) * ALIGNMENT
        parts = batches(sizes, BATCH_BYTES)
        content = torch.empty(max((int(aligned[part].sum()) for part in parts), default=0), dtype=torch.uint8)
        for part in parts:
            starts = aligned[part].cumsum(0) - aligned[part]
            self._patch(chunks[part].tolist(), starts.tolist(), content)
            selected = ((number_of >= part[0]) & (number_of <= part[-1])).nonzero().flatten()
            table = copies.select(rows[selected])
            table.offset.copy_(starts[number_of[selected] - part[0]] + (begin - self._begins[chunk_of])[selected])
            regions._replace(copies=table).unpack(content)
        return int(sizes.sum())

    def _patch(self, numbers: Sequence[int], starts: Sequence[int], content: Tensor) -> None:
        """Reads chunks into a buffer, and checks them.

        Args:
            numbers: of the chunks.
            starts: where each goes in the buffer, in bytes.
        """
        chunks = [self._chunks[i] for i in numbers]
        pairs = zip(chunks, starts, strict=True)
        read_boxes(self.base, [(tensor, chunk.box, at) for (_, tensor, chunk), at in pairs if chunk.before], content)
        encoded = self._read_changes([chunk for _, _, chunk in chunks])
        sizes = self._sizes[list(numbers)].tolist()
        for (name, _, chunk), begin, nbytes, changes in zip(chunks, starts, sizes, encoded, strict=True):
            part = content[begin : begin + nbytes]
            if not chunk.before:
                part.zero_()
            elif ops.checksum(part) != chunk.before:
                raise _other_base(self._index, self.base, f"values in {name}")
            if chunk.nbytes:
                try:
                    ops.apply_changes(changes, part)
                    damage = "" if ops.checksum(part) == chunk.after else "they do not give what was saved"
                except ValueError as error:
                    damage = str(error)
                if damage:
                    file = self._store.files[chunk.file]
                    raise CheckpointError(f"{file}: the changes of {name} are damaged ({damage}); copy the folder again")

    def _read_changes(self, chunks: Sequence[DeltaChunk]) -> Sequence[Tensor]:
        """Returns the encoded changes of each chunk."""
        sizes = [chunk.nbytes for chunk in chunks]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        rows = [
            [chunk.file, chunk.offset, end - chunk.nbytes, chunk.nbytes]
            for chunk, end in zip(chunks, accumulate(sizes), strict=True)
            if chunk.nbytes
        ]
        if rows:
            self._store.read(torch.tensor(rows, dtype=torch.int64), buffer)
        return torch.split(buffer, sizes)


def chain_of(checkpoint: Checkpoint) -> list[Checkpoint]:
    """Returns the checkpoint and, if it is a delta, its bases."""
    chain = [checkpoint]
    while isinstance(link := chain[-1], DeltaCheckpoint):
        chain.append(link.base)
    return chain


def folders_of(checkpoint: Checkpoint) -> list[Path | None]:
    """Returns the local folder of each checkpoint in the chain; None for one that is elsewhere."""
    stores = [link._store for link in chain_of(checkpoint)]
    return [store.path.resolve() if isinstance(store, LocalStore) else None for store in stores]


def read(store: ByteStore, open_base: Callable[[Source], Checkpoint]) -> DeltaCheckpoint:
    """Opens the changes in a folder, and their base.

    Args:
        store: the folder.
        open_base: opens a checkpoint, at a path or URL. Raises CheckpointError.

    Raises:
        CheckpointError: the index is malformed, a file is missing or has another size, or the base is missing or another one.
        OSError: a file cannot be read.
    """
    index = DeltaIndex(store.open_description(file_sets.DELTA))
    open_named(store, index, [name for name, _ in index.files])
    for file, (_, nbytes) in zip(store.files, index.files, strict=True):
        if file.nbytes != nbytes:
            raise CheckpointError(
                f"{file} has {file.nbytes} bytes, but {index.file} names one of {nbytes}: copy the folder again"
            )
    try:
        base = open_base(index.base if index.base.startswith(hub.SCHEME) else store.resolve(index.base))
    except CheckpointError as error:
        raise CheckpointError(
            f"{index.file} has what has changed since {index.base}, which has to be there, too: {error}"
        ) from error
    try:
        if content_digest(base) != index.base_digest:
            raise _other_base(index, base, "names, shapes, dtypes or values")
        return DeltaCheckpoint(store, base, index)
    except BaseException:
        base.close()
        raise


def _other_base(index: DeltaIndex, base: Checkpoint, what: str) -> CheckpointError:
    return CheckpointError(
        f"{base.manifest.source} is not the checkpoint that {index.file} has the changes of: it has other {what}; put back the "
        "one that was there, or load a whole checkpoint"
    )


def read_boxes(checkpoint: Checkpoint, boxes: Sequence[tuple[int, Box, int]], buffer: Tensor) -> None:
    """Reads boxes of tensors, whose elements come in row-major order.

    Args:
        boxes: the tensor's index in the manifest, the box, and where in the buffer it goes, in bytes: a multiple of the size of
            an element.
        buffer: uint8 on CPU, aligned to 16 bytes.

    Raises:
        CheckpointError: they cannot be read.
    """
    if not boxes:
        return
    manifest = checkpoint.manifest
    targets = []
    for tensor, (_, size), begin in boxes:
        dtype = manifest.dtypes[tensor]
        targets.append(buffer[begin : begin + prod(size) * dtype.itemsize].view(dtype).view(size))
    locations = manifest.locations
    # Requests for objects join runs of several boxes; as regions each box would fetch all that it spans.
    in_gaps = manifest.in_object_storage and locations is not None and locations.chunks is None
    regions = regions_of_boxes(manifest, [(tensor, box) for tensor, box, _ in boxes], targets)
    if in_gaps or checkpoint.read_regions(regions) is None:
        checkpoint.fill(buffer, [piece for row in boxes for piece in _runs(manifest, *row)])


def _runs(manifest: Manifest, tensor: int, box: Box, begin: int) -> list[Piece]:
    """Returns the contiguous runs of a box as pieces that go to a buffer from ``begin`` on."""
    itemsize, strides, (start, size) = manifest.dtypes[tensor].itemsize, row_major_strides(manifest.shapes[tensor]), box
    first = sum(map(int.__mul__, start, strides))
    length, offsets = contiguous_runs(size, strides)
    nbytes = length * itemsize
    return [Piece(tensor, (first + at) * itemsize, begin + i * nbytes, nbytes) for i, at in enumerate(offsets)]


def content_digest(checkpoint: Checkpoint, sampled: bool = False) -> str:
    """Returns a digest of the names, shapes and dtypes of a checkpoint's tensors, and of samples of their bytes. It does not
    depend on the format or the order.

    The samples are up to 512 bytes at each 16th of the bytes of all tensors, sorted by name. Raises CheckpointError. ``sampled``:
    whether also a :class:`DeltaCheckpoint` is read, which has the digest in its index."""
    if isinstance(checkpoint, DeltaCheckpoint) and not sampled:
        return checkpoint.digest
    manifest = checkpoint.manifest
    sizes = manifest.nbytes_of()
    order = sorted(range(len(sizes)), key=manifest.names.__getitem__)
    ends = list(accumulate(sizes[i] for i in order))
    pieces: list[Piece] = []
    for position in [sum(sizes) * i // _SAMPLES for i in range(_SAMPLES)] if any(sizes) else ():
        place = bisect_right(ends, position)
        offset = position - ends[place] + sizes[order[place]]
        nbytes = min(_SAMPLE_BYTES, sizes[order[place]] - offset)
        pieces.append(Piece(order[place], offset, len(pieces) * _SAMPLE_BYTES, nbytes))
    buffer = torch.zeros(_SAMPLES * _SAMPLE_BYTES, dtype=torch.uint8)
    checkpoint.fill(buffer, pieces)
    described = [(manifest.names[i], dtypes.name(manifest.dtypes[i]), manifest.shapes[i]) for i in order]
    return hashlib.sha256(json.dumps(described).encode() + bytes(buffer.tolist())).hexdigest()[:32]
