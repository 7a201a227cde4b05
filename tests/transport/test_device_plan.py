"""What is read for a device is merged into few copies, and what that takes is prepared once. On a fake accelerator."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from epload import HierarchicalLoader, Topology
from epload.native import ops
from epload.transport import device_plan
from support import fakedev, ranks
from support.accelerator import DEVICE
from support.checks import all_fine

pytestmark = pytest.mark.usefixtures("fake_device")

TENSORS, ELEMENTS = 12, 1000
KEPT = 4 * ELEMENTS
"""Bytes of a tensor, and of what a bucket holds."""


def model() -> nn.Module:
    """Every third tensor on CPU."""
    return nn.ParameterList(
        [nn.Parameter(torch.zeros(ELEMENTS, device="cpu" if i % 3 == 2 else DEVICE)) for i in range(TENSORS)]
    )


def state(salt: int) -> dict[str, torch.Tensor]:
    return {str(i): torch.arange(float(ELEMENTS)) + 10_000 * i + salt for i in range(TENSORS)}


def merged(rank: int, folder: Path, limit: int, copies: int) -> list[str]:
    """``copies``: to the device, in a load."""
    problems = []
    if rank == 0:
        for salt in (1, 2):
            save_file(state(salt), folder / f"{salt}.safetensors")
    torch.distributed.barrier()
    loader = HierarchicalLoader(Topology.discover(), readers="every", bucket_bytes=64 + KEPT, timeout=60.0)
    target = model()
    with mock.patch.object(device_plan, "MERGED", limit):
        for salt in (1, 2):
            prepared = mock.Mock(side_effect=ops.prepare_reads)
            with fakedev.traced() as seen, mock.patch.object(ops, "prepare_reads", prepared):
                report = loader.load(target, folder / f"{salt}.safetensors")
            count = Counter(what for _, _, what in seen)["copy to device"]
            if (report.buckets, count) != (TENSORS, copies):
                problems.append(f"{report.buckets} buckets in {count} copies to the device")
            if prepared.call_count != (copies if salt == 1 else 0):
                problems.append(f"load {salt} prepared {prepared.call_count} reads")
            for name, value in state(salt).items():
                if not torch.equal(dict(target.named_parameters())[name].detach().cpu(), value):
                    problems.append(f"load {salt}: {name} is wrong")
            room = 2 * 2 * max(limit, KEPT) + 4096  # two buffers of each kind, and a header
            if report.peak_staging > room:
                problems.append(f"{report.peak_staging} bytes of staging, expected at most {room}")
    return problems


@pytest.mark.parametrize(("limit", "copies"), [(1, 8), (3 * 4096, 4), (6 * 4096, 2), (1 << 20, 1)])
def test_buckets_go_to_the_device_together(limit: int, copies: int, tmp_path: Path) -> None:
    """As many as fit into a pinned buffer, of which a tensor takes 4,000 bytes."""
    all_fine(ranks.run(2, merged, tmp_path, limit, copies, setup=fakedev.setup))
