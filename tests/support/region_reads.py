"""Files and the regions that are read from them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from epload.core import dtypes
from epload.native import ops
from support.region_copies import packed
from support.shards import box_slices

Shape = tuple[int, ...]


@dataclass
class Row:
    """A box of a row-major tensor in a file that is wanted at the same or another place of a target."""

    file: int
    offset: int
    """Of the tensor in the file, bytes."""
    shape: Shape
    dtype: torch.dtype
    start: Shape
    size: Shape
    target: int
    at: Shape
    dims: Shape = ()
    """The dim of the box that each dim of the target is; empty if they are in the same order."""

    def turned(self, values: Sequence[int]) -> list[int]:
        """Returns one value for each dim of the box as one for each dim of the target."""
        return [values[dim] for dim in self.dims or range(len(values))]


def table_of(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The files and offsets of as many tensors as rows, where in them rows start, and the copy table."""
    dims = max(len(row.shape) for row in rows) or 1
    table, origins = [], []
    for i, row in enumerate(rows):
        strides = packed(list(row.shape))
        origins.append([i, row.dtype.itemsize * sum(a * b for a, b in zip(row.start, strides, strict=True))])
        fill = [0] * (dims - len(row.shape))
        head = [row.target, -1, dtypes.code(row.dtype), len(row.shape)]
        table.append([*head, *row.at, *fill, *row.turned(row.size), *fill, *row.turned(strides), *fill])
    files, offsets = torch.tensor([row.file for row in rows]), torch.tensor([row.offset for row in rows])
    return files, offsets, torch.tensor(origins), torch.tensor(table)


def box(tensor: Tensor, start: Shape, size: Shape) -> Tensor:
    return tensor[box_slices(start, size)]


def filled(shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    """A target that nothing has been read into."""
    return torch.full((torch.Size(shape).numel() * dtype.itemsize,), 0xA5, dtype=torch.uint8).view(dtype).reshape(shape)


class Files:
    """Files of bytes that tell where they are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.paths: list[Path] = []
        self.raw: list[bytearray] = []
        self.descriptors: list[int] = []

    def add(self, nbytes: int) -> int:
        number = len(self.paths)
        content = (torch.arange(nbytes // 4 + 1, dtype=torch.int32) * 2654435 + number * 7919).view(torch.uint8)
        raw = bytearray(content[:nbytes].numpy().tobytes())
        self.paths.append(self._folder / f"file-{number}")
        self.paths[-1].write_bytes(raw)
        self.raw.append(raw)
        self.descriptors.append(os.open(self.paths[-1], os.O_RDONLY))
        return number

    def tensor(self, row: Row) -> Tensor:
        """The tensor that a row is a box of."""
        if 0 in row.shape:
            return torch.empty(row.shape, dtype=row.dtype)
        count = torch.Size(row.shape).numel()
        part = self.raw[row.file][row.offset : row.offset + count * row.dtype.itemsize]
        return torch.frombuffer(bytearray(part), dtype=torch.uint8).view(row.dtype).reshape(row.shape)

    def check(self, rows: Sequence[Row], targets: Sequence[Tensor], threads: int = 2) -> int:
        """Reads, and compares the targets' whole storages with what slicing and ``copy_`` do; returns bytes read."""
        before = [same_storage(target) for target in targets]
        for row in rows:
            place = box(before[row.target], row.at, tuple(row.turned(row.size)))
            place.copy_(box(self.tensor(row), row.start, row.size).permute(row.turned(range(len(row.size)))))
        *where, table = table_of(rows)
        nbytes, bad, offset, error = ops.read_regions(self.descriptors, *where, targets, table, threads)
        assert (bad, offset, error) == (-1, 0, 0)
        for i, (target, expected) in enumerate(zip(targets, before, strict=True)):
            assert torch.equal(storage_of(target), storage_of(expected)), f"target {i}"
        return nbytes

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def storage_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def same_storage(tensor: Tensor) -> Tensor:
    """The same view of a copy of the whole storage, so that bytes around the view are compared too."""
    whole = storage_of(tensor).clone().view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


F32, BF16 = torch.float32, torch.bfloat16
