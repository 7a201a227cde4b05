"""The memory that a save takes besides the shards: a region a rank; with a base, also those that are checked at the end."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import epload
from epload.checkpoint.delta import BATCH_BYTES
from epload.saving.plan import SLOT_BYTES
from measure import PeakMemory
from support import ranks

MB = 1 << 20
PYTHON = 24 * MB
"""Planning, threads, and what allocators keep."""


def save(rank: int, folder: str) -> int:
    """Returns the bytes above the start, where the shards are 128 MB; of a save with a base, those above a batch."""
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False, device="meta") for _ in range(32)))  # 512 MB
    fully_shard(model)
    model.to_empty(device="cpu")
    topology = epload.Topology.from_nodes([[0, 1], [2, 3]])
    for parameter in model.parameters():
        parameter.detach().to_local().normal_()
    dist.barrier()
    with PeakMemory() as memory:
        report = epload.save(model, folder, topology=topology, timeout=60)
    assert report.nbytes == 512 * MB
    for parameter in model.parameters():
        parameter.detach().to_local()[::3] += 1
    with PeakMemory() as with_base:
        epload.save(model, f"{folder}-2", topology=topology, timeout=60, base=folder)
    return max(memory.above, with_base.above - BATCH_BYTES)


def test_memory_is_bounded(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    found = ranks.run(4, save, str(folder))
    limit = 2 * SLOT_BYTES + PYTHON
    assert all(above <= limit for above in found), ([above // MB for above in found], limit // MB)
    assert (folder / "model.safetensors").stat().st_size > 512 * MB
    with torch.no_grad():
        epload.load(nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(32))), folder)
