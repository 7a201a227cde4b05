"""``epload doctor``: whether this machine is fit for loads, and what to do where it is not."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter

import click
import torch
import torch.distributed as dist

from epload.cli.output import count, json_option, print_json, show, size, table
from epload.cluster.cards import count_rdma
from epload.native.info import build_info
from epload.planning.schedule import SYNC_WAVE_BYTES

_SLOW_LOOKUP = 0.5
"""Seconds; a TCPStore looks up the name of the peer's address for each connection."""
_LONGEST_LOOKUP = 10.0
_FILES = 4096
"""Files that a process should be able to open: those of a checkpoint, and the connections of groups."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    status: str
    """``"ok"``, ``"warn"`` (slow, or may fail) or ``"fail"`` (loads will fail)."""
    found: str
    advice: str = ""
    """The recommended action; empty if there is none."""


def check_torch() -> Finding:
    info = build_info()
    found = (
        f"torch {torch.__version__}, epload {info['version']} built for {info['torch_version']} by {info['compiler']}"
    )
    return Finding("build", "ok", found)


def check_devices() -> Finding:
    """The devices, the driver, and whether the kernels of this build run on them."""
    info = build_info()
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        advice = "" if info["npu"] else f"rebuild with EPLOAD_NPU=1 against this torch_npu: {_rebuild()}"
        return Finding("devices", "fail" if advice else "ok", count(npu.device_count(), "NPU"), advice)
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        driver = _read(Path("/proc/driver/nvidia/version")).splitlines()[:1]
        if driver and not torch.version.cuda:
            return Finding("devices", "warn", f"{driver[0]}, but torch has {built}", "install a torch with CUDA")
        if driver:
            return Finding("devices", "fail", f"{driver[0]}, but torch with {built} finds no device", "see nvidia-smi")
        return Finding("devices", "ok", f"no accelerator; torch has {built}")
    with suppress(RuntimeError):
        torch.cuda.init()  # type: ignore[no-untyped-call]  # so that it can be asked whether the kernels run
    names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
    found = f"{torch.cuda.device_count()} x {', '.join(names)}, CUDA {torch.version.cuda}"
    obstacle = build_info()["cuda_obstacle"]
    if not obstacle:
        return Finding("devices", "ok", found)
    return Finding(
        "devices", "warn", f"{found}; kernels not used: {obstacle}", f"rebuild with EPLOAD_CUDA=1: {_rebuild()}"
    )


def _rebuild() -> str:
    return "pip install --force-reinstall --no-deps . in epload's source folder"


def check_backends() -> Finding:
    """The collective libraries that torch has."""
    found = ["gloo"] * dist.is_gloo_available()
    if dist.is_nccl_available():
        found.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    if hasattr(torch, "npu"):
        found.append("HCCL")
    if torch.cuda.is_available() and not dist.is_nccl_available():
        return Finding(
            "backends", "fail", ", ".join(found), "install a torch with NCCL: GPUs have no other fast backend"
        )
    if not found:
        return Finding("backends", "fail", "none", "install a torch with torch.distributed")
    return Finding("backends", "ok", ", ".join(found))


def check_shared_memory(memory: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> Finding:
    """The staging buffers of a node: two waves, in anonymous files, which need no space in /dev/shm."""
    try:
        os.close(os.memfd_create("epload"))
    except OSError as error:
        advice = "ranks of a node will not share staging buffers; allow the system call memfd_create"
        return Finding("shared memory", "warn", f"memfd_create: {error.strerror}", advice)
    free = _available_memory(memory, group)
    found = f"anonymous files, {size(free)} of memory available"
    if free < 2 * SYNC_WAVE_BYTES:
        return Finding("shared memory", "warn", found, f"staging buffers of a node want {size(2 * SYNC_WAVE_BYTES)}")
    return Finding("shared memory", "ok", found)


def _available_memory(memory: Path, group: Path) -> int:
    """Bytes, of the machine or of the container; files are as in procfs and in version 2 of cgroups."""
    fields = dict(line.split(":") for line in memory.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    with suppress(OSError, ValueError):  # there is no limit, which is "max"
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return max(free, 0)


def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"ulimit -n {_limit(soft)}"
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        return Finding("open files", "warn", found, f"ulimit -n {_limit(hard) if hard >= _FILES else _FILES}")
    return Finding("open files", "ok", found)


def check_locked_memory() -> Finding:
    """Checks the limit of locked memory, which RDMA and pinned buffers need."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = f"ulimit -l {_limit(soft // 1024 if soft != resource.RLIM_INFINITY else soft)}"
    if soft == resource.RLIM_INFINITY or not count_rdma(Path("/sys")):
        return Finding("locked memory", "ok", found)
    return Finding("locked memory", "warn", found, "RDMA may fail to register memory: ulimit -l unlimited")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def check_numa(sysfs: Path = Path("/sys")) -> Finding:
    nodes = len(list(sysfs.glob("devices/system/node/node[0-9]*")))
    cpus = len(os.sched_getaffinity(0))
    found = f"{count(max(nodes, 1), 'NUMA node')}, {count(cpus, 'CPU')} of {os.cpu_count()} for this process"
    if cpus == 1:
        return Finding("CPUs", "warn", found, "reading and moving share one CPU: allow the process more")
    return Finding("CPUs", "ok", found)


def check_cards(sysfs: Path = Path("/sys")) -> Finding:
    """Network cards that are up, with their speed, and cards for RDMA."""
    cards = []
    for card in sorted(sysfs.glob("class/net/*")):
        if card.name == "lo" or _read(card / "operstate") not in ("up", "unknown") or not (card / "device").exists():
            continue
        speed = _read(card / "speed")
        cards.append(
            f"{card.name} {int(speed) / 1000:g} Gbit/s" if speed.isdecimal() else f"{card.name} of unknown speed"
        )
    rdma = count_rdma(sysfs)
    cards += [count(rdma, "RDMA port")] * bool(rdma)
    if not cards:
        return Finding(
            "network cards", "warn", "none that is up", "fine on one machine; jobs of several nodes need one"
        )
    return Finding("network cards", "ok", ", ".join(cards))


def check_congestion_control(procfs: Path = Path("/proc")) -> Finding:
    chosen = _read(procfs / "sys/net/ipv4/tcp_congestion_control")
    found = f"congestion control {chosen or 'unknown'}"
    if chosen in ("cubic", "dctcp"):
        return Finding("TCP", "ok", found)
    advice = "loads over several nodes may be slower than with cubic: sysctl -w net.ipv4.tcp_congestion_control=cubic"
    return Finding("TCP", "warn", found, advice)


def check_lookup(lookup: Callable[[str], object] = socket.gethostbyaddr, slow: float = _SLOW_LOOKUP) -> Finding:
    """Checks how long it takes to look up the name of this machine's own address."""
    address = _own_address()
    pool = ThreadPoolExecutor(1)
    begin = perf_counter()
    answer = pool.submit(lookup, address)
    outcome = "has a name"
    try:
        answer.result(_LONGEST_LOOKUP)
    except FutureTimeout:
        outcome = "no answer"
    except OSError:
        outcome = "has no name"
    finally:
        pool.shutdown(wait=False)
    seconds = perf_counter() - begin
    found = f"{address} {outcome}, after {seconds:.2f} s"
    if seconds < slow:
        return Finding("name lookup", "ok", found)
    advice = (
        f"each connection to a TCPStore waits for this: add a line '{address} {socket.gethostname()}' to /etc/hosts"
    )
    return Finding("name lookup", "warn", found, advice)


def _own_address() -> str:
    """Returns the address of the NIC by which others are reached. Sends nothing: a datagram socket only looks up the route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # an address for documentation
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def check_store() -> Finding:
    """A TCPStore of this process, and a second connection to it."""
    begin, limit = perf_counter(), timedelta(seconds=30)
    try:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=limit)  # type: ignore[attr-defined]
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        connected = perf_counter() - begin
        begin = perf_counter()
        server.set("key", "value")
        same = client.get("key") == b"value"
        seconds = perf_counter() - begin
    except (RuntimeError, OSError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return Finding(
            "store", "fail", f"TCPStore on 127.0.0.1: {first}", "allow TCP connections to the machine itself"
        )
    if not same:
        return Finding("store", "fail", "a TCPStore returned another value than was set", "reinstall torch")
    found = f"TCPStore: connected in {connected:.2f} s, set and get in {1e3 * seconds:.1f} ms"
    if connected < 1.0:
        return Finding("store", "ok", found)
    return Finding("store", "warn", found, "connecting should take milliseconds: see the name lookup above")


def _read(path: Path) -> str:
    """Empty if it cannot be read."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_torch, check_devices, check_backends, check_shared_memory, check_open_files, check_locked_memory, check_numa,
    check_cards, check_congestion_control, check_lookup, check_store,
)  # fmt: skip


@click.command()
@json_option
def doctor(as_json: bool) -> int:
    """Check this machine: build, devices, memory, limits, network.

    Each check is ok, warn (loads may be slow, or fail in some modes) or fail, with what to do. Exits with 1 if one fails. A
    build that does not fit the installed torch fails at import, of every command, with how to rebuild it.
    """
    findings = [check() for check in CHECKS]
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        show(table(("check", "", "found"), [[each.check, each.status, each.found] for each in findings]))
        advice = [[each.check, each.advice] for each in findings if each.advice]
        if advice:
            show()
            show(table(("check", "what to do"), advice))
    return 1 if any(each.status == "fail" for each in findings) else 0
