"""Locates the elements of saved items in the files of a DCP checkpoint.

An item of ``torch.save`` is a zip archive of its own: a pickle of a few hundred bytes, then the tensor. Items of one shape have
equal archives but for the tensor's bytes and what follows them. So the pickle is loaded once for each shape, with
``weights_only``, and the beginnings of all other items are compared with that one's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from epload.checkpoint import safetensors, torch_file
from epload.checkpoint.byte_store import ByteStore, StoredFile
from epload.checkpoint.manifest import FileLayout
from epload.errors import CheckpointError

_BATCH_BYTES = 32 << 20
_BLOCK_BYTES = 64 << 10
_ZIP = b"PK\x03\x04"


class Item(NamedTuple):
    """One saved chunk."""

    name: str
    """Name of the item's tensor."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: int
    """Index into the files of the store."""
    offset: int
    """Offset of the item in its file, in bytes."""
    length: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def locate(items: Sequence[Item], store: ByteStore) -> list[int]:
    """Returns the offset of each item's first element in its file, in bytes.

    Raises:
        CheckpointError: an item is not in its file, or is not what the metadata says.
        OSError: a file cannot be read.
    """
    found = [-1] * len(items)
    classes: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, item in enumerate(items):
        file = store.files[item.file]
        if item.offset + item.length > file.nbytes:
            raise CheckpointError(
                f"{file} has {file.nbytes} bytes, but {item.name} is to end at byte {item.offset + item.length}: the file is "
                "truncated or of another checkpoint; copy it again"
            )
        classes[item.length, item.shape, item.dtype].append(i)
    headers: dict[tuple[int, int], FileLayout] = {}
    for members in classes.values():
        first = items[members[0]]
        # A length that the elements alone fill: they are part of a safetensors file that begins there.
        if first.length == first.nbytes and store.files[first.file].read(first.offset, 4) != _ZIP:
            for i in members:
                found[i] = _in_safetensors(items[i], store, headers)
        else:
            _locate_alike(items, members, store, found)
    return found


def _locate_alike(items: Sequence[Item], members: Sequence[int], store: ByteStore, found: list[int]) -> None:
    """Locates items of one length, shape and dtype that ``torch.save`` wrote."""
    first = items[members[0]]
    begin = _parse(first, store)
    beginning = torch.frombuffer(bytearray(store.files[first.file].read(first.offset, begin)), dtype=torch.uint8)
    step = max(1, _BATCH_BYTES // begin)
    for at in range(0, len(members), step):
        batch = members[at : at + step]
        rows = [[items[i].file, items[i].offset, n * begin, begin] for n, i in enumerate(batch)]
        heads = torch.empty(len(batch), begin, dtype=torch.uint8)
        store.read(torch.tensor(rows, dtype=torch.int64), heads.view(-1))
        alike = (heads == beginning).all(1).tolist()
        for i, same in zip(batch, alike, strict=True):
            found[i] = items[i].offset + (begin if same else _parse(items[i], store))


def _parse(item: Item, store: ByteStore) -> int:
    """The offset of the first element in the item."""
    section = Section(store.files[item.file], item.offset, item.length, item.name)
    dtype, shape, begin = torch_file.locate_tensor(section)
    _check(section, item, dtype, shape)
    return begin


def _in_safetensors(item: Item, store: ByteStore, headers: dict[tuple[int, int], FileLayout]) -> int:
    """``headers``: those read before, by file and offset."""
    file = store.files[item.file]
    section = Section(file, item.offset, file.nbytes - item.offset, item.name)
    layout = headers.get((item.file, item.offset))
    if layout is None:
        layout = headers[item.file, item.offset] = safetensors.read_layout(section)
    if item.name not in layout.names:
        raise CheckpointError(f"{section}: the header there does not contain it; save the checkpoint again")
    i = layout.names.index(item.name)
    _check(section, item, layout.dtypes[i], layout.shapes[i])
    return item.offset + layout.offsets[i]


def _check(section: Section, item: Item, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if (dtype, shape) != (item.dtype, item.shape):
        raise CheckpointError(
            f"{section}: expected {item.dtype} {list(item.shape)} by the metadata, got {dtype} {list(shape)}; save the "
            "checkpoint again"
        )


class Section(StoredFile):
    """A byte range of a file as a file of its own. Read in blocks, as it is parsed in many small reads, each of which could be a
    request to a server."""

    def __init__(self, file: StoredFile, begin: int, nbytes: int, item: str) -> None:
        """``item``: what it has, for error messages."""
        self.name = file.name
        self._file, self._begin, self._nbytes, self._item = file, begin, nbytes, item
        self._blocks: dict[int, bytes] = {}

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        end = min(offset + nbytes, self._nbytes)
        if offset >= end:
            return b""
        first = offset // _BLOCK_BYTES
        blocks = b"".join(self._block(number) for number in range(first, -(-end // _BLOCK_BYTES)))
        return blocks[offset - first * _BLOCK_BYTES :][: end - offset]

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            begin = number * _BLOCK_BYTES
            self._blocks[number] = self._file.read(self._begin + begin, min(_BLOCK_BYTES, self._nbytes - begin))
        return self._blocks[number]

    def __str__(self) -> str:
        return f"{self._file} ({self._item}, at byte {self._begin})"
