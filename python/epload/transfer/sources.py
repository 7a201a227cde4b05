"""Fills buckets from a checkpoint."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.core.copy_table import CopyTable
from epload.native import ops
from epload.planning.buckets import HEADER_BYTES
from epload.planning.plan import LoadPlan
from epload.transfer.context import Fill


def checkpoint_source(plan: LoadPlan, checkpoint: Checkpoint, pipe: ops.Pipe | None) -> Fill:
    """Returns a function that fills buckets of a checkpoint that this rank has opened.

    Args:
        pipe: of the device that the buckets are on, if they are on one.
    """

    @cache
    def host_buffer() -> Tensor:
        return torch.empty(plan.largest, dtype=torch.uint8, device="cpu")

    def fill(number: int, buffer: Tensor) -> None:
        pieces = plan.buckets[number].pieces
        if buffer.is_cpu:
            checkpoint.fill(buffer, pieces)
            return
        assert pipe is not None
        if not checkpoint.fill_on_device(buffer, pieces, pipe):
            bucket = host_buffer()[: buffer.nbytes]
            checkpoint.fill(bucket, pieces)
            begin = torch.zeros(1, dtype=torch.int64, device="cpu")
            copies = CopyTable.of_bytes(begin, begin + buffer.nbytes - HEADER_BYTES)
            ops.upload([bucket[HEADER_BYTES:]], copies.in_bucket(), [buffer[HEADER_BYTES:]], copies.rows, pipe)

    return fill
