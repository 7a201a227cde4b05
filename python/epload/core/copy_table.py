"""The table of copies that the native ops take: which box of which tensor lies where in a bucket or a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epload.core import dtypes

ALIGNMENT = 16
"""Bytes; where a slot may start in a bucket. The widest access of a device, and a multiple of the size of any element, so
that a slot can be viewed as its tensor's dtype."""
_TARGET, _OFFSET, _DTYPE, _NDIM, _FIXED = range(5)


@dataclass(frozen=True, eq=False)
class CopyTable:
    """One copy a row. See ``ops.unpack``."""

    rows: Tensor
    """int64 [n, 4 + 3 * dims], on CPU: target, offset, dtype, ndim, then start, size and stride in each dim."""

    def __len__(self) -> int:
        return len(self.rows)

    @staticmethod
    def columns(dims: int) -> int:
        """Width of a table for targets of up to ``dims`` dims."""
        return _FIXED + 3 * dims

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


def byte_view(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor, copied unless it is contiguous. uint8 [n]."""
    tensor = tensor.contiguous()  # which leaves the strides of a single element
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
