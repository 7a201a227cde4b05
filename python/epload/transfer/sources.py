"""Fills buckets from a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.core.copy_table import CopyTable
from epload.native import ops
from epload.planning.buckets import HEADER_BYTES
from epload.planning.plan import LoadPlan
from epload.transfer.framing import Fill


def checkpoint_source(plan: LoadPlan, checkpoint: Checkpoint, pipe: ops.Pipe | None) -> Fill:
    """Returns a function that fills buckets of a checkpoint that this rank has opened.

    Args:
        pipe: of the device that the buckets are on, if they are on one.
    """
    host = torch.empty(0, dtype=torch.uint8, device="cpu")

    def fill(number: int, buffer: Tensor) -> None:
        nonlocal host
        pieces = plan.buckets[number].pieces
        if buffer.is_cpu:
            checkpoint.fill(buffer, pieces)
            return
        assert pipe is not None
        if checkpoint.fill_on_device(buffer, pieces, pipe):
            return
        if host.numel() == 0:
            host = torch.empty(plan.largest, dtype=torch.uint8, device="cpu")
        checkpoint.fill(host[: buffer.nbytes], pieces)
        data = host[HEADER_BYTES : buffer.nbytes]
        begin = torch.zeros(1, dtype=torch.int64, device="cpu")
        rows = CopyTable.of_bytes(begin, begin + data.nbytes).rows
        ops.upload([data], torch.stack([begin, begin], 1), [buffer[HEADER_BYTES:]], rows, pipe)

    return fill
