"""The table of copies that the native ops take: which box of which tensor lies where in a bucket or a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epload.core import dtypes
from epload.core.placement import box_slices

ALIGNMENT = 16
"""Bytes; where a slot may start in a bucket. The widest access of a device, and a multiple of the size of any element, so
that a slot can be viewed as its tensor's dtype."""
_TARGET, _OFFSET, _DTYPE, _NDIM, _FIXED = range(5)
Copy = list[int]
"""A row of a copy table."""


def copy_row(
    dims: int,
    target: int,
    offset: int,
    dtype: torch.dtype,
    start: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
) -> Copy:
    """Returns a row of a table for targets of up to ``dims`` dims; the rest are the columns of :class:`CopyTable`."""
    fill = [0] * (dims - len(size))
    return [target, offset, dtypes.code(dtype), len(size), *start, *fill, *size, *fill, *stride, *fill]


@dataclass(frozen=True, eq=False)
class CopyTable:
    """One copy a row. See ``ops.unpack``."""

    rows: Tensor
    """int64 [n, 4 + 3 * dims], on CPU: target, offset, dtype, ndim, then start, size and stride in each dim."""

    def __len__(self) -> int:
        return len(self.rows)

    @staticmethod
    def of(values: Tensor, dims: int) -> CopyTable:
        """Rows for targets of up to ``dims`` dims, one after the other. ``values``: int64, of any shape."""
        return CopyTable(values.reshape(-1, _FIXED + 3 * dims))

    @staticmethod
    def concatenate(tables: Sequence[CopyTable]) -> CopyTable:
        """Tables of one width, one after the other."""
        return CopyTable(torch.cat([table.rows for table in tables]))

    @staticmethod
    def of_bytes(offset: Tensor, nbytes: Tensor) -> CopyTable:
        """Runs of bytes that lie at the same places of a bucket and of target 0, which is another one.

        Args:
            offset, nbytes: int64 [n].
        """
        fixed = offset.new_tensor([0, 0, dtypes.code(torch.uint8), 1]).expand(len(offset), _FIXED)
        table = CopyTable(torch.cat([fixed, torch.stack([offset, nbytes, torch.ones_like(offset)], 1)], 1))
        table.offset.copy_(offset)
        return table

    def boxes(self) -> Iterator[tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        """Yields target, offset, dtype, start, size and strides of each row."""
        for target, offset, code, ndim, *geometry in self.rows.tolist():
            start, size, stride = (tuple(geometry[i * self.dims :][:ndim]) for i in range(3))
            yield target, offset, dtypes.from_code(code), start, size, stride

    # Views of columns, each [n] or [n, dims].

    @property
    def dims(self) -> int:
        return (self.rows.shape[1] - _FIXED) // 3

    @property
    def target(self) -> Tensor:
        """Index into the list of targets."""
        return self.rows[:, _TARGET]

    @property
    def offset(self) -> Tensor:
        """Offset in the bucket, in bytes."""
        return self.rows[:, _OFFSET]

    @property
    def dtype(self) -> Tensor:
        """Code of the dtype of the bucket's elements."""
        return self.rows[:, _DTYPE]

    @property
    def ndim(self) -> Tensor:
        return self.rows[:, _NDIM]

    @property
    def start(self) -> Tensor:
        """Start of the box in the target, in elements."""
        return self.rows[:, _FIXED : _FIXED + self.dims]

    @property
    def size(self) -> Tensor:
        """Size of the box, in elements."""
        return self.rows[:, _FIXED + self.dims : _FIXED + 2 * self.dims]

    @property
    def stride(self) -> Tensor:
        """Strides of the box in the bucket, in elements."""
        return self.rows[:, _FIXED + 2 * self.dims :]

    def clone(self) -> CopyTable:
        return CopyTable(self.rows.clone())

    def select(self, which: Tensor | slice) -> CopyTable:
        """Some rows: a copy, or for a slice a view."""
        return CopyTable(self.rows[which])

    def renumber_targets(self) -> list[int]:
        """Numbers the targets that rows name from 0 on, in place; returns the numbers that they had."""
        targets, self.rows[:, _TARGET] = torch.unique(self.target, return_inverse=True)
        return [int(target) for target in targets.tolist()]

    def nbytes(self) -> Tensor:
        """int64 [n]: bytes of each box in the bucket's dtype."""
        return self._used_size().prod(1) * self._itemsize()

    def in_bucket(self) -> Tensor:
        """int64 [n, 2]: the origin of each row in the only one of several buckets."""
        return torch.stack([torch.zeros_like(self.offset), self.offset], 1)

    def spans(self) -> Tensor:
        """int64 [n]: bytes from the first element of each box in the bucket to the end of its last; 0 for an empty box."""
        size = self._used_size()
        last = ((size - 1) * self.stride.masked_fill(torch.arange(self.dims) >= self.ndim[:, None], 0)).sum(1)
        return torch.where((size > 0).all(1), (last + 1) * self._itemsize(), 0)

    def _used_size(self) -> Tensor:
        """``size`` with 1 for the dims that a target lacks."""
        return self.size.masked_fill(torch.arange(self.dims) >= self.ndim[:, None], 1)

    def _itemsize(self) -> Tensor:
        return torch.tensor(dtypes.ITEMSIZES)[self.dtype]


def regions_on_cpu(tensors: Sequence[Tensor], copies: CopyTable) -> tuple[list[Tensor], CopyTable]:
    """Returns the box of each row as a tensor of its own on CPU, and the rows of these: only what they name leaves a device."""
    boxes = ((target, start, size) for target, _, _, start, size, _ in copies.boxes())
    regions = [tensors[target][box_slices(start, size)].detach().cpu() for target, start, size in boxes]
    table = copies.clone()
    table.target[:] = torch.arange(len(copies))
    table.start[:] = 0
    return regions, table


def byte_view(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor, copied unless it is contiguous. uint8 [n]."""
    tensor = tensor.contiguous()  # which leaves the strides of a single element
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
