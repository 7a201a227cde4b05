"""A trainer's weights in the ranks of other jobs: every layout against the full tensors, on CPU and on the fake accelerator.

Versions go from device to device if all ranks of both jobs have their tensors there, else through host memory. The fake's memory
cannot be opened by other processes here; see test_sync_pulls for where it can.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from support.accelerator import DEVICE
from support.device_syncs import CCL
from support.jobs import run
from support.sync_jobs import jobs_of, receive, send
from support.synced_models import check_bits, write_bits

HALF = torch.bfloat16
FSDP, TP = ("fsdp", 2, None, DEVICE), ("tp1", 2, None, DEVICE)


@pytest.mark.parametrize(
    ("semantics", "trainer", "engines", "verify", "dtype", "options", "transport"),
    [
        ("", ("fsdp", 2, None, "cpu"), [("tp0", 2, None, "cpu", "host")], False, torch.float32, {}, "host"),
        ("", ("fsdp", 3, [[0, 1], [2]], "cpu"), [("tp1", 2, [[0], [1]], "cpu", "host")], True, HALF, {}, "host"),
        ("", ("tp1", 2, [[0], [1]], "cpu"), [("fsdp", 4, [[0, 1], [2, 3]], "cpu", "none")], True, torch.float32, {}, "host"),
        ("", ("plain", 1, None, "cpu"), [("plain", 2, [[0], [1]], "cpu", "none")], True, torch.float32, {}, "host"),
        ("", ("tp0", 2, None, "cpu"), [("fsdp", 3, [[0, 1], [2]], "cpu", "device")], True, HALF, {}, "host"),
        ("nccl", ("tp1", 2, [[0], [1]], DEVICE), [("fsdp", 3, [[0, 1], [2]], DEVICE, "host")], False, HALF, {}, CCL),
        ("hccl", FSDP, [(*TP, "host"), ("plain", 1, None, DEVICE, "none")], True, HALF, {}, CCL),
        ("nccl", FSDP, [(*TP, "none")], True, HALF, {"transport": "host"}, "host"),
        ("nccl", ("plain", 1, None, DEVICE), [("tp0", 2, None, "cpu", "none")], True, HALF, {}, "host"),
        ("nccl", FSDP, [("plain", 1, None, DEVICE, "none"), ("plain", 1, None, "cpu", "host")], False, HALF, {}, "host"),
    ],
    ids=[
        "fsdp to tp", "three to two nodes", "tp to fsdp in place", "plain", "tp to fsdp beside", "nodes", "engines that differ",
        "host transport", "trainer on a device", "one engine on CPU",
    ],
)  # fmt: skip
@pytest.mark.usefixtures("fake_device")
def test_every_version_arrives_as_a_whole(
    semantics: str, trainer: Any, engines: list[Any], verify: bool, dtype: torch.dtype, options: Any, transport: str
) -> None:
    """Values differ in bfloat16, too, which rounds those of float32."""
    versions = (1, 2, 4)  # the third is as the second
    sends = partial(send, verify=verify, versions=versions, write=write_bits, **options)
    checks = partial(check_bits, source=torch.float32)
    receives = partial(receive, verify=verify, versions=versions, check=checks, dtype=dtype)
    jobs = jobs_of(trainer, engines, sends, receives, semantics)
    for of_rank in (of_rank for job in run(jobs) for of_rank in job):
        assert [report.transport for report in of_rank] == [transport] * 3
