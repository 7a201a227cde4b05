"""Memory that ranks of a node share, headers of buckets in it, and the CPUs on which they read for an accelerator."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from epload import HierarchicalLoader, Topology
from epload.errors import LoadError
from epload.native import ops
from epload.planning.buckets import HEADER_BYTES
from epload.transfer import affinity
from epload.transfer.framing import BucketHeader
from support.accelerator import run_on
from support.checks import all_fine
from support.memory import mapped_memfds, memfds
from support.small_model import BUCKET, NODES, meta_net, state_for, wrong

LONG = 60.0
"""Seconds nobody is to wait."""


def words(slots: int) -> Tensor:
    return torch.zeros(ops.BOARD_FIXED_WORDS + slots, dtype=torch.int32)


@pytest.mark.parametrize("slot", [0, 31, 99])
def test_a_post_wakes_those_who_wait_for_it(slot: int) -> None:
    board, outcomes = words(100), {}

    def wait(own: int) -> None:
        outcomes[own] = ops.board_wait(board, [own], 1, LONG)

    others = [other for other in range(100) if other != slot][::9]
    waiters = {own: threading.Thread(target=wait, args=(own,)) for own in (slot, *others)}
    for waiter in waiters.values():
        waiter.start()
    time.sleep(0.1)
    ops.board_post(board, slot, 1)
    waiters[slot].join(LONG / 4)
    assert outcomes == {slot: ops.BOARD_REACHED}
    ops.board_post(board, -1, 1)
    for waiter in waiters.values():
        waiter.join(LONG / 4)
    assert outcomes == {slot: ops.BOARD_REACHED, **dict.fromkeys(others, ops.BOARD_FAILED)}


@contextmanager
def rejected(name: str) -> Iterator[None]:
    """This rank cannot open the memory of other processes, or cannot make memory."""
    real = getattr(os, name)

    def reject(what: Any, *args: Any, **options: Any) -> Any:
        if name == "open" and not str(what).startswith("/proc/"):
            return real(what, *args, **options)
        raise PermissionError(13, "not in this container")

    with mock.patch.object(os, name, reject):
        yield


def cannot_share(rank: int, device: str, odd: int, what: str) -> list[str]:
    problems, state = [], state_for(1)
    for readers in ("one", "per_node", "partitioned"):
        for algorithm in ("two_level", "striped"):
            options: dict[str, Any] = {"algorithm": algorithm, "bucket_bytes": BUCKET, "timeout": 30}
            loader = HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, **options)
            model = meta_net(where=device)
            with rejected(what) if rank == odd else nullcontext():
                report = loader.load(model, state)
            if report.algorithm != "two_level" and device == "cpu":
                problems.append(f"{readers} {algorithm}: reports {report.algorithm}")
            problems += [f"{readers} {algorithm}: {text}" for text in wrong(model, state, where=device)]
            loader.load(model, state_for(2))
            problems += [f"{readers} {algorithm}, again: {text}" for text in wrong(model, state_for(2), where=device)]
            if left := mapped_memfds() + memfds():
                problems.append(f"{readers} {algorithm}: left {left}")
    return problems


@pytest.mark.parametrize(("place", "odd", "what"), [("cpu", 3, "open"), ("cpu", 2, "memfd_create"), ("nccl", 2, "open")])
def test_where_one_rank_cannot_share_all_have_their_own(place: str, odd: int, what: str) -> None:
    all_fine(run_on(place, 4, cannot_share, odd, what))


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_other_bytes_are_no_header(raw: bytes) -> None:
    with pytest.raises(LoadError, match="out of step"):
        BucketHeader.unpack(torch.tensor(list(raw), dtype=torch.uint8))


ADDRESS = "0000:3b:00.0"
HERE = frozenset(os.sched_getaffinity(0))
PART = set(sorted(HERE)[len(HERE) // 2 :])
"""Half of the CPUs that this process may use."""
several = pytest.mark.skipif(len(HERE) < 2, reason="there is one CPU, on which every thread runs")


def sysfs(folder: Path, node: str | None, cpus: str | None) -> Path:
    if node is not None:
        (folder / "bus/pci/devices" / ADDRESS).mkdir(parents=True)
        (folder / "bus/pci/devices" / ADDRESS / "numa_node").write_text(node)
    if cpus is not None:
        (folder / "devices/system/node/node1").mkdir(parents=True)
        (folder / "devices/system/node/node1/cpulist").write_text(cpus)
    return folder


@pytest.mark.parametrize(
    ("node", "cpus", "expected"),
    [
        ("1\n", "0-3,8\n", {0, 1, 2, 3, 8}),
        ("1", "5", {5}),
        ("-1\n", "0-3\n", set()),  # a virtual machine
        ("1\n", "\n", set()),  # memory alone
        ("1\n", None, set()),
        (None, "0-3\n", set()),  # fewer devices than expected
        ("one\n", "0-3\n", set()),
        ("1\n", "0-three\n", set()),
    ],
)
def test_the_cpus_near_a_device(node: str | None, cpus: str | None, expected: set[int], tmp_path: Path) -> None:
    assert affinity.cpus_near(ADDRESS, sysfs(tmp_path, node, cpus)) == expected
    assert affinity.cpus_near("", tmp_path) == frozenset(), "a device of no known address"


def near_cpus(cpus: set[int], folder: Path) -> Any:
    """Makes the fake accelerator seem to be on a NUMA node with these CPUs."""
    tree = sysfs(folder, "1", ",".join(map(str, cpus)))
    return mock.patch.multiple(affinity, pci_address=lambda device: ADDRESS, _SYSFS=tree)


@several
def test_a_thread_goes_back(tmp_path: Path) -> None:

    def fail() -> None:
        with near_cpus(PART, tmp_path), affinity.near(torch.device("cpu")):
            assert os.sched_getaffinity(0) == PART
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert os.sched_getaffinity(0) == HERE
