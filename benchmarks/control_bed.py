"""Ranks of a control plane without data: threads of a few processes, each with its own connection to one TCPStore.

Every rank counts what it asks of the store. A store operation is a command that the server executes: ``get`` and ``multi_get``
are two each, because TCPStore waits for the keys before it reads them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from epload.errors import LoadError, RemoteFailure
from epload.ranks.control import Control

RELOAD_ROUNDS, FIRST_ROUNDS = 4, 8
"""Agreement rounds of a load of a known checkpoint into a known model, and of a first load."""
PATIENCE = timedelta(minutes=5)
COMMANDS = {"get": 2, "multi_get": 2}
"""Commands of one call, where they are not one."""
_context = multiprocessing.get_context("forkserver")


def preload() -> None:
    """For programs: there is one list for all of a process, and tests have theirs."""
    _context.set_forkserver_preload(["torch", "torch.distributed", "epload"])


@dataclass(frozen=True)
class Bed:
    """How many ranks there are, and where they run."""

    ranks: int
    per_node: int
    processes: int

    @property
    def nodes(self) -> list[list[int]]:
        return [list(range(at, min(at + self.per_node, self.ranks))) for at in range(0, self.ranks, self.per_node)]

    @property
    def victim(self) -> int:
        """The rank with a process of its own, so that it can be killed: the last, which leads no node if nodes have several."""
        return self.ranks - 1

    def hosted(self) -> list[list[int]]:
        """The ranks of each process. Ranks of a node are in different processes."""
        hosts = [list(range(first, self.victim, self.processes)) for first in range(self.processes)]
        return [host for host in hosts if host] + [[self.victim]]


class CountingStore:
    """A connection to the store that counts its operations and bytes. Clones share the counts."""

    def __init__(self, store: Any, counts: Counter[str]) -> None:
        self._store = store
        self.counts = counts

    def clone(self) -> CountingStore:
        return CountingStore(self._store.clone(), self.counts)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def underlying_store(self) -> Any:
        return self._store

    def _count(self, kind: str, sent: int, received: int = 0) -> None:
        self.counts[kind] += COMMANDS.get(kind, 1)
        self.counts["bytes"] += sent + received

    def set(self, key: str, value: str | bytes) -> None:
        self._count("set", len(key) + len(value))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        self._count("get", len(key), len(value))
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self._store.multi_get(keys)
        self._count("multi_get", sum(map(len, keys)), sum(map(len, values)))
        return values

    def check(self, keys: list[str]) -> bool:
        self._count("check", sum(map(len, keys)))
        return bool(self._store.check(keys))

    def add(self, key: str, value: int) -> int:
        self._count("add", len(key))
        return int(self._store.add(key, value))

    def compare_set(self, key: str, expected: str, desired: str | bytes) -> bytes:
        value: bytes = self._store.compare_set(key, expected, desired)
        self._count("compare_set", len(key) + len(desired), len(value))
        return value

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._count("wait", sum(map(len, keys)))
        self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        self._count("delete", len(key))
        return bool(self._store.delete_key(key))


@dataclass
class Sample:
    """What one rank did in one step."""

    rank: int
    operations: Counter[str] = field(default_factory=Counter)
    rounds: list[tuple[float, float]] = field(default_factory=list)
    """When the rank came to each round and when it left it, on the machine's monotonic clock."""
    error: str = ""
    ended: float = 0.0
    """When the rank left the step."""
    idle_rate: float = 0.0
    """Operations per second while it moved data."""


