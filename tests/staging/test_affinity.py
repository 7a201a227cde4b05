"""Threads that read for an accelerator, and where they run. CPUs of this machine, and made-up trees of /sys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import epload
from epload import HierarchicalLoader, Topology
from epload.native import ops
from epload.staging import affinity
from support import fakedev, ranks
from support.accelerator import NODES, meta_net, wrong
from support.small_model import BUCKET, state_for

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


@pytest.mark.parametrize(
    ("allowed", "online", "readers", "threads"),
    [
        (1, 1, 1, 2), (2, 2, 8, 2), (64, 64, 8, 8), (192, 192, 8, 16), (192, 192, 1, 16), (7, 7, 2, 3),
        (8, 64, 8, 8),  # a launcher has given each rank its own
        (16, 128, 8, 16), (1, 64, 8, 2), (0, 64, 8, 2),
    ],
)  # fmt: skip
def test_readers_share_the_cpus(allowed: int, online: int, readers: int, threads: int) -> None:
    affine = mock.patch.object(os, "sched_getaffinity", return_value=set(range(allowed)))
    with affine, mock.patch.object(os, "cpu_count", return_value=online):
        assert affinity.read_threads(readers) == threads


@pytest.mark.parametrize(
    ("near", "allowed", "moves"),
    [(range(48), range(96), True), (range(16), range(96), True), (range(15), range(96), False), (range(4), range(8), True),
     (range(1), range(31), False), (range(40, 50), range(8), False)],
)  # fmt: skip
def test_a_thread_moves_only_to_enough_cpus(near: range, allowed: range, moves: bool, tmp_path: Path) -> None:
    affine = mock.patch.object(os, "sched_getaffinity", return_value=set(allowed))
    with near_cpus({*near}, tmp_path), affine, mock.patch.object(os, "sched_setaffinity") as moved:
        with affinity.near(torch.device("cpu")):
            assert moved.called == moves
        calls = [call.args for call in moved.call_args_list]
    assert calls == ([(0, {*near} & {*allowed}), (0, {*allowed})] if moves else [])


def test_a_system_that_says_and_allows_nothing(tmp_path: Path) -> None:
    refused = {"sched_getaffinity": mock.Mock(side_effect=OSError), "sched_setaffinity": mock.Mock(side_effect=OSError)}
    with near_cpus({0}, tmp_path), mock.patch.multiple(os, **refused):
        assert affinity.read_threads(1) == 2
        with affinity.near(torch.device("cpu")):
            pass
    assert affinity._pci_address(torch.device("cpu")) == ""


def near_cpus(cpus: set[int], folder: Path) -> Any:
    """As if the fake accelerator were on a NUMA node with these CPUs."""
    tree = sysfs(folder, "1", ",".join(map(str, cpus)))
    return mock.patch.multiple(affinity, _pci_address=lambda device: ADDRESS, _SYSFS=tree)


@several
def test_a_thread_goes_back(tmp_path: Path) -> None:
    """However what it does there ends."""

    def fail() -> None:
        with near_cpus(PART, tmp_path), affinity.near(torch.device("cpu")):
            assert os.sched_getaffinity(0) == PART
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert os.sched_getaffinity(0) == HERE


def test_cpus_that_this_process_may_not_use(tmp_path: Path) -> None:
    with near_cpus({10_000}, tmp_path), affinity.near(torch.device("cpu")):
        assert os.sched_getaffinity(0) == HERE


def reads_near(rank: int, readers: str, folder: Path) -> tuple[list[tuple[set[int], int]], bool, list[str]]:
    """The CPUs and the number of threads of each read of a load, whether this thread went back, and what is wrong."""
    found: list[tuple[set[int], int]] = []
    read_really, pipe_really, threads = ops.read_to_device, ops.device_pipe, 0

    def device_pipe(device: torch.device, count: int, piece_bytes: int) -> ops.Pipe:
        nonlocal threads
        threads = count
        return pipe_really(device, count, piece_bytes)

    def read_to_device(*args: Any) -> Any:
        found.append((os.sched_getaffinity(0), threads))
        return read_really(*args)

    (folder / str(rank)).mkdir()
    model = meta_net()
    before = os.sched_getaffinity(0)
    with (
        near_cpus(PART, folder / str(rank)),
        mock.patch.object(ops, "device_pipe", device_pipe),
        mock.patch.object(ops, "read_to_device", read_to_device),
    ):
        loader = HierarchicalLoader(Topology.from_nodes(NODES[2]), readers=readers, bucket_bytes=BUCKET, timeout=60.0)
        loader.load(model, folder / "model.safetensors")
    return found, os.sched_getaffinity(0) == before, wrong(model, state_for(1))


@several
@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize("readers", ["one", "partitioned", "every", "per_node"])
def test_reads_for_a_device_run_near_it(readers: str, tmp_path: Path) -> None:
    """With as many threads as there are CPUs for each rank that reads: each has a node of its own here."""
    save_file(state_for(1), tmp_path / "model.safetensors")
    results = ranks.run(2, reads_near, readers, tmp_path, setup=fakedev.setup)
    for rank, (found, back, bad) in enumerate(results):
        assert bad == []
        assert back
        assert bool(found) == (rank == 0 or readers != "one")
        assert all(cpus == PART for cpus, _ in found)
        assert {threads for _, threads in found} <= {affinity.read_threads(1)}


def test_a_load_on_cpu_reads_where_it_is(tmp_path: Path) -> None:
    save_file({"w": torch.ones(5)}, tmp_path / "model.safetensors")
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(5))})
    with near_cpus(PART, tmp_path), mock.patch.object(affinity, "_run_on", side_effect=AssertionError):
        epload.load(model, tmp_path / "model.safetensors", progress=False)
    assert model["w"].sum() == 5
