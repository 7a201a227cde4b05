"""A rank's place in its control: its connections to the store and to the ranks of its node, and what it has learned over them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from epload.errors import RankExited, RemoteFailure
from epload.observe.events import Events
from epload.ranks.failure import Failure
from epload.ranks.heartbeat import Heartbeats, Position
from epload.ranks.links import Link, connect_node
from epload.ranks.messages import MessageStore, read_if_set
from epload.ranks.processes import Processes
from epload.ranks.tree import Tree

DEFAULT_TIMEOUT = timedelta(minutes=30)
FAILURE = b"f"
"""The first byte of an outcome that is a failure; no decision begins with it."""
FAILED = "failed"
"""Tag of a message within a node: the prefix of an attempt, and its failure."""
_CONNECT_SECONDS = 10.0
"""Within which the store's host has to answer."""


class Stoppable(Protocol):
    """A wait that can be ended by another thread; a ``Board`` is one."""

    def fail(self) -> None: ...


class Stop(threading.Event):
    """An event that is set when another rank has failed."""

    fail = threading.Event.set

    def check(self) -> None:
        """Raises RemoteFailure if another rank has failed."""
        if self.is_set():
            raise RemoteFailure("another rank failed")


class Place:
    """One rank among those of a control. Each rank is a node of its own until all ranks know the topology."""

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
        self._lock = threading.Lock()
        self.news = threading.Event()
        """Wakes this rank in a round: a message has arrived, a process has ended, a rank has failed, or the store is lost."""
        self.received: dict[str, dict[int, bytes]] = {}
        """Messages of rounds by tag and sender."""
        self.processes = Processes()
        self.tree = Tree.of([[member] for member in ranks], rank)
        self.links: dict[int, Link] = {}
        """Links to the other ranks of this rank's node, if it leads that; else to the leader."""
        self._failures: dict[str, Failure] = {}
        """The first failure of each attempt that is known to have failed, by the prefix of its keys."""
        self._stoppable: list[Stoppable] = []
        self._joined = False
        """True if all ranks know the nodes; before, no groups are made."""
        self._own: Store | None = None
        self._connecting = threading.Lock()
        if store is not None:
            self.messages = MessageStore(store)
            self.heartbeats = Heartbeats(self.connection, self.tree)

    def connection(self) -> Store:
        """Returns a connection to the store that is not blocked while a process group is made over the job's. Thread-safe.

        A leader has one; another rank makes one when it fails itself.
        """
        assert self.store is not None
        with self._connecting:
            if self._joined and self._own is None:
                self._own = _clone(self.store)
            return self._own or self.store

    def join_nodes(self, nodes: Iterable[Iterable[int]], token: str) -> None:
        """Connects the ranks of each node, all of which call this.

        Args:
            nodes: ranks that can reach one another within their machine.
            token: known to the ranks alone.

        Raises:
            RankExited, LoadError: a rank of the node has ended, or has not connected in time.
        """
        tree = Tree.of(nodes, self.rank)

        def check() -> None:
            for rank, pid in sorted(self.processes.ended.items()):
                if rank in tree.node:
                    raise RankExited(rank, pid)

        self.links = connect_node(tree, token, self.timeout, check)
        self.tree, self._joined = tree, True
        self.heartbeats = Heartbeats(self.connection, tree)
        if tree.leads:
            self.connection()

    def delete_later(self, keys: Iterable[str]) -> None:
        """Deletes keys that this rank has set when all ranks have come to the next round, and nobody needs them."""
        if self.store is not None:
            self.messages.delete_later(keys)

    @property
    def prefix(self) -> str:
        """Prefix of the keys of the present attempt."""
        return "{}.{}/".format(*self.at)

    @property
    def position(self) -> Position:
        """The round that this rank is in, or was in last."""
        load, attempt, step = self.at
        return load, attempt, step if self.waits_since else step - 1

    # ---- failures ----

    def known_failure(self) -> Failure | None:
        """Returns the failure of the present attempt that this rank has heard of."""
        return self._failures.get(self.prefix)

    def look(self, store: Store | None = None) -> Failure | None:
        """Looks in the store for a failure of the present attempt, over :meth:`connection` if not another. Thread-safe."""
        prefix, store = self.prefix, store or self.connection()
        outcome, stop = outcome_keys(prefix)
        failure = self._failures.get(prefix)
        if failure is None:
            value = read_if_set(store, outcome) or b""
            failure = Failure.decode(value[1:]) if value.startswith(FAILURE) else None
        if failure is not None and not failure.hard and store.check([stop]):
            failure = replace(failure, hard=True)
        if failure is not None:
            self.notice(prefix, failure)
        return failure

    def set_outcome(self, prefix: str, value: bytes) -> bytes:
        """Publishes the outcome of an attempt, unless it has one; returns that which it has. Thread-safe."""
        return bytes(self.connection().compare_set(outcome_keys(prefix)[0], "", value))  # type: ignore[arg-type]

    def publish(self, prefix: str, failure: Failure) -> Failure | None:
        """Publishes a failure of an attempt. Returns what all ranks raise: this one or the first; None if the load has succeeded.
        Thread-safe."""
        outcome = self.set_outcome(prefix, FAILURE + failure.encode())
        if not outcome.startswith(FAILURE):
            return None
        first = Failure.decode(outcome[1:])
        if failure.hard and not first.hard:
            self.connection().set(outcome_keys(prefix)[1], "1")
            first = replace(first, hard=True)
        self.notice(prefix, first)
        return first

    def notice(self, prefix: str, failure: Failure, sender: int = -1) -> None:
        """Takes in that an attempt has failed, as ``sender`` of this node says if given: wakes this rank and notifies its node.
        Thread-safe."""
        with self._lock:
            first = self._failures.get(prefix)
            if first is not None:
                failure = replace(first, hard=first.hard or failure.hard)
            self._failures[prefix] = failure
        if failure == first:
            return
        text = prefix.encode() + b" " + failure.encode()
        for rank, link in self.links.items():
            if rank != sender:
                link.send(FAILED, text)
        self.news.set()
        if failure.hard and prefix == self.prefix:
            self.stop()

    def hear_failure(self, sender: int, data: bytes) -> None:
        """Takes in a message that :meth:`notice` has sent on another rank."""
        prefix, _, failure = data.partition(b" ")
        self.notice(prefix.decode(), Failure.decode(failure), sender)

    def forget(self, load: int) -> None:
        """Forgets what belongs to loads before this one, which may have failed."""
        self.heartbeats.forget(load)
        for tag in [tag for tag in self.received if int(tag.split("/")[1].split(".")[0]) < load]:
            del self.received[tag]
        with self._lock:
            self._failures = {prefix: f for prefix, f in self._failures.items() if int(prefix.split(".")[0]) >= load}

    @contextmanager
    def stopping(self, *waiting: Stoppable) -> Iterator[None]:
        """A context in which ``fail()`` of each is called when a rank publishes a hard failure or the store is lost."""
        self._stoppable += waiting
        try:
            if (failure := self.known_failure()) is not None and failure.hard:  # since before this
                self.stop()
            yield
        finally:
            for stoppable in waiting:
                self._stoppable.remove(stoppable)

    @property
    def moves_data(self) -> bool:
        """True if this rank is in :meth:`stopping`."""
        return bool(self._stoppable)

    def stop(self) -> None:
        """Ends what waits in :meth:`stopping`."""
        for waiting in list(self._stoppable):
            waiting.fail()


def outcome_keys(prefix: str) -> tuple[str, str]:
    """Returns the keys of an attempt's outcome, and of a hard failure after a soft one."""
    return f"{prefix}outcome", f"{prefix}stop"


def _clone(store: Store) -> Store:
    """Returns another connection to the store.

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
