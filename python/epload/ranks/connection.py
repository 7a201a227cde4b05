"""Connects a rank with the others of its control: the store, the links of its node, and what it has learned over them."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from epload.errors import RankExited
from epload.observe.trace import Events
from epload.ranks.failure import Failure
from epload.ranks.heartbeat import Heartbeats, Position
from epload.ranks.links import Link, connect_node
from epload.ranks.messages import read_if_set
from epload.ranks.processes import Processes
from epload.ranks.tree import Tree

DEFAULT_TIMEOUT = timedelta(minutes=30)
FAILED = "failed"
"""Tag of a message within a node: the prefix of an attempt, and its failure."""
_CONNECT_SECONDS = 10.0
"""Maximum seconds that the store's host takes to answer."""
_IDLE_SECONDS = 60
"""Seconds without a message after which the system asks whether the other end is there."""


class NodeConnection:
    """One rank's connection with the others. Each rank is a node of its own until all ranks know the topology."""

    wake_fd = -1
    """Event that wakes the watch; -1 if it has never run."""

    def __init__(self, store: Store | None, ranks: tuple[int, ...], rank: int) -> None:
        """
        Args:
            store: prefixed for the control; None for a single rank.
            ranks: global ranks; the first is the coordinator.
            rank: this process's.
        """
        self.store = store
        self.ranks = ranks
        self.rank = rank
        self.coordinator = ranks[0]
        self.timeout = DEFAULT_TIMEOUT
        self.doing = ""
        """This rank's activity, for the logs and errors of ranks that wait for it."""
        self.progress = 0
        """Grows with the data that this rank has moved. Ranks that wait for it do not time out as long as it grows."""
        self.events: Events | None = None
        """Records the rounds; None if they are not recorded."""
        self.at: Position = (0, 0, 1)
        """The load, the attempt, which counts the failures in it, and the round that this rank is in, or comes to next."""
        self.waits_since = 0.0
        """Value of ``time.monotonic()`` when this rank came to the round that it is in; 0 between two rounds."""
        self.news = threading.Event()
        """Wakes this rank in a round: a message has arrived, a process has ended, a rank has failed, or the store is lost."""
        self.received: dict[str, dict[int, bytes]] = {}
        """Messages of rounds by number of the round and sender."""
        self.stops: list[Callable[[], None]] = []
        """Functions that end what waits in :meth:`stopping`; this rank then moves data."""
        self.processes = Processes()
        self.check_others: Callable[[], None] = lambda: None
        """Called now and then in rounds; raises LoadError if a rank on another machine will not come."""
        self.tree = Tree([[member] for member in ranks], rank)
        self.links: dict[int, Link] = {}
        """Links to the other ranks of this rank's node, if it leads that; else to the leader."""
        self.heartbeats = Heartbeats(self.connection, self.tree)
        self._lock = threading.Lock()
        self._failures: dict[str, Failure] = {}
        """The first failure of each attempt that is known to have failed, by the prefix of its keys."""
        self._keys: list[str] = []
        """Keys in the store to delete once all ranks have come to a later round."""
        self._released: list[str] = []
        """Keys that no rank needs any more."""
        self._joined = False
        """True if all ranks know the nodes; before, no groups are made."""
        self._own: Store | None = None
        self._connecting = threading.Lock()

    def connection(self) -> Store:
        """Returns a connection to the store that is not blocked while a process group is made over the job's. Thread-safe.

        A leader has one; another rank makes one when it fails itself.
        """
        assert self.store is not None
        with self._connecting:
            if self._joined and self._own is None:
                self._own = connect_again(self.store)
            return self._own or self.store

    def join_nodes(self, nodes: Iterable[Iterable[int]], token: str) -> None:
        """Connects the ranks of each node, all of which call this.

        Args:
            nodes: ranks that can reach one another within their machine.
            token: known to the ranks alone.

        Raises:
            RankExited, LoadError: a rank of the node has ended, or has not connected in time.
        """
        tree = Tree(nodes, self.rank)

        def check() -> None:
            for rank in sorted(self.processes.ended.keys() & set(tree.node)):
                raise RankExited(rank, self.processes.ended[rank])

        self.links = connect_node(tree, token, self.timeout, check)
        self.wake()  # so that the watch receives from them
        self.tree, self._joined = tree, True
        self.heartbeats = Heartbeats(self.connection, tree)
        if tree.leads:
            self.connection()

    @property
    def prefix(self) -> str:
        """Prefix of the keys of the present attempt."""
        return "{}.{}/".format(*self.at)

    @property
    def position(self) -> Position:
        """The round that this rank is in, or was in last."""
        load, attempt, step = self.at
        return load, attempt, step if self.waits_since else step - 1

    def close(self) -> None:
        """Lets go of the store, whose port is free once nobody has it. Controls are part of cycles, which the garbage collector
        may find much later."""
        self.store = self._own = None

    def __del__(self) -> None:
        if self.wake_fd >= 0:
            os.close(self.wake_fd)

    def wake(self) -> None:
        """Lets the watch send what a link has not taken yet."""
        if self.wake_fd >= 0:
            os.eventfd_write(self.wake_fd, 1)

    def send(self, rank: int, tag: str, data: bytes) -> None:
        """Sends a message to another rank of the node. Thread-safe."""
        link = self.links[rank]
        link.send(tag, data)
        if link.unsent:
            self.wake()

    # ---- keys in the store ----

    def delete_later(self, keys: Iterable[str]) -> None:
        """Deletes keys that this rank has set when all ranks have come to the next round, and nobody needs them."""
        self._keys += keys

    def release(self) -> None:
        """Marks what this rank has set so far as needed by no rank: all have come to its round."""
        self._released += self._keys
        self._keys = []

    def delete_released(self) -> None:
        assert self.store is not None
        while self._released:
            self.store.delete_key(self._released.pop())

    # ---- failures ----

    def known_failure(self) -> Failure | None:
        """Returns the failure of the present attempt that this rank has received."""
        return self._failures.get(self.prefix)

    def look(self, store: Store | None = None) -> Failure | None:
        """Looks in the store for a failure of the present attempt, over :meth:`connection` if not another. Thread-safe."""
        prefix, store = self.prefix, store or self.connection()
        outcome, stop = outcome_keys(prefix)
        failure = self._failures.get(prefix) or Failure.decode(read_if_set(store, outcome) or b"")
        if failure is None:
            return None
        if not failure.hard and store.check([stop]):
            failure = replace(failure, hard=True)
        self.notice(prefix, failure)
        return failure

    def set_outcome(self, prefix: str, value: bytes) -> bytes:
        """Publishes the outcome of an attempt, unless it has one; returns that which it has. Thread-safe."""
        return bytes(self.connection().compare_set(outcome_keys(prefix)[0], "", value))  # type: ignore[arg-type]

    def publish(self, prefix: str, failure: Failure) -> Failure | None:
        """Publishes a failure of an attempt. Returns what all ranks raise: this one or the first; None if the load has succeeded.
        Thread-safe."""
        if self.store is None:
            return failure
        first = Failure.decode(self.set_outcome(prefix, failure.encode()))
        if first is None:
            return None
        if failure.hard and not first.hard:
            self.connection().set(outcome_keys(prefix)[1], "1")
            first = replace(first, hard=True)
        self.notice(prefix, first)
        return first

    def notice(self, prefix: str, failure: Failure, sender: int = -1) -> None:
        """Remembers that an attempt has failed, as ``sender`` of this node says if given: wakes this rank and notifies its node.
        Thread-safe."""
        with self._lock:
            first = self._failures.get(prefix)
            if first is not None:
                failure = replace(first, hard=first.hard or failure.hard)
            self._failures[prefix] = failure
        if failure == first:
            return
        for rank in self.links.keys() - {sender}:
            self.send(rank, FAILED, prefix.encode() + b" " + failure.encode())
        self.news.set()
        if failure.hard and prefix == self.prefix:
            self.stop()

    def clear_before(self, load: int) -> None:
        """Clears what belongs to loads before this one, which may have failed."""

        def is_recent(key: str) -> bool:
            return int(key.split(".")[0]) >= load

        self.heartbeats.local.clear()
        with self._lock:
            self.received = {number: views for number, views in self.received.items() if is_recent(number)}
            self._failures = {prefix: failure for prefix, failure in self._failures.items() if is_recent(prefix)}

    @contextmanager
    def stopping(self, *stops: Callable[[], None]) -> Iterator[None]:
        """A context in which each function is called when a rank publishes a hard failure or the store is lost. Any thread may
        call them, and more than once."""
        self.stops += stops
        try:
            if (failure := self.known_failure()) is not None and failure.hard:  # since before this
                self.stop()
            yield
        finally:
            for stop in stops:
                self.stops.remove(stop)

    def stop(self) -> None:
        """Ends what waits in :meth:`stopping`."""
        for stop in list(self.stops):
            stop()


