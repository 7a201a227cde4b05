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
from epload.transfer.device import DeviceStaging


def filler(plan: LoadPlan, checkpoint: Checkpoint, staging: DeviceStaging | None) -> Fill:
    """Returns a function that fills buckets of a checkpoint that this rank has opened, on CPU or on the staging's device."""

    @cache
    def host_buffer() -> Tensor:
        return torch.empty(plan.largest, dtype=torch.uint8, device="cpu")

    def fill(number: int, buffer: Tensor) -> None:
        pieces = plan.buckets[number].pieces
        if buffer.is_cpu:
            checkpoint.fill(buffer, pieces)
            return
        assert staging is not None
        assert staging.pipe is not None
        if not checkpoint.fill_on_device(buffer, pieces, staging.pipe.native):
            bucket = host_buffer()[: buffer.nbytes]
            checkpoint.fill(bucket, pieces)
            begin = torch.zeros(1, dtype=torch.int64, device="cpu")
            copies = CopyTable.of_bytes(begin, begin + buffer.nbytes - HEADER_BYTES)
            body, pipe = buffer[HEADER_BYTES:], staging.pipe.native
            ops.upload([bucket[HEADER_BYTES:]], copies.in_bucket(), [body], copies.rows, pipe)

    return fill
