"""Runs the threads that read for an accelerator on the CPUs of its NUMA node, from which pinned memory is allocated too.

The node is known for CUDA devices, by their PCI address. Threads of other devices, of a virtual machine that says nothing about
its nodes, or of a process that may use few of the CPUs there, stay where the system puts them. All of this is for speed: what
the system does not say or allow is left as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

MIN_READ_THREADS, MAX_READ_THREADS = 2, 16
_SYSFS = Path("/sys")


def read_threads(readers: int) -> int:
    """Returns the number of threads that each of ``readers`` ranks of this node reads with, from 2 to 16: one a CPU of the rank.

    A rank that may use all CPUs shares them with the others. One that may not has its own, as launchers give them.
    """
    cpus = len(_allowed())
    if cpus >= (os.cpu_count() or 1):
        cpus //= readers
    return max(MIN_READ_THREADS, min(MAX_READ_THREADS, cpus))


@contextmanager
def near(device: torch.device) -> Iterator[None]:
    """Runs the calling thread, and threads that it starts inside, on the CPUs near a device."""
    before = _allowed()
    moved = move_thread(device)
    try:
        yield
    finally:
        if moved:
            _run_on(before)


def move_thread(device: torch.device) -> bool:
    """Moves the calling thread, and those that it will start, to the CPUs near a device. False if it stays where it is."""
    allowed = _allowed()
    found = cpus_near(_pci_address(device), _SYSFS) & allowed
    # Fewer CPUs would hold up the reading threads more than distant memory does.
    return (len(found) >= MAX_READ_THREADS or 2 * len(found) >= len(allowed) > 0) and _run_on(found)


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
    """Such as ``0-3,8``. Empty for a node without CPUs. Raises ValueError."""
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
    found: Any = torch.cuda.get_device_properties(device)
    try:
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except AttributeError:  # torch does not promise them
        return ""


def _allowed() -> frozenset[int]:
    """The CPUs that the calling thread may use; empty if the system does not say."""
    try:
        return frozenset(os.sched_getaffinity(0))  # 0 is the calling thread, not the process
    except (AttributeError, OSError):
        return frozenset()


def _run_on(cpus: frozenset[int]) -> bool:
    """Moves the calling thread. False if the system does not allow it."""
    with suppress(OSError):
        os.sched_setaffinity(0, cpus)
        return True
    return False
