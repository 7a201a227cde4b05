"""Checks for ``epload doctor``: whether this machine is fit for loads, and what to do where it is not."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from epload.core import system_calls
from epload.native.info import build_info
from epload.observe.render import count, show_bytes
from epload.planning.schedule import SYNC_WAVE_BYTES
from epload.ranks.groups import gloo_devices

_SLOW_LOOKUP = 0.5
"""Seconds; a TCPStore looks up the name of the peer's address for each connection."""
_FILES = 4096
"""Files that a process should be able to open: those of a checkpoint, and the connections of groups."""
_REBUILD = "pip install --force-reinstall --no-deps . in epload's source folder"


Finding = tuple[str, str, str]
"""The result of one check: its status, what it has found, and the recommended action, empty if all is well. The status is "ok";
"warn" if loads may be slow, or fail in some modes; "fail" if they will fail."""


def full_build_info() -> dict[str, Any]:
    """Returns the description of this build, including whether its CUDA kernels run here, for which CUDA is initialized."""
    if torch.cuda.is_available():
        with suppress(RuntimeError):
            torch.cuda.init()  # type: ignore[no-untyped-call]
    return build_info()


def check_build() -> Finding:
    info = build_info()
    available = {"gloo": dist.is_gloo_available(), "NCCL": dist.is_nccl_available(), "HCCL": hasattr(torch, "npu")}
    backends = ", ".join(name for name, is_available in available.items() if is_available)
    built = f"built for {info['torch_version']} by {info['compiler']}"
    return "ok", f"torch {torch.__version__} with {backends}, epload {info['version']} {built}", ""


def check_devices() -> Finding:
    """Checks the devices, the driver, and whether the kernels of this build run on them."""
    info, npu = full_build_info(), getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        text = count(npu.device_count(), "NPU")
        if info["npu"]:
            return "ok", text, ""
        return "fail", text, f"rebuild with EPLOAD_NPU=1 against this torch_npu: {_REBUILD}"
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    if torch.cuda.is_available():
        text = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, {built}"
        if not info["cuda_obstacle"]:
            return "ok", text, ""
        text += f"; kernels not used: {info['cuda_obstacle']}"
        return "warn", text, f"rebuild with EPLOAD_CUDA=1: {_REBUILD}"
    if not Path("/proc/driver/nvidia/version").exists():
        return "ok", f"no accelerator; torch has {built}", ""
    advice = "see nvidia-smi" if torch.version.cuda else "install a torch with CUDA"
    return "fail", f"an NVIDIA driver, but torch with {built} finds no device", advice


def check_shared_memory(memory: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> Finding:
    """Checks the staging buffers of a node: two waves, in anonymous files, which need no space in /dev/shm. ``memory``,
    ``group``: as in procfs, and in version 2 of cgroups."""
    try:
        os.close(system_calls.memfd_create("epload"))
    except OSError as error:
        advice = "ranks of a node will not share staging buffers; allow the system call memfd_create"
        return "warn", f"memfd_create: {error.strerror}", advice
    fields = dict(line.split(":") for line in memory.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    with suppress(OSError, ValueError):  # a container has no limit, which is "max"
        limit = int((group / "memory.max").read_text())
        free = max(min(free, limit - int((group / "memory.current").read_text())), 0)
    text = f"anonymous files, {show_bytes(free)} of memory available"
    if free < 2 * SYNC_WAVE_BYTES:
        return "warn", text, f"staging buffers of a node need {show_bytes(2 * SYNC_WAVE_BYTES)}"
    return "ok", text, ""


def check_limits() -> Finding:
    """Checks the limits of open files, and of locked memory, which RDMA needs. No limit is -1."""
    (files, hard), (locked, _) = map(resource.getrlimit, (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    shown = ["unlimited" if limit < 0 else str(limit) for limit in (files, locked // 1024)]
    advice = []
    if 0 <= files < _FILES:
        advice.append(f"ulimit -n {max(hard, _FILES)}")
    if locked >= 0 and list(Path("/sys/class/infiniband").glob("*")):
        advice.append("RDMA may fail to register memory: ulimit -l unlimited")
    return "warn" if advice else "ok", f"ulimit -n {shown[0]}, ulimit -l {shown[1]}", "; ".join(advice)


def look_up_name(address: str) -> str:
    """Returns the name of an IPv4 address, looked up as a TCPStore does: as an IPv6 address, so that an entry of the IPv4 address
    in ``/etc/hosts`` does not count."""
    return socket.getnameinfo((f"::ffff:{address}", 0), socket.NI_NUMERICSERV)[0]


def check_lookup(lookup: Callable[[str], object] = look_up_name) -> Finding:
    """Checks how long it takes to look up the name of this machine's own address."""
    address = "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        # An address for documentation. This sends nothing: it looks up the route, and so the address of the NIC.
        probe.connect(("192.0.2.1", 9))
        address = str(probe.getsockname()[0])
    begin = perf_counter()
    with suppress(OSError):  # it has no name, or there was no answer
        lookup(address)
    seconds = perf_counter() - begin
    text = f"the name of {address} after {seconds:.2f} s"
    if seconds < _SLOW_LOOKUP:
        return "ok", text, ""
    hosts = f"add a line '::ffff:{address} {socket.gethostname()}' to /etc/hosts"
    return "warn", text, f"each connection to a TCPStore waits for this: {hosts}"


def check_store() -> Finding:
    """Checks a TCPStore of this process, and a second connection to it."""
    begin, limit = perf_counter(), timedelta(seconds=30)
    try:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=limit)  # type: ignore[attr-defined]
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        server.set("key", "value")
        client.get("key")
    except (RuntimeError, OSError) as error:
        text = f"TCPStore on 127.0.0.1: {str(error).partition(chr(10))[0]}"
        return "fail", text, "allow TCP connections to the machine itself"
    return "ok", f"TCPStore: connected, set and get in {perf_counter() - begin:.2f} s", ""


def check_gloo() -> Finding:
    """Checks that gloo finds an interface of this machine, and that other nodes can reach it."""
    try:
        gloo_devices()
    except RuntimeError as error:
        text = f"gloo: {str(error).partition(chr(10))[0]}"
        return "fail", text, "set GLOO_SOCKET_IFNAME to an interface of this machine (ip address)"
    address = ""
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    if address.startswith("127.") and not os.environ.get("GLOO_SOCKET_IFNAME"):
        text = f"gloo listens at {address}, to which the name of this machine leads, and which other nodes do not reach"
        return "warn", text, "for several nodes, set GLOO_SOCKET_IFNAME to an interface that connects them"
    return "ok", "gloo finds an interface", ""


CHECKS: dict[str, Callable[[], Finding]] = {
    "build": check_build,
    "devices": check_devices,
    "shared memory": check_shared_memory,
    "limits": check_limits,
    "name lookup": check_lookup,
    "store": check_store,
    "gloo": check_gloo,
}
