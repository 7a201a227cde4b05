"""``epload doctor``: whether this machine is fit for loads, and what to do where it is not."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import click
import torch
import torch.distributed as dist

from epload.cli.output import json_option, print_json, show, size, table
from epload.native.info import build_info
from epload.observe.render import count
from epload.planning.schedule import SYNC_WAVE_BYTES

_SLOW_LOOKUP = 0.5
"""Seconds; a TCPStore looks up the name of the peer's address for each connection."""
_LONGEST_LOOKUP = 10.0
_FILES = 4096
"""Files that a process should be able to open: those of a checkpoint, and the connections of groups."""
_REBUILD = "pip install --force-reinstall --no-deps . in epload's source folder"


class Finding(NamedTuple):
    """The result of one check."""

    found: str
    advice: str = ""
    """The recommended action; empty if all is well."""
    fails: bool = False
    """True if loads will fail; with advice alone they may be slow, or fail in some modes."""

    @property
    def status(self) -> str:
        return "fail" if self.fails else "warn" if self.advice else "ok"


def check_torch() -> Finding:
    info = build_info()
    built = f"built for {info['torch_version']} by {info['compiler']}"
    return Finding(f"torch {torch.__version__}, epload {info['version']} {built}")


def check_devices() -> Finding:
    """Checks the devices, the driver, and whether the kernels of this build run on them."""
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        fits = build_info()["npu"]
        advice = "" if fits else f"rebuild with EPLOAD_NPU=1 against this torch_npu: {_REBUILD}"
        return Finding(count(npu.device_count(), "NPU"), advice, fails=not fits)
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    if not torch.cuda.is_available():
        if not Path("/proc/driver/nvidia/version").exists():
            return Finding(f"no accelerator; torch has {built}")
        advice = "see nvidia-smi" if torch.version.cuda else "install a torch with CUDA"
        return Finding(f"an NVIDIA driver, but torch with {built} finds no device", advice, fails=True)
    with suppress(RuntimeError):
        torch.cuda.init()  # type: ignore[no-untyped-call]  # so that it can be asked whether the kernels run
    text = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, {built}"
    if obstacle := build_info()["cuda_obstacle"]:
        return Finding(f"{text}; kernels not used: {obstacle}", f"rebuild with EPLOAD_CUDA=1: {_REBUILD}")
    return Finding(text)


def check_backends() -> Finding:
    """Checks the collective libraries that torch has."""
    available = {"gloo": dist.is_gloo_available(), "NCCL": dist.is_nccl_available(), "HCCL": hasattr(torch, "npu")}
    names = [name for name, is_available in available.items() if is_available]
    needs_nccl = torch.cuda.is_available() and "NCCL" not in names
    advice = f"install a torch with {'NCCL' if needs_nccl else 'torch.distributed'}" if needs_nccl or not names else ""
    return Finding(", ".join(names) or "none", advice, fails=bool(advice))


def check_shared_memory(memory: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> Finding:
    """Checks the staging buffers of a node: two waves, in anonymous files, which need no space in /dev/shm.

    Args:
        memory, group: as in procfs, and in version 2 of cgroups.
    """
    try:
        os.close(os.memfd_create("epload"))
    except OSError as error:
        advice = "ranks of a node will not share staging buffers; allow the system call memfd_create"
        return Finding(f"memfd_create: {error.strerror}", advice)
    fields = dict(line.split(":") for line in memory.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    with suppress(OSError, ValueError):  # a container has no limit, which is "max"
        limit = int((group / "memory.max").read_text())
        free = max(min(free, limit - int((group / "memory.current").read_text())), 0)
    text = f"anonymous files, {size(free)} of memory available"
    if free < 2 * SYNC_WAVE_BYTES:
        return Finding(text, f"staging buffers of a node need {size(2 * SYNC_WAVE_BYTES)}")
    return Finding(text)


def has_rdma(sysfs: Path) -> bool:
    """Returns True if a network card for RDMA has an active port.

    Args:
        sysfs: where ``/sys`` is; see sysfs-class-infiniband in the kernel's ABI documentation.
    """
    for state in sysfs.glob("class/infiniband/*/ports/*/state"):
        with suppress(OSError):
            if state.read_text().startswith("4:"):
                return True
    return False


def check_limits() -> Finding:
    """Checks the limits of open files, and of locked memory, which RDMA needs."""
    (files, hard), (locked, _) = map(resource.getrlimit, (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    unlimited = resource.RLIM_INFINITY
    shown = [
        "unlimited" if limit == unlimited else str(limit) for limit in (files, locked if locked < 0 else locked // 1024)
    ]
    advice = []
    if files != unlimited and files < _FILES:
        advice.append(f"ulimit -n {max(hard, _FILES)}")
    if locked != unlimited and has_rdma(Path("/sys")):
        advice.append("RDMA may fail to register memory: ulimit -l unlimited")
    return Finding(f"ulimit -n {shown[0]}, ulimit -l {shown[1]}", "; ".join(advice))


def check_lookup(lookup: Callable[[str], object] = socket.gethostbyaddr, slow: float = _SLOW_LOOKUP) -> Finding:
    """Checks how long it takes to look up the name of this machine's own address."""
    address = "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        # An address for documentation. This sends nothing: it looks up the route, and so the address of the NIC.
        probe.connect(("192.0.2.1", 9))
        address = str(probe.getsockname()[0])
    pool, begin = ThreadPoolExecutor(1), perf_counter()
    with suppress(OSError):  # it has no name, or there was no answer in time
        pool.submit(lookup, address).result(_LONGEST_LOOKUP)
    pool.shutdown(wait=False)
    seconds = perf_counter() - begin
    advice = (
        f"each connection to a TCPStore waits for this: add a line '{address} {socket.gethostname()}' to /etc/hosts"
    )
    return Finding(f"the name of {address} after {seconds:.2f} s", "" if seconds < slow else advice)


def check_store() -> Finding:
    """Checks a TCPStore of this process, and a second connection to it."""
    begin, limit = perf_counter(), timedelta(seconds=30)
    try:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=limit)  # type: ignore[attr-defined]
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        server.set("key", "value")
        client.get("key")
    except (RuntimeError, OSError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return Finding(f"TCPStore on 127.0.0.1: {first}", "allow TCP connections to the machine itself", fails=True)
    seconds = perf_counter() - begin
    text = f"TCPStore: connected, set and get in {seconds:.2f} s"
    return Finding(text, "" if seconds < 1.0 else "this should take milliseconds: see the name lookup above")


CHECKS: dict[str, Callable[[], Finding]] = {
    "build": check_torch,
    "devices": check_devices,
    "backends": check_backends,
    "shared memory": check_shared_memory,
    "limits": check_limits,
    "name lookup": check_lookup,
    "store": check_store,
}


@click.command()
@json_option
def doctor(as_json: bool) -> int:
    """Check this machine: build, devices, memory, limits, network.

    Each check is ok, warn (loads may be slow, or fail in some modes) or fail, with what to do. Exits with 1 if one fails. A
    build that does not fit the installed torch fails at import, of every command, with how to rebuild it.
    """
    findings = {name: check() for name, check in CHECKS.items()}
    if as_json:
        print_json({"findings": [{"check": name, "status": f.status, "found": f.found, "advice": f.advice}
                                 for name, f in findings.items()]})  # fmt: skip
    else:
        show(table(("check", "", "found"), [[name, f.status, f.found] for name, f in findings.items()]))
        if advice := [[name, finding.advice] for name, finding in findings.items() if finding.advice]:
            show()
            show(table(("check", "what to do"), advice))
    return 1 if any(finding.fails for finding in findings.values()) else 0
