"""Runs the threads that read for an accelerator on the CPUs of its NUMA node, from which pinned memory is allocated too.

The node is known for CUDA devices, by their PCI address. This is for speed alone: threads stay where the system puts them if it
says nothing of its nodes, or does not allow it, or if the process may use few of the CPUs there.
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

    A rank that may use the same CPUs as the process that has started it shares them with the others. Else it has its own, as
    launchers assign them.
    """
    allowed, parent = _allowed(), os.getppid()  # 0 in another namespace
    cpus = len(allowed)
    if (parent and allowed == _allowed(parent)) or cpus >= (os.cpu_count() or 1):
        cpus //= readers
    return max(MIN_READ_THREADS, min(MAX_READ_THREADS, cpus))


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
    """Moves the calling thread, and those that it will start, to the CPUs near a device, if that can be."""
    allowed = _allowed()
    cpus = cpus_near(pci_address(device), _SYSFS) & allowed
    # Fewer CPUs would hold up the reading threads more than distant memory does.
    if len(cpus) >= MAX_READ_THREADS or 2 * len(cpus) >= len(allowed):
        _run_on(cpus)


@cache
def cpus_near(address: str, sysfs: Path) -> frozenset[int]:
    """Returns the CPUs of the NUMA node of a PCI device, such as ``0000:3b:00.0``; none if the system does not say.

    Args:
        sysfs: folder of ``/sys``; see sysfs-bus-pci and sysfs-devices-node in the kernel's ABI documentation.
    """
    cpus: set[int] = set()
    with suppress(OSError, ValueError):
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text()) if address else -1
        text = (sysfs / f"devices/system/node/node{node}/cpulist").read_text() if node >= 0 else ""
        for part in filter(None, text.strip().split(",")):  # such as 0-3,8
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


@cache
def pci_address(device: torch.device) -> str:
    """Returns the address of a CUDA device, such as ``0000:3b:00.0``; ``""`` if it is not known."""
    if device.type != "cuda":
        return ""
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:  # torch does not promise them
        return ""


def _allowed(pid: int = 0) -> frozenset[int]:
    """Returns the CPUs that a process, by default the calling thread, may use; none if the system does not say."""
    try:
        return frozenset(os.sched_getaffinity(pid))
    except (AttributeError, OSError):
        return frozenset()


def _run_on(cpus: frozenset[int]) -> None:
    with suppress(AttributeError, OSError):  # OSError: also if there are none
        os.sched_setaffinity(0, cpus)
