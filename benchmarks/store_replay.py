"""What the store's server computes for the agreement rounds of one load, with as many leaders as a large job has.

The leaders' operations are replayed on a connection each, in the order of ranks/rounds.py, without the ranks around them:
threads of hundreds of ranks on few cores wake the server for each operation alone, and take its core from it, which costs several
times as much as the operation.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from control_bed import CountingStore, Server
from costs import LOOKS
from epload.ranks.tree import FAN_OUT

THREADS = 8
VIEW = b"=" + 300 * b"v"
"""As large as a short view, which messages.py does not compress."""
MIN_REPEATS, REPEATED_NODES = 5, 512
"""Loads that are replayed: at least so many, and so many that they have so many nodes together."""
TIMEOUT = timedelta(minutes=5)


def replay(nodes: int, rounds: int) -> tuple[int, float]:
    """The store operations of one load, and the median of the server's CPU seconds."""
    taken: list[float] = []
    repeats = max(MIN_REPEATS, REPEATED_NODES // nodes)
    with Server() as server, ThreadPoolExecutor(THREADS) as pool:
        leaders = [_Leader(node, nodes, server.port) for node in range(nodes)]
        for _ in range(repeats):
            before = server.cpu_seconds()
            for number in range(rounds):
                _round(pool, leaders, number)
            list(pool.map(_Leader.delete, leaders))
            leaders[0].store.delete_key(leaders[0].outcome)
            taken.append(server.cpu_seconds() - before)
        operations = sum(leader.operations for leader in leaders) // repeats
    return operations, statistics.median(taken)


class _Leader:
    def __init__(self, node: int, nodes: int, port: int) -> None:
        counts: Counter[str] = Counter()
        job = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        self.store: Any = CountingStore(job, counts)
        self.counts = counts
        self.node = node
        self.children = range(FAN_OUT * node + 1, min(FAN_OUT * (node + 1) + 1, nodes))
        self.posted = self.outcome = ""

    @property
    def operations(self) -> int:
        return self.counts.total() - self.counts["bytes"]

    def post(self, number: int) -> None:
        if self.children:
            keys = [f"view/{number}/{child}" for child in self.children]
            for _ in range(LOOKS):
                self.store.check(keys)
            self.store.multi_get(keys)
        if self.node > 0:
            self.posted, before = f"view/{number}/{self.node}", self.posted
            self.store.set(self.posted, VIEW)
            if before:
                self.store.delete_key(before)

    def read(self, number: int) -> None:
        if self.node > 0:
            for _ in range(LOOKS):
                self.store.compare_set(f"outcome/{number}", "?", "?")

    def delete(self) -> None:
        if self.posted:
            self.store.delete_key(self.posted)
        self.posted = ""


def _round(pool: ThreadPoolExecutor, leaders: list[_Leader], number: int) -> None:
    for level in _levels(len(leaders)):
        list(pool.map(lambda node: leaders[node].post(number), level))
    root = leaders[0]
    if root.outcome:
        root.store.delete_key(root.outcome)
    root.outcome = f"outcome/{number}"
    root.store.compare_set(root.outcome, "", VIEW.decode())
    list(pool.map(lambda leader: leader.read(number), leaders))


def _levels(nodes: int) -> Iterable[range]:
    """The nodes of each level of the tree, the lowest first."""
    levels, first, count = [], 0, 1
    while first < nodes:
        levels.append(range(first, min(first + count, nodes)))
        first, count = first + count, count * FAN_OUT
    return reversed(levels)
