"""Where the threads that read for an accelerator run: on the CPUs of its NUMA node, from which pinned memory is allocated too.

Known for CUDA devices, by their PCI address. Threads of other devices, of a virtual machine that says nothing about its nodes, or
of a process that may not run there, stay where the system puts them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

MAX_READ_THREADS = 16
_SYSFS = Path("/sys")


def read_threads(readers: int) -> int:
    """How many threads each of ``readers`` ranks of this node reads with: an equal part of the CPUs that this process may use,
    from 1 to 16."""
    return max(1, min(MAX_READ_THREADS, len(_allowed()) // readers))


@contextmanager
def near(device: torch.device) -> Iterator[None]:
    """Runs the calling thread, and threads that it starts inside, on the CPUs near a device."""
    before = _allowed()
    move_thread(device)
    try:
        yield
    finally:
        _run_on(before)


def move_thread(device: torch.device) -> None:
    """Moves the calling thread, and those that it will start, to the CPUs near a device, if they are known."""
    _run_on(cpus_near(_pci_address(device), _SYSFS) & _allowed())


def cpus_near(address: str, sysfs: Path) -> frozenset[int]:
    """The CPUs of the NUMA node of a PCI device; empty if the system does not say.

    Args:
        address: such as ``0000:3b:00.0``; may be empty.
        sysfs: where ``/sys`` is; see sysfs-bus-pci and sysfs-devices-node in the kernel's ABI documentation.
    """
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text()) if address else -1
        return (
            _parse_list((sysfs / f"devices/system/node/node{node}/cpulist").read_text()) if node >= 0 else frozenset()
        )
    except (OSError, ValueError):
        return frozenset()


def _parse_list(text: str) -> frozenset[int]:
    """Such as ``0-3,8``. Empty for a node that has memory alone. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


@cache
def _pci_address(device: torch.device) -> str:
    """Empty if it is not known."""
    if device.type != "cuda":
        return ""
    found: Any = torch.cuda.get_device_properties(device)  # torch does not declare the address
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _allowed() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0))


def _run_on(cpus: frozenset[int]) -> None:
    """Moves the calling thread. Without effect if there are none, or if the system does not allow it."""
    if cpus:
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)  # 0 is the calling thread, not the process
