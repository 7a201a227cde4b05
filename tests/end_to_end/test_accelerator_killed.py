"""A rank is killed while others are in a collective with it on a device, where they cannot notice. On a fake accelerator."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epload import HierarchicalLoader, Topology
from epload.native import ops
from support import fakedev, ranks
from support.accelerator import DEVICE, NODES, for_readers, meta_net, wrong
from support.failures import Raised, check_raised, raised_by
from support.small_model import BUCKET, state_for

pytestmark = pytest.mark.usefixtures("fake_device")

SOON = 20.0
"""Seconds for what takes one or two on a machine with nothing else to do; the groups' own timeout is more than 100."""


class Broadcasts:
    """Counts the broadcasts of this process, which does not survive one of them."""

    def __init__(self, fatal: int = -1) -> None:
        self.calls = 0
        self._fatal = fatal
        self._broadcast = ops.coalesced_bcast

    def __call__(self, *args: Any, **options: Any) -> None:
        if self.calls == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls += 1
        self._broadcast(*args, **options)


def killed_in_a_collective(
    rank: int, victim: int, which: int, readers: str, algorithm: str, wedged: bool, folder: Path
) -> tuple[Raised, list[str]]:
    """``which``: the broadcast in which the victim ends; if negative, that many before the end of a second load."""
    fakedev.wedge_aborts(wedged)
    options: dict[str, Any] = {"readers": readers, "algorithm": algorithm, "bucket_bytes": BUCKET, "timeout": 90.0}
    loader = HierarchicalLoader(Topology.from_nodes(NODES[4]), verify=which < 0, **options)
    model = meta_net()
    if which < 0:
        with mock.patch.object(ops, "coalesced_bcast", Broadcasts()) as counted:
            loader.load(model, for_readers(state_for(1), readers))
        which += counted.calls
    with mock.patch.object(ops, "coalesced_bcast", Broadcasts(which if rank == victim else -1)):
        raised = raised_by(lambda: loader.load(model, for_readers(state_for(1), readers)))
    if wedged:
        return raised, []
    torch.accelerator.synchronize()  # nothing is stuck on any stream
    # The process lives, and loads again with the ranks that are left.
    dist.destroy_process_group()
    left = [other for other in range(4) if other != victim]
    init = f"file://{folder}/again"
    dist.init_process_group(fakedev.BACKENDS, init_method=init, rank=left.index(rank), world_size=3)
    model = meta_net()
    HierarchicalLoader(Topology.from_nodes(NODES[3]), **options).load(model, for_readers(state_for(2), readers))
    return raised, wrong(model, state_for(2))


@pytest.mark.parametrize(
    ("semantics", "victim", "which", "readers", "algorithm", "wedged"),
    [
        ("hccl", 2, 1, "one", "two_level", False),
        ("nccl", 0, 3, "one", "two_level", False),
        ("nccl", 3, 4, "one", "striped", False),
        ("hccl", 2, 3, "partitioned", "two_level", False),
        # The reader waits for no header, and goes on to the proof, which copies from the device.
        ("nccl", 2, -2, "one", "two_level", False),
        # An abort that does not return.
        ("hccl", 2, 3, "one", "two_level", True),
    ],
)
def test_the_others_raise_and_load_again(
    semantics: str, victim: int, which: int, readers: str, algorithm: str, wedged: bool, tmp_path: Path
) -> None:
    began = time.monotonic()
    results = ranks.run(
        4, killed_in_a_collective, victim, which, readers, algorithm, wedged, tmp_path,
        setup=partial(fakedev.setup, semantics), dying=(victim,), limit=100,
    )  # fmt: skip
    lived = [result for result in results if result is not None]
    check_raised([raised for raised, _ in lived], f"rank {victim} has exited", seconds=SOON)
    assert [bad for _, bad in lived] == [[]] * 3
    assert time.monotonic() - began < 3 * SOON, "processes end, too"


def on_device_1(rank: int) -> list[int]:
    """Contexts that loads of a rank on ``fakedev:1`` make."""
    torch.accelerator.set_device_index(1)
    topology = Topology.from_nodes(NODES[2])
    for readers in ("one", "partitioned", "every", "per_node"):
        model = meta_net(where=DEVICE.replace("0", "1"))
        loader = HierarchicalLoader(topology, readers=readers, bucket_bytes=BUCKET, timeout=60.0)
        for turn in range(2):
            loader.load(model, for_readers(state_for(turn), readers))
    return fakedev.contexts()


def test_each_thread_uses_the_ranks_own_device() -> None:
    assert ranks.run(2, on_device_1, setup=fakedev.setup) == [[1], [1]]
