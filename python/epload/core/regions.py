"""The regions that one rank takes out of one bucket, and ways to divide and pack them. Rows of the native copy table."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from epload.core import dtypes
from epload.native import ops

ALIGNMENT = 16
"""Bytes; where a slot may start in a bucket. The widest access of a device, and a multiple of the size of any element, so
that a slot can be viewed as its tensor's dtype."""
FIXED_COLUMNS = 4
"""Of the native copy table, before those of the dims (see ``ops.unpack``)."""


class Regions(NamedTuple):
    """What ``ops.unpack`` and ``Checkpoint.read_regions`` take."""

    targets: list[Tensor]
    copies: Tensor
    """The native copy table; column 0 counts in ``targets``."""
    origins: Tensor
    """See ``plan.Bucket.origins``."""

    def read(
        self, descriptors: Sequence[int], files: Tensor, offsets: Tensor, threads: int
    ) -> tuple[int, int, int, int]:
        """Those on CPU, from files; see ``ops.read_regions``."""
        return ops.read_regions(descriptors, files, offsets, self.origins, self.targets, self.copies, threads)

    def by_device(self) -> tuple[Regions, Regions]:
        """Those whose targets are on CPU, and the others."""
        on_cpu = torch.tensor([target.is_cpu for target in self.targets], dtype=torch.bool)
        if not on_cpu.any():
            return self._where(torch.zeros(len(self.copies), dtype=torch.bool)), self
        rows = on_cpu[self.copies[:, 0]]
        return self._where(rows), self._where(~rows)

    def _where(self, rows: Tensor) -> Regions:
        copies = self.copies[rows]
        wanted, copies[:, 0] = torch.unique(copies[:, 0], return_inverse=True)
        return Regions([self.targets[i] for i in wanted.tolist()], copies, self.origins[rows])

    def packed(self) -> tuple[Regions, int]:
        """The same out of a buffer that holds nothing else, one region after the other; and its bytes."""
        copies, nbytes = packed(self.copies)
        return self._replace(copies=copies), nbytes

    def read_into(self, buffer: Tensor) -> Regions:
        """For reading the regions to where :meth:`packed` expects them: each has a piece of ``buffer`` as its target."""
        table, _ = packed(self.copies)
        copies = self.copies.clone()
        dims = _dims(copies)
        copies[:, 0] = torch.arange(len(copies))
        copies[:, FIXED_COLUMNS : FIXED_COLUMNS + dims] = 0
        views = []
        for _, at, code, ndim, *box in table.tolist():
            dtype, size = dtypes.from_code(code), box[dims : dims + ndim]
            views.append(buffer[at : at + prod(size) * dtype.itemsize].view(dtype).view(size))
        return Regions(views, copies, self.origins)


def packed(copies: Tensor) -> tuple[Tensor, int]:
    """A copy table for the same regions out of a buffer in which they lie one after the other, row-major; its bytes."""
    dims = _dims(copies)
    made = copies.clone()
    beyond = torch.arange(dims) >= copies[:, 3:4]
    size = copies[:, FIXED_COLUMNS + dims : FIXED_COLUMNS + 2 * dims].masked_fill(beyond, 1)
    inner = size.flip(1).cumprod(1).flip(1)  # elements of one index of the dim before
    made[:, FIXED_COLUMNS + 2 * dims : -1] = inner[:, 1:]
    made[:, -1] = 1
    itemsize = torch.zeros(len(copies), dtype=torch.int64)
    for code in torch.unique(copies[:, 2]).tolist():
        itemsize[copies[:, 2] == code] = dtypes.from_code(code).itemsize
    room = -(inner[:, 0] * itemsize // -ALIGNMENT) * ALIGNMENT
    ends = room.cumsum(0)
    made[:, 1] = ends - room
    return made, int(ends[-1]) if len(ends) else 0


def _dims(copies: Tensor) -> int:
    return (copies.shape[1] - FIXED_COLUMNS) // 3