class Rank:
    """One rank, in a thread."""

    def __init__(self, bed: Bed, rank: int, port: int) -> None:
        self.bed = bed
        self.rank = rank
        self.counts: Counter[str] = Counter()
        self.idle_rate = 0.0
        job = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=PATIENCE)
        store: Any = CountingStore(PrefixStore("bench", job), self.counts)
        self.control = Control(store, tuple(range(bed.ranks)), rank, "bench")
        self.rounds: list[tuple[float, float]] = []
        # Each node is a machine of its own, whose ranks watch one another's processes.
        self._machine = CountingStore(PrefixStore(f"node-{rank // bed.per_node}", job), self.counts)

    def register(self) -> None:
        self.control.processes.register(self._machine, self.rank)  # type: ignore[arg-type]

    def join_nodes(self) -> None:
        self.control.delete_later(self.control.processes.close_registry())
        self.control.timeout = PATIENCE
        self.control.join_nodes(self.bed.nodes, "bench")

    def round(self, view: Any, last: bool) -> None:
        began = time.monotonic()
        self.control.agree("the round", None, view, lambda views: len(views), last=last)
        self.rounds.append((began, time.monotonic()))

    def load(self, rounds: int, late: float = 0.0) -> None:
        """``late``: seconds that this rank works before it comes to the first round."""
        self.control.begin(PATIENCE)
        with self.control.guard():
            if late:
                time.sleep(late)
            for number in range(rounds):
                self.round({"options": "x" * 200, "number": number}, last=number == rounds - 1)

    def move_data(self, seconds: float) -> None:
        """As a transfer: ends when the watch says that another rank has failed."""
        stop, before, began = threading.Event(), self.counts.copy(), time.monotonic()
        with self.control.stopping(stop.set):
            if stop.wait(seconds):
                raise RemoteFailure("another rank failed")
        spent = self.counts - before
        self.idle_rate = (spent.total() - spent["bytes"]) / (time.monotonic() - began)

    def sample(self, step: tuple[Callable[..., None], tuple[Any, ...]]) -> Sample:
        before = self.counts.copy()
        self.rounds, self.idle_rate = [], 0.0
        error = ""
        try:
            step[0](self, *step[1])
        except BaseException as raised:
            error = str(raised) if isinstance(raised, LoadError) else traceback.format_exc()
        spent = self.counts.copy()
        spent.subtract(before)
        return Sample(self.rank, +spent, self.rounds, error, time.monotonic(), self.idle_rate)


class Server:
    """A store in a process of its own. A context manager."""

    def __enter__(self) -> Server:
        ours, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        self.port: int = ours.recv()
        self._link = ours
        self._own = 0
        self._own = self.connections()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def connections(self) -> int:
        """To the store, except its own."""
        lines = Path(f"/proc/{self._process.pid}/net/tcp").read_text().splitlines()
        lines += Path(f"/proc/{self._process.pid}/net/tcp6").read_text().splitlines()
        port = f":{self.port:04X}"
        found = sum(1 for line in lines if line.split()[1].endswith(port) and line.split()[3] == "01")
        return found - self._own

    def cpu_seconds(self) -> float:
        """Of the store's process so far."""
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


class Cluster:
    """A store and the processes of all ranks. A context manager."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self._links: list[Connection] = []
        self._processes: list[Any] = []

    def __enter__(self) -> Cluster:
        self.server = Server().__enter__()
        for hosted in self.bed.hosted():
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_host, args=(theirs, self.bed, hosted, self.server.port), daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)
        for link in self._links:
            if (said := link.recv()) != "ready":
                raise RuntimeError(said)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self.server.__exit__()

    def run(self, step: Callable[..., None], *args: Any, kill_after: float = 0.0) -> tuple[list[Sample], float, float]:
        """Runs ``step(rank, *args)`` on all ranks.

        Args:
            kill_after: the victim is killed after so many seconds, if not 0.

        Returns:
            The sample of each rank that lived; the server's CPU seconds; when the victim was killed.
        """
        before = self.server.cpu_seconds()
        for link in self._links:
            link.send((step, args))
        killed = 0.0
        links = self._links
        if kill_after:
            time.sleep(kill_after)
            killed = time.monotonic()
            os.kill(self._processes[-1].pid, signal.SIGKILL)
            links = links[:-1]
        samples = [sample for link in links for sample in link.recv()]
        return sorted(samples, key=lambda sample: sample.rank), self.server.cpu_seconds() - before, killed


def _serve(link: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    link.send(store.port)
    time.sleep(1e6)


def _host(link: Connection, bed: Bed, hosted: Sequence[int], port: int) -> None:
    sys.setswitchinterval(0.0005)  # hundreds of threads take turns
    try:
        ranks = _together(hosted, lambda rank: Rank(bed, rank, port))
        link.send("ready")
        while True:
            link.send(_together(ranks, partial(Rank.sample, step=link.recv())))
    except EOFError:
        return
    except BaseException:
        link.send(traceback.format_exc())


def _together(items: Sequence[Any], call: Callable[[Any], Any]) -> list[Any]:
    """``call`` of each item, each in a thread of its own."""
    results: list[Any] = [None] * len(items)
    errors: list[BaseException] = []

    def one(number: int) -> None:
        try:
            results[number] = call(items[number])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(len(items))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
