"""A rank's place in its control: its node, its links to the ranks there, and its connections to the store."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from epload.errors import RankExited
from epload.ranks.heartbeat import Heartbeats
from epload.ranks.links import NodeLinks
from epload.ranks.messages import MessageStore
from epload.ranks.processes import LocalProcesses
from epload.ranks.tree import Tree
from epload.ranks.waiter import Alarm, Waiter

_CONNECT_SECONDS = 10.0
"""Within which the store's host has to answer."""


class NodeConnection:
    """Connects a rank to its node. Each rank is a node of its own until all ranks know the topology."""

    def __init__(self, store: Store, ranks: Iterable[int], rank: int) -> None:
        """``store``: prefixed for the control."""
        self.store = store
        self.alarm = Alarm()
        """Wakes this rank in a round: a process has ended, a rank has failed, or the store is lost."""
        self.messages = MessageStore(store)
        self.links = NodeLinks.none()
        self.waiter: Waiter | None = None
        """The waiter of a rank that leads its node; None on other ranks."""
        self._settle(Tree.of([[each] for each in ranks], rank))

    def _settle(self, tree: Tree) -> None:
        self.tree = tree
        if tree.leads and self.waiter is None:
            self.waiter = Waiter(_clone(self.store), self.alarm)
        elif not tree.leads and self.waiter is not None:
            self.waiter.stop()
            self.waiter = None
        self._free = FreeStore(self.store, self.waiter)
        self.heartbeats = Heartbeats(self.free_connection, tree)

    def join_nodes(
        self, nodes: Iterable[Iterable[int]], token: str, limit: timedelta, processes: LocalProcesses
    ) -> None:
        """Connects the ranks of each node, all of which call this.

        Args:
            nodes: ranks that can reach one another within their machine.
            token: known to the ranks alone.
            limit: time within which the ranks of the node have to connect.
            processes: says which of them cannot come any more.

        Raises:
            RankExited, LoadError: a rank of the node has ended, or has not connected in time.
        """
        tree = Tree.of(nodes, self.tree.rank)

        def check() -> None:
            for rank, pid in sorted(processes.ended.items()):
                if rank in tree.node:
                    raise RankExited(rank, pid)

        self.links = NodeLinks.make(tree, token, limit, check)
        self._settle(tree)

    def begin_load(self, number: int) -> None:
        """Keeps nothing of loads before it, which may have failed."""
        self.messages.keep_sent()
        self.heartbeats.forget(number)
        if not self.tree.leads:
            self._free = FreeStore(self.store, None)

    def free_connection(self) -> Store:
        """A connection to the store that no call of a round or of a group blocks. A leader needs one besides the job's for this
        and for its waits; another rank makes one when it fails itself."""
        return cast(Store, self._free)


class FreeStore:
    """Store operations that no wait of a round and no group that is being made blocks. Thread-safe.

    A round waits on the waiter's connection, and a group is made on the job's, but never both at a time: an operation goes over
    the one that is free. A rank without a waiter makes another connection when it first needs one.
    """

    def __init__(self, store: Store, waiter: Waiter | None) -> None:
        """``store``: the job's connection."""
        self._store = store
        self._waiter = waiter
        self._own: Store | None = None

    @contextmanager
    def _free(self) -> Iterator[Store]:
        waiter = self._waiter
        if waiter is None:
            if self._own is None:
                self._own = _clone(self._store)
            yield self._own
            return
        with waiter.lock:  # no wait begins or ends, and no group is made after it, before this operation is over
            yield self._store if waiter.waits else waiter.store

    def set(self, key: str, value: str) -> None:
        with self._free() as store:
            store.set(key, value)

    def get(self, key: str) -> bytes:
        """Returns the value of a key that is known to be set."""
        with self._free() as store:
            return bytes(store.get(key))

    def check(self, keys: list[str]) -> bool:
        with self._free() as store:
            return bool(store.check(keys))

    def add(self, key: str, value: int) -> int:
        with self._free() as store:
            return int(store.add(key, value))

    def compare_set(self, key: str, expected: str, desired: str | bytes) -> bytes:
        with self._free() as store:
            return bytes(store.compare_set(key, expected, desired))  # type: ignore[arg-type]


def _clone(store: Store) -> Store:
    """Another connection to the store.

    A store that cannot be copied (torch 2.11) is returned itself, and one without connections: a FileStore deletes its
    file when as many objects as there are ranks have been destroyed, copies included.

    Raises:
        DistNetworkError: the store's host has died.
    """
    base: Any = store
    while hasattr(base, "underlying_store"):
        base = base.underlying_store
    copy: Callable[[], Store] | None = getattr(store, "clone", None)
    if copy is None or not isinstance(base, TCPStore):
        return store
    try:  # a copy would try again and again for as long as the store's own timeout
        socket.create_connection((base.host, base.port), _CONNECT_SECONDS).close()
    except OSError as error:
        raise DistNetworkError(f"no connection to the store at {base.host}:{base.port}: {error}") from error
    return copy()
