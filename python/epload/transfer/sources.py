"""Sources: where a transfer's bytes come from. A checkpoint, or the shards of a model."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.core.copy_table import CopyTable
from epload.native import ops
from epload.native.ops import Pipe
from epload.planning.buckets import HEADER_BYTES
from epload.planning.plan import LoadPlan


class BucketSource(Protocol):
    """Used by one thread."""

    def fill(self, number: int, buffer: Tensor) -> None:
        """Fills a bucket behind its header.

        Args:
            buffer: the whole bucket; uint8.

        Raises:
            CheckpointError: what is in it cannot be read.
        """
        ...

    def write(self, data: Tensor, buffer: Tensor) -> None:
        """Copies bytes of the host into a part of a bucket, which may be on a device. ``data`` may be changed afterwards."""
        ...


class HostSource:
    """Base of each :class:`BucketSource` that fills buckets in host memory, or on the current stream."""

    def write(self, data: Tensor, buffer: Tensor) -> None:
        buffer.copy_(data)


class CheckpointSource:
    """Buckets of a checkpoint that this rank has opened."""

    def __init__(self, plan: LoadPlan, checkpoint: Checkpoint, pipe: Pipe | None) -> None:
        """
        Args:
            pipe: of the device that the buckets are on, if they are on one.
        """
        self._plan = plan
        self._checkpoint = checkpoint
        self._pipe = pipe
        self._host = torch.empty(0, dtype=torch.uint8, device="cpu")
        """A bucket, where none is filled on the device."""

    def fill(self, number: int, buffer: Tensor) -> None:
        pieces = self._plan.pieces(self._plan.buckets[number])
        if buffer.is_cpu:
            self._checkpoint.fill(buffer, pieces)
            return
        assert self._pipe is not None
        if self._checkpoint.fill_on_device(buffer, pieces, self._pipe):
            return
        if self._host.numel() == 0:
            self._host = torch.empty(self._plan.largest, dtype=torch.uint8, device="cpu")
        self._checkpoint.fill(self._host[: buffer.nbytes], pieces)
        self.write(self._host[HEADER_BYTES : buffer.nbytes], buffer[HEADER_BYTES:])

    def write(self, data: Tensor, buffer: Tensor) -> None:
        if buffer.is_cpu:
            buffer.copy_(data)
            return
        assert self._pipe is not None
        begin = torch.zeros(1, dtype=torch.int64, device="cpu")
        rows = CopyTable.of_bytes(begin, begin + data.nbytes).rows
        ops.upload([data], torch.stack([begin, begin], 1), [buffer], rows, self._pipe)
