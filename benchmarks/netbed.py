"""A test-bed of nodes joined by links of a given rate: one network namespace a node, on one machine. Needs root.

    with NetBed(nodes=4, mbit=1000) as bed:
        bed.run(ranks=2, command=[sys.executable, "worker.py"])

Each node's link is a veth pair to a bridge, shaped by a token bucket in both directions. Everything is named after the process
that made it, and removed when the block ends, however it ends; what a killed process left is removed by the next test-bed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType

PREFIX = "epl"
PORT = 29600
STATISTICS = Path("/sys/class/net/eth0/statistics")


def available() -> str:
    """Why there can be no test-bed here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found; install iproute2" if missing else ""


class NetBed:
    """Nodes 10.88.0.1, 10.88.0.2, ... on one bridge."""

    def __init__(self, nodes: int, mbit: int) -> None:
        """``mbit``: of each node's link, each way."""
        self.nodes = nodes
        self.mbit = mbit
        self._name = f"{PREFIX}{os.getpid()}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> NetBed:
        if why := available():
            raise SystemExit(f"no test-bed: {why}")
        sweep()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _exit)
        try:
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _make(self) -> None:
        bridge = f"{self._name}b"
        _do(f"ip link add {bridge} type bridge")
        _do(f"ip link set {bridge} up")
        for i in range(self.nodes):
            inside, outside = f"{self._name}n{i}", f"{self._name}h{i}"
            _do(f"ip netns add {inside}")
            _do(f"ip link add {outside} type veth peer name eth0 netns {inside}")
            _do(f"ip link set {outside} master {bridge} up")
            _do(f"ip -n {inside} addr add 10.88.0.{i + 1}/24 dev eth0")
            _do(f"ip -n {inside} link set lo up")
            _do(f"ip -n {inside} link set eth0 up")
            # 2 ms of burst, and more than the 64 KiB that the kernel may hand down at once.
            burst = max(131072, self.mbit * 1000 // 8 * 2)
            shape = f"root tbf rate {self.mbit}mbit burst {burst} limit 8mb"
            _do(f"tc -n {inside} qdisc add dev eth0 {shape}")
            _do(f"tc qdisc add dev {outside} {shape}")

    def run(self, ranks: int, command: Sequence[str], limit: float, **environment: str) -> None:
        """Runs a command once a rank, with the variables that ``init_process_group`` reads. Raises SystemExit if one fails."""
        world = self.nodes * ranks
        common = {
            **os.environ, **environment, "MASTER_ADDR": "10.88.0.1", "MASTER_PORT": str(PORT), "WORLD_SIZE": str(world),
            "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(ranks),
            "TORCH_CPP_LOG_LEVEL": "ERROR", "EPLOAD_BENCH_MBIT": str(self.mbit),
        }  # fmt: skip
        for rank in range(world):
            inside = f"{self._name}n{rank // ranks}"
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank % ranks)}
            self._processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", inside, *command], env={**common, **own}, start_new_session=True
                )
            )
        until = time.monotonic() + limit
        try:
            for process in self._processes:
                process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise SystemExit(f"the ranks took longer than {limit:.0f} s") from None
        codes = [process.returncode for process in self._processes]
        self._processes.clear()
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._processes.clear()
        _remove(self._name)


def link_bytes() -> tuple[int, int]:
    """Bytes that have come into and gone out of this rank's node, headers included."""
    return int((STATISTICS / "rx_bytes").read_text()), int((STATISTICS / "tx_bytes").read_text())


def sweep() -> None:
    """Removes what test-beds of processes that are gone have left."""
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
        raise SystemExit(f"no test-bed: {command!r} failed: {done.stderr.strip()}")


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
