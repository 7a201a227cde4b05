"""The regions of its tensors that one rank takes out of some bytes: data, which is read and copied elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from epload.core.chunks import Chunks
from epload.core.copy_table import CopyTable
from epload.native import ops


class Regions(NamedTuple):
    """What ``ops.unpack`` and ``Checkpoint.read_regions`` take."""

    targets: list[Tensor]
    copies: CopyTable
    """Targets count in ``targets``."""
    origins: Tensor
    """int64 [n, 2]: the checkpoint tensor that each row of ``copies`` is of, and where in it it starts (bytes)."""
    pipe: ops.Pipe | None = None
    """How bytes of the host get to targets on a device."""

    def unpack(self, bucket: Tensor) -> None:
        """Copies them out of a bucket (uint8) on the targets' device, or on CPU."""
        if self.pipe is None or not bucket.is_cpu:
            ops.unpack(bucket, self.targets, self.copies.rows)
            return
        ops.upload([bucket], self.copies.in_bucket(), self.targets, self.copies.rows, self.pipe)

    def unpack_other(self, copies: CopyTable, bucket: Tensor) -> None:
        """Copies them out of a bucket on CPU in which they lie as ``copies`` says, which is else the same."""
        self._replace(copies=copies).unpack(bucket)

    def split(self, chunks: Chunks) -> Regions | None:
        """See :meth:`Chunks.split`."""
        parts = chunks.split(self.copies, self.origins)
        return None if parts is None else Regions(self.targets, *parts, self.pipe)


class PreparedRegions:
    """The same of CPU tensors that the native library knows: what follows from where the regions lie is prepared once, and kept
    for the next load, whose tensors may be others with the same layouts."""

    def __init__(self, targets: Sequence[int], copies: CopyTable, origins: Tensor) -> None:
        """Arguments are those of :class:`Regions`, but ``targets`` are indices into a tensor list."""
        self.targets = targets
        self.origins = origins
        self.copies = copies
        self._read_from: tuple[Tensor, Tensor, int] | None = None
        self._reads: ops.PreparedReads | None = None
        self._split: tuple[Chunks, PreparedRegions | None] | None = None

    def reads(self, tensors: ops.TensorList, files: Tensor, offsets: Tensor, file_count: int) -> ops.PreparedReads:
        """See ``ops.prepare_reads``; kept until the tensors of the checkpoint lie elsewhere."""
        known = self._read_from
        if (
            known is None
            or known[2] != file_count
            or not (torch.equal(known[0], files) and torch.equal(known[1], offsets))
        ):
            self._reads = ops.prepare_reads(
                tensors, self.targets, self.copies.rows, files, offsets, self.origins, file_count
            )
            self._read_from = files, offsets, file_count
        assert self._reads is not None
        return self._reads

    def split(self, chunks: Chunks) -> PreparedRegions | None:
        """See :meth:`Chunks.split`; kept for the next load of the same checkpoint."""
        if self._split is None or self._split[0] is not chunks:
            parts = chunks.split(self.copies, self.origins)
            self._split = chunks, None if parts is None else PreparedRegions(self.targets, *parts)
        return self._split[1]


class BoundRegions(NamedTuple):
    """Prepared regions, and the tensors of one load that they are of."""

    regions: PreparedRegions
    tensors: ops.TensorList

    @property
    def copies(self) -> CopyTable:
        """See :class:`Regions`."""
        return self.regions.copies

    @property
    def origins(self) -> Tensor:
        """See :class:`Regions`."""
        return self.regions.origins

    def split(self, chunks: Chunks) -> BoundRegions | None:
        """See :meth:`Chunks.split`."""
        parts = self.regions.split(chunks)
        return None if parts is None else BoundRegions(parts, self.tensors)

    def unpack_other(self, copies: CopyTable, bucket: Tensor) -> None:
        """See :meth:`Regions.unpack_other`."""
        prepared = ops.prepare_copies(self.tensors, self.regions.targets, copies.rows, bucket.numel())
        ops.unpack_prepared(bucket, self.tensors, prepared)
