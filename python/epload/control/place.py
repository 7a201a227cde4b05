"""A rank's place in its control: its node, its links to the ranks there, and its connections to the store."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from epload.control.heartbeat import Heartbeats
from epload.control.links import NodeLinks
from epload.control.messages import MessageStore
from epload.control.processes import LocalProcesses
from epload.control.tree import Tree
from epload.control.waiter import Alarm, Waiter
from epload.errors import RankExited

_CONNECT_SECONDS = 10.0
"""Within which the store's host has to answer."""


class Place:
    """At first each rank is a node of its own, until all know who is where."""

    def __init__(self, store: Store, ranks: Iterable[int], rank: int) -> None:
        """``store``: prefixed for the control."""
        self.store = store
        self.alarm = Alarm()
        """Wakes this rank in a round: a process has ended, a rank has failed, or the store is lost."""
        self.messages = MessageStore(store)
        self.links = NodeLinks.none()
        self.waiter: Waiter | None = None
        """Of a rank that leads its node."""
        self._connection: Store | None = None
        self._settle(Tree.of([[each] for each in ranks], rank))

    def _settle(self, tree: Tree) -> None:
        self.tree = tree
        if tree.leads and self.waiter is None:
            self.waiter = Waiter(_clone(self.store), self.alarm)
        elif not tree.leads and self.waiter is not None:
            self.waiter.stop()
            self._connection = self.waiter = None
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

    def begin_load(self) -> None:
        """Keeps nothing of a load that failed."""
        self.messages.keep_sent()
        if not self.tree.leads:
            self._connection = None

    def free_connection(self) -> Store:
        """A connection to the store that no call of a round or of a group blocks. A rank that does not lead its node makes it
        when it first fails."""
        if self._connection is None:
            self._connection = _clone(self.store)
        return self._connection


def _clone(store: Store) -> Store:
    """Another connection to the store, as a call on one blocks all threads that use it.

    A store that cannot be copied (torch 2.11) is returned itself, and one without connections: a FileStore deletes its
    file when as many objects as there are ranks have been destroyed, copies included.

    Raises:
        DistNetworkError: the store's host has died.
    """
    base: Any = store
    while hasattr(base, "underlying_store"):
        base = base.underlying_store
    clone: Callable[[], Store] | None = getattr(store, "clone", None)
    if clone is None or not isinstance(base, TCPStore):
        return store
    try:  # a copy would try again and again for as long as the store's own timeout
        socket.create_connection((base.host, base.port), _CONNECT_SECONDS).close()
    except OSError as error:
        raise DistNetworkError(f"no connection to the store at {base.host}:{base.port}: {error}") from error
    return clone()
