"""Threads that read for an accelerator, and where they run. CPUs of this machine, and made-up trees of /sys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from epload.transfer import affinity

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
