"""The memory that a save takes besides the shards: two buffers a rank, or two waves a node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import epload
from epload.planning.schedule import WAVE_BYTES
from epload.saving.plan import BUCKET_BYTES
from measure import PeakMemory
from support import ranks

MB = 1 << 20
PYTHON = 24 * MB
"""Planning, threads, and what allocators keep."""


def save(rank: int, disks: list[str]) -> int:
    """Bytes above the start, where the shards are 128 MB."""
    os.chdir(disks[rank // 2])
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False, device="meta") for _ in range(32)))  # 512 MB
    fully_shard(model)
    model.to_empty(device="cpu")
    topology = epload.Topology.from_nodes([[0, 1], [2, 3]])
    for parameter in model.parameters():
        parameter.detach().to_local().normal_()
    dist.barrier()
    with PeakMemory() as memory:
        report = epload.save(model, "/proc/self/cwd/checkpoint", topology=topology, timeout=60)
    assert report.nbytes == 512 * MB
    return memory.above


@pytest.mark.parametrize("apart", [False, True])
def test_memory_is_bounded(apart: bool, tmp_path: Path) -> None:
    disks = [str(tmp_path / name) for name in ("ab" if apart else "aa")]
    for disk in disks:
        os.makedirs(disk, exist_ok=True)
    found = ranks.run(4, save, disks)
    # Pages that the ranks of a node share count for each of them.
    limit = 2 * (WAVE_BYTES + BUCKET_BYTES if apart else BUCKET_BYTES) + PYTHON
    assert all(above <= limit for above in found), ([above // MB for above in found], limit // MB)
    for disk in disks:
        assert (Path(disk) / "checkpoint" / "model.safetensors").stat().st_size > 512 * MB
    with torch.no_grad():
        epload.load(nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(32))), f"{disks[1]}/checkpoint")