def outcome_keys(prefix: str) -> tuple[str, str]:
    """Returns the keys of an attempt's outcome, and of a hard failure after a soft one."""
    return f"{prefix}outcome", f"{prefix}stop"


def connect_again(store: Store) -> Store:
    """Returns another connection to the store: a TCPStore answers nobody else on one on which a thread waits for a key.

    Another store is returned itself: a FileStore deletes its file when as many objects as there are ranks have been destroyed,
    copies included.

    Raises:
        DistNetworkError: the store's host has died.
    """
    base: Any = store
    while hasattr(base, "underlying_store"):
        base = base.underlying_store
    if not isinstance(base, TCPStore):
        return store
    try:  # a copy would try again and again for as long as the store's own timeout
        socket.create_connection((base.host, base.port), _CONNECT_SECONDS).close()
    except OSError as error:
        raise DistNetworkError(f"no connection to the store at {base.host}:{base.port}: {error}") from error
    with keeping_alive(base.port):
        clone: Store = store.clone()  # type: ignore[attr-defined]  # torch does not declare it
    return clone


@contextmanager
def keeping_alive(port: int = 0) -> Iterator[None]:
    """A context that has the system send something from time to time on the TCP connections that this process makes inside, and
    on those that it has to a port: firewalls forget connections on which nothing comes for minutes, as between two versions."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    if socket.getdefaulttimeout() is not None:  # which Python would give these connections, too
        return
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            fd = int(name)
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as connection:
                    is_tcp, peer = connection.family in (socket.AF_INET, socket.AF_INET6), connection.getpeername()
                    if is_tcp and (name not in before or peer[1] == port):
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
