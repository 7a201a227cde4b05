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

from epload.core.columns import expand
from epload.core.copy_table import CopyTable, copy_row
from epload.core.placement import Box, row_major_strides
from epload.core.views import View


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
    def _in_bytes(self) -> Chunks:
        """The same chunks, as if all tensors were of uint8."""
        itemsize = torch.repeat_interleave(self.itemsize, self.first.diff())
        return Chunks(
            self.first,
            _last_times(self.shape, self.itemsize),
            torch.ones_like(self.itemsize),
            _last_times(self.start, itemsize),
            _last_times(self.size, itemsize),
        )

    def split(self, copies: CopyTable, origins: Tensor) -> tuple[CopyTable, Tensor] | None:
        """Converts regions of tensors to regions of chunks.

        Args:
            copies: of regions of tensors; what it says of a bucket but for strides is ignored.
            origins: int64 [n, 2]: the tensor that each row is of, and where in it it starts (bytes).

        Returns:
            The same with chunks in place of tensors; None if a region is not a box of its tensor, whose dims may be in another
            order.
        """
        tensor = origins[:, 0]
        shape, strides = self.shape[tensor], _row_major(self.shape)[tensor]
        low = _coordinates(origins[:, 1] // self.itemsize[tensor], strides)
        # The dim of the checkpoint tensor that each dim of a row steps along; dims of length 1 step along none.
        moves = (torch.arange(copies.dims) < copies.ndim[:, None]) & (copies.size > 1)
        along = (copies.stride[:, :, None] == strides[:, None, :]) & (shape > 1)[:, None, :] & moves[:, :, None]
        high = low + (along * (copies.size - 1)[:, :, None]).sum(1) + 1
        if not torch.equal(along.sum(2), moves.long()) or bool(((along.sum(1) > 1) | (high > shape)).any()):
            return None
        # Intersect each region with all chunks of its tensor.
        chunk, row = expand(self.first.diff(), tensor)
        begin = torch.maximum(low[row], self.start[chunk])
        size = torch.minimum(high[row], self.start[chunk] + self.size[chunk]) - begin
        common = (size > 0).all(1)
        row, chunk, begin, size = row[common], chunk[common], begin[common], size[common]
        table, along, steps = copies.select(row), along[row], _row_major(self.size)[chunk]
        moves = along.any(2)
        table.start.add_((along * (begin - low[row])[:, None, :]).sum(2))
        table.size.copy_(torch.where(moves, (along * size[:, None, :]).sum(2), table.size))
        table.stride.copy_(torch.where(moves, (along * steps[:, None, :]).sum(2), table.stride))
        offset = ((begin - self.start[chunk]) * steps).sum(1) * self.itemsize[tensor[row]]
        return table, torch.stack([chunk, offset], 1)

    def fill(self, bucket: Tensor, pieces: Tensor) -> tuple[list[Tensor], CopyTable, Tensor]:
        """Converts pieces of tensors to regions of chunks, in bytes.

        Args:
            bucket: contiguous, uint8.
            pieces: int64 [n, 4]; see :class:`epload.core.pieces.Pieces`.

        Returns:
            The parts of the bucket that they go to; the copies and the origin of each, as :meth:`split` returns them.
        """
        chunks, dims = self._in_bytes, self.shape.shape[1]
        targets: list[Tensor] = []
        rows, origins = [], []
        shapes = chunks.shape[pieces[:, 0]].tolist()
        for (tensor, begin, at, nbytes), shape in zip(pieces.tolist(), shapes, strict=True):
            for _, size, offset, strides in View.whole(tuple(shape)).within(begin, begin + nbytes):
                rows.append(copy_row(dims, len(targets), 0, torch.uint8, [0] * dims, size, strides))
                origins.append([tensor, offset])
                targets.append(bucket.as_strided(size, row_major_strides(size), bucket.storage_offset() + at))
                at += prod(size)
        table = CopyTable.of(torch.tensor(rows, dtype=torch.int64), dims)
        regions = chunks.split(table, torch.tensor(origins, dtype=torch.int64).reshape(-1, 2))
        assert regions is not None
        return targets, *regions


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
