"""The regions of its tensors that one rank takes out of some bytes: data, which is read and copied elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from epload.core import dtypes
from epload.core.copy_table import CopyTable
from epload.native import ops


class Regions(NamedTuple):
    """What ``ops.unpack`` and ``Checkpoint.read_regions`` take."""

    targets: list[Tensor]
    copies: CopyTable
    """Targets count in ``targets``."""
    origins: Tensor
    """int64 [n, 2]: the checkpoint tensor that each row of ``copies`` is of, and where in it it starts (bytes)."""

    def unpack(self, bucket: Tensor) -> None:
        """Copies them out of a bucket (uint8) on the targets' device."""
        ops.unpack(bucket, self.targets, self.copies.rows)

    def by_device(self) -> tuple[Regions, Regions]:
        """Those whose targets are on CPU, and the others."""
        on_cpu = torch.tensor([target.is_cpu for target in self.targets], dtype=torch.bool)
        if not on_cpu.any():
            return self._select(torch.zeros(len(self.copies), dtype=torch.bool)), self
        rows = on_cpu[self.copies.target]
        return self._select(rows), self._select(~rows)

    def packed(self) -> tuple[Regions, int]:
        """The same out of a buffer in which they lie one after the other; and its bytes."""
        copies, nbytes = self.copies.packed()
        return self._replace(copies=copies), nbytes

    def read_into(self, buffer: Tensor) -> Regions:
        """For reading the regions to where :meth:`packed` expects them: each has a part of ``buffer`` as its target."""
        packed, _ = self.copies.packed()
        copies = self.copies.clone()
        copies.target[:] = torch.arange(len(copies))
        copies.start[:] = 0
        views = []
        columns = (packed.offset, packed.dtype, packed.ndim, packed.size)
        for at, code, ndim, size in zip(*(column.tolist() for column in columns), strict=True):
            dtype, shape = dtypes.from_code(code), size[:ndim]
            views.append(buffer[at : at + prod(shape) * dtype.itemsize].view(dtype).view(shape))
        return Regions(views, copies, self.origins)

    def _select(self, rows: Tensor) -> Regions:
        copies = self.copies.select(rows)
        return Regions([self.targets[i] for i in copies.renumber_targets()], copies, self.origins[rows])


class PreparedRegions:
    """The same of CPU tensors that the native library knows: what follows from where the regions lie is prepared once, and kept
    for the next load, whose tensors may be others with the same layouts."""

    def __init__(self, targets: Sequence[int], copies: CopyTable, origins: Tensor) -> None:
        """Arguments are those of :class:`Regions`, but ``targets`` are indices into a tensor list."""
        self.targets = targets
        self.origins = origins
        self._copies = copies
        self._read_from: tuple[Tensor, Tensor, int] | None = None
        self._reads: ops.PreparedReads | None = None

    def reads(self, tensors: ops.TensorList, files: Tensor, offsets: Tensor, file_count: int) -> ops.PreparedReads:
        """See ``ops.prepare_reads``; kept until the tensors of the checkpoint lie elsewhere."""
        known = self._read_from
        if (
            known is None
            or known[2] != file_count
            or not (torch.equal(known[0], files) and torch.equal(known[1], offsets))
        ):
            self._reads = ops.prepare_reads(
                tensors, self.targets, self._copies.rows, files, offsets, self.origins, file_count
            )
            self._read_from = files, offsets, file_count
        assert self._reads is not None
        return self._reads


class BoundRegions(NamedTuple):
    """Prepared regions, and the tensors of one load that they are of."""

    regions: PreparedRegions
    tensors: ops.TensorList

    @property
    def origins(self) -> Tensor:
        """See :class:`Regions`."""
        return self.regions.origins
