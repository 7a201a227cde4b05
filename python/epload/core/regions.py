"""Defines the regions of its tensors that one rank takes out of some bytes, or puts there."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from epload.core.chunks import Chunks
from epload.core.copy_table import CopyTable
from epload.native import ops


class Regions(NamedTuple):
    """Regions of targets to fill, as ``ops.unpack`` and ``Checkpoint.read_regions`` take them."""

    targets: list[Tensor]
    copies: CopyTable
    """Targets count in ``targets``."""
    origins: Tensor
    """int64 [n, 2]: the checkpoint tensor that each row of ``copies`` is of, and where in it it starts (bytes)."""
    pipe: ops.Pipe | None = None
    """Pipe through which bytes of the host get to targets on a device."""

    @classmethod
    def of_bytes(cls, memory: Tensor, pipe: ops.Pipe | None) -> Regions:
        """Returns all of some memory (uint8)."""
        begin = torch.zeros(1, dtype=torch.int64, device="cpu")
        return cls([memory], CopyTable.of_bytes(begin, begin + memory.numel()), begin, pipe)

    def unpack(self, bucket: Tensor) -> None:
        """Copies them out of a bucket (uint8) on the targets' device, or on CPU."""
        if self.pipe is None or not bucket.is_cpu:
            ops.unpack(bucket, self.targets, self.copies.rows)
            return
        ops.upload([bucket], self.copies.in_bucket(), self.targets, self.copies.rows, self.pipe)

    def pack(self, bucket: Tensor) -> None:
        """Copies them into a bucket (uint8) on the targets' device, or on CPU."""
        if self.pipe is None or not bucket.is_cpu:
            ops.pack(bucket, self.targets, self.copies.rows)
            return
        ops.download(self.targets, self.copies.rows, [bucket], self.copies.in_bucket(), self.pipe)

    def split(self, chunks: Chunks) -> Regions | None:
        """See :meth:`Chunks.split`."""
        parts = chunks.split(self.copies, self.origins)
        return None if parts is None else Regions(self.targets, *parts, self.pipe)
