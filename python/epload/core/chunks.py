"""Tensors that are stored in parts, each a box of its tensor whose elements lie in row-major order: a chunk.

Regions of such tensors become regions of chunks by intersecting boxes, for all regions at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from epload.core import dtypes
from epload.core.copy_table import CopyTable
from epload.core.placement import Box, boxes_of_range, row_major_strides


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of all tensors of a checkpoint, those of a tensor one after the other. They cover it exactly once.

    All tensors have the same number of dims here: those that have fewer begin with dims of length 1.
    """

    first: Tensor
    """int64 [t + 1]: chunks [first[i], first[i + 1]) are those of tensor i."""
    shape: Tensor
    """int64 [t, dims], of each tensor."""
    itemsize: Tensor
    """int64 [t], of each tensor."""
    start: Tensor
    """int64 [c, dims], of each chunk in its tensor, in elements."""
    size: Tensor
    """int64 [c, dims], of each chunk, in elements."""

    @staticmethod
    def of(shapes: Sequence[tuple[int, ...]], itemsizes: Sequence[int], boxes: Sequence[Sequence[Box]]) -> Chunks:
        """``boxes`` of each tensor."""
        dims = max(map(len, shapes), default=0) or 1

        def padded(values: Sequence[tuple[int, ...]], fill: int) -> Tensor:
            rows = [(fill,) * (dims - len(row)) + tuple(row) for row in values]
            return torch.tensor(rows, dtype=torch.int64).reshape(-1, dims)

        counts = torch.tensor([0, *map(len, boxes)], dtype=torch.int64)
        return Chunks(
            counts.cumsum(0),
            padded(shapes, 1),
            torch.tensor(itemsizes, dtype=torch.int64),
            padded([start for some in boxes for start, _ in some], 0),
            padded([size for some in boxes for _, size in some], 1),
        )

    @cached_property
    def nbytes(self) -> Tensor:
        """int64 [c], of each chunk."""
        return self.size.prod(1) * self.itemsize[self._tensor]

    @cached_property
    def _tensor(self) -> Tensor:
        """int64 [c], the tensor of each chunk."""
        return torch.repeat_interleave(torch.arange(len(self.shape)), self.first.diff())

    @cached_property
    def _steps(self) -> Tensor:
        """int64 [c, dims], strides in the tensor that a chunk itself is, in elements."""
        return _row_major(self.size)

    def split(self, copies: CopyTable, origins: Tensor) -> tuple[CopyTable, Tensor] | None:
        """Regions of tensors as regions of chunks.

        Args:
            copies: of regions of tensors; what it says of a bucket but for strides is ignored.
            origins: int64 [n, 2]: the tensor that each row is of, and where in it it starts (bytes).

        Returns:
            the same with chunks in place of tensors; None if a region is not a box of its tensor, whose dims may be in another
            order.
        """
        tensor = origins[:, 0]
        strides = _row_major(self.shape)[tensor]
        low = _coordinates(origins[:, 1] // self.itemsize[tensor], strides)
        # The dim of the checkpoint tensor that each dim of a row steps along; dims of length 1 step along none.
        moves = (torch.arange(copies.dims) < copies.ndim[:, None]) & (copies.size > 1)
        along = (copies.stride[:, :, None] == strides[:, None, :]) & (self.shape[tensor] > 1)[:, None, :]
        along &= moves[:, :, None]
        if not bool((along.sum(2) == moves).all()) or bool((along.sum(1) > 1).any()):
            return None
        extent = (along * (copies.size - 1)[:, :, None]).sum(1) + 1
        if bool((low + extent > self.shape[tensor]).any()):
            return None
        row, chunk, begin, size = self._overlaps(tensor, low, extent, self.start, self.size)
        table, along = copies.select(row), along[row]
        moves = along.any(2)
        table.start.add_((along * (begin - low[row])[:, None, :]).sum(2))
        table.size.copy_(torch.where(moves, (along * size[:, None, :]).sum(2), table.size))
        table.stride.copy_(torch.where(moves, (along * self._steps[chunk][:, None, :]).sum(2), table.stride))
        offset = ((begin - self.start[chunk]) * self._steps[chunk]).sum(1) * self.itemsize[tensor[row]]
        return table, torch.stack([chunk, offset], 1)

    def fill(self, bucket: Tensor, pieces: Tensor) -> tuple[list[Tensor], CopyTable, Tensor]:
        """Pieces of tensors as regions of chunks, in bytes: the parts of the bucket that they go to, the copies, and the origin
        of each copy, as :meth:`split` returns them.

        Args:
            bucket: contiguous, uint8.
            pieces: int64 [n, 4]; see :class:`epload.core.pieces.Pieces`.
        """
        tensors: list[int] = []
        boxes: list[Box] = []
        targets: list[Tensor] = []
        boxes_of: dict[tuple[int, ...], list[Box]] = {}
        shapes = self._byte_shapes(pieces[:, 0])
        for (tensor, begin, at, nbytes), shape in zip(pieces.tolist(), shapes, strict=True):
            key = (*shape, begin, nbytes)
            if (ranges := boxes_of.get(key)) is None:
                ranges = boxes_of[key] = boxes_of_range(tuple(shape), begin, begin + nbytes)
            for box in ranges:
                tensors.append(tensor)
                boxes.append(box)
                targets.append(bucket.as_strided(box[1], row_major_strides(box[1]), bucket.storage_offset() + at))
                at += prod(box[1])
        tensor = torch.tensor(tensors, dtype=torch.int64)
        dims = self.shape.shape[1]
        low, extent = (torch.tensor([box[i] for box in boxes], dtype=torch.int64).reshape(-1, dims) for i in (0, 1))
        of_chunk = self.itemsize[self._tensor]
        start, size = _last_times(self.start, of_chunk), _last_times(self.size, of_chunk)
        row, chunk, begin, common = self._overlaps(tensor, low, extent, start, size)
        steps = _row_major(size[chunk])
        table = CopyTable(torch.empty(len(row), CopyTable.columns(dims), dtype=torch.int64))
        table.target.copy_(row)
        table.offset.zero_()
        table.dtype.fill_(dtypes.code(torch.uint8))
        table.ndim.fill_(dims)
        table.start.copy_(begin - low[row])
        table.size.copy_(common)
        table.stride.copy_(steps)
        return targets, table, torch.stack([chunk, ((begin - start[chunk]) * steps).sum(1)], 1)

    def _byte_shapes(self, tensor: Tensor) -> list[list[int]]:
        shapes: list[list[int]] = _last_times(self.shape[tensor], self.itemsize[tensor]).tolist()
        return shapes

    def _overlaps(
        self, tensor: Tensor, low: Tensor, extent: Tensor, start: Tensor, size: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Intersects boxes of tensors with chunks: returns numbers of the box and the chunk, and what is common.

        Args:
            tensor, low, extent: of each box.
            start, size: of each chunk, in the same unit.
        """
        counts = self.first.diff()[tensor]
        row = torch.repeat_interleave(torch.arange(len(tensor)), counts)
        chunk = torch.arange(len(row)) + (self.first[tensor] + counts - counts.cumsum(0))[row]
        begin = torch.maximum(low[row], start[chunk])
        common = torch.minimum(low[row] + extent[row], start[chunk] + size[chunk]) - begin
        shared = (common > 0).all(1)
        return row[shared], chunk[shared], begin[shared], common[shared]


def _row_major(shape: Tensor) -> Tensor:
    """Strides in elements, of each row."""
    strides = torch.ones_like(shape)
    strides[:, :-1] = shape[:, 1:].flip(1).cumprod(1).flip(1)
    return strides


def _coordinates(offset: Tensor, strides: Tensor) -> Tensor:
    """The index in each dim of an element, by its offset."""
    index = torch.empty_like(strides)
    for dim in range(strides.shape[1]):
        stride = strides[:, dim].clamp(min=1)
        index[:, dim] = offset // stride
        offset = offset % stride
    return index


def _last_times(values: Tensor, factor: Tensor) -> Tensor:
    """Multiplies the last column."""
    scaled = values.clone()
    scaled[:, -1] *= factor
    return scaled
