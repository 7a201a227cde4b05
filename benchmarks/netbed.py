"""A testbed of nodes joined by links of a given rate: one network namespace per node, on one machine. Needs root.

    with NetBed(nodes=4, mbit=1000) as bed:
        words, environment = bed.place(node=0)
        subprocess.run([*words, "ip", "addr"], env={**os.environ, **environment})

Each node's link is a veth pair to a bridge, shaped by a token bucket in both directions. TCP between nodes uses CUBIC, Linux's
default, regardless of the machine's setting: BBR (Cardwell et al., 2016: ProbeRTT) reduces its window for 200 ms every ten
seconds, which can fall into a load. Everything is named after the process that created it and removed when the block ends; the
next testbed removes what a killed process left.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

PREFIX = "epl"
PORT = 29600
INTERFACE = "eth0"
NETWORK = "198.18.88"
"""From the address range that RFC 2544 reserves for benchmarks."""
HOST = f"{NETWORK}.254"
"""The machine's address as seen from the nodes, with ``host=True``."""
_CLONE_NEWNET = 0x40000000  # linux/sched.h


def available() -> str:
    """Why a testbed cannot be created; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found; install iproute2" if missing else ""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, so that cleanup runs."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class NetBed:
    """Nodes with the addresses 1, 2, ... of ``NETWORK``, on one bridge."""

    def __init__(self, nodes: int, mbit: int, host: bool = False) -> None:
        """
        Args:
            mbit: rate of each node's link, each way.
            host: whether nodes can reach this machine, at ``HOST``; for one testbed at a time.
        """
        self.nodes = nodes
        self.host = host
        self.mbit = mbit
        self._name = f"{PREFIX}{os.getpid()}"

    def __enter__(self) -> NetBed:
        if why := available():
            raise SystemExit(f"no testbed: {why}")
        sweep()
        self._signals = ended_by_signals()
        self._signals.__enter__()
        try:
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _make(self) -> None:
        bridge = f"{self._name}b"
        _do(f"ip link add {bridge} type bridge")
        if self.host:
            if HOST in subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True).stdout:
                raise SystemExit(f"no testbed: another one has {HOST}; wait until it has ended")
            _do(f"ip addr add {HOST}/24 dev {bridge}")
        _do(f"ip link set {bridge} up")
        for i in range(self.nodes):
            inside, outside = f"{self._name}n{i}", f"{self._name}h{i}"
            _do(f"ip netns add {inside}")
            _do(f"ip link add {outside} type veth peer name {INTERFACE} netns {inside}")
            _do(f"ip link set {outside} master {bridge} up")
            _do(f"ip -n {inside} addr add {NETWORK}.{i + 1}/24 dev {INTERFACE}")
            _do(f"ip -n {inside} link set lo up")
            _do(f"ip -n {inside} link set {INTERFACE} up")
            _do(f"ip -n {inside} route change {NETWORK}.0/24 dev {INTERFACE} src {NETWORK}.{i + 1} congctl cubic")
            _do(f"tc -n {inside} qdisc add dev {INTERFACE} {_shape(self.mbit)}")
            _do(f"tc qdisc add dev {outside} {_shape(self.mbit)}")

    def place(self, node: int) -> tuple[list[str], dict[str, str]]:
        """The words before a command that is to run on a node, and its environment."""
        environment = {"MASTER_ADDR": f"{NETWORK}.1", "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": INTERFACE}
        return ["ip", "netns", "exec", f"{self._name}n{node}"], environment

    def namespace(self, node: int) -> str:
        """The node's network namespace, for :func:`enter`."""
        return f"/run/netns/{self._name}n{node}"

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _remove(self._name)
        self._signals.__exit__(None, None, None)

    def restore(self) -> None:
        """Restores the rate of every link, after a rank was killed inside :func:`slow_link`."""
        for i in range(self.nodes):
            _do(f"tc -n {self._name}n{i} qdisc change dev {INTERFACE} {_shape(self.mbit)}")


def enter(namespace: str) -> None:
    """Moves the calling thread, and threads it starts, into a node's namespace. Python 3.12 has ``os.setns``."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)


@contextmanager
def slow_link(kbit: int, mbit: int) -> Iterator[None]:
    """On a node: limits what it sends to ``kbit`` instead of ``mbit``, in bursts of one packet."""
    change = ["tc", "qdisc", "change", "dev", INTERFACE]
    subprocess.run([*change, *f"root tbf rate {kbit}kbit burst 2kb limit 8mb".split()], check=True)
    try:
        yield
    finally:
        subprocess.run([*change, *_shape(mbit).split()], check=True)


def _shape(mbit: int) -> str:
    # A burst of 2 ms, and more than the 64 KiB that the kernel may pass down at once.
    return f"root tbf rate {mbit}mbit burst {max(131072, mbit * 1000 // 8 * 2)} limit 8mb"


def sweep() -> None:
    """Removes testbeds of processes that no longer exist."""
    listed = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    listed += subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for pid in set(re.findall(rf"\b{PREFIX}(\d+)[bhn]", listed)):
        if not Path(f"/proc/{pid}").exists():
            _remove(f"{PREFIX}{pid}")


def _remove(name: str) -> None:
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for inside in re.findall(rf"^({name}n\d+)", spaces, re.M):
        for pid in subprocess.run(["ip", "netns", "pids", inside], capture_output=True, text=True).stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", inside], capture_output=True)
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    for link in re.findall(rf"\b({name}[bh]\d*)[:@]", links):
        subprocess.run(["ip", "link", "del", link], capture_output=True)


def _do(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"no testbed: {command!r} failed: {done.stderr.strip()}")
