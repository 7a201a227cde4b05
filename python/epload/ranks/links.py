"""Unix sockets between the leader of a node and each of its other ranks, over which their watches exchange messages."""

from __future__ import annotations

import hashlib
import math
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from epload.core.log import logger
from epload.errors import LoadError, limit_hint
from epload.ranks.tree import Tree

_SIZE = struct.Struct("<Q")
"""Number of bytes of a message: its tag, a zero byte, and its data."""
_HELLO_SECONDS = 5.0
"""Maximum seconds from a connection to its hello: other programs may connect, too."""
_POLL_SECONDS = 0.02
_WARN_SECONDS = 10.0
"""Seconds that a rank waits for another one of its node until it says so."""
_WAY_OUT = "if they are in containers that cannot reach one another, give each a node of its own (epload.Topology.from_nodes)"
_CHUNK = 1 << 18


class Link:
    """One end of a connection. Any thread may send; the watch receives, and sends what did not fit into the socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._lock = threading.Lock()
        self._received = bytearray()
        self.unsent = bytearray()
        """Messages that are not sent yet, as the other end does not read."""
        self.closed = False
        """True if the other end has closed the connection."""

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, tag: str, data: bytes, optional: bool = False) -> None:
        """Sends a message, or as much of it as fits into the socket; :meth:`flush` sends the rest.

        ``optional``: the message is dropped if others are not sent yet.
        """
        with self._lock:
            if self.unsent and optional:
                return
            message = tag.encode() + b"\0" + data
            self.unsent += _SIZE.pack(len(message)) + message
        self.flush()

    def flush(self) -> None:
        with self._lock:
            try:
                while self.unsent:
                    del self.unsent[: self._connection.send(self.unsent)]
            except BlockingIOError:
                return
            except OSError:  # the watch detects that the process has ended
                self.unsent.clear()

    def receive(self) -> list[tuple[str, bytes]]:
        """Returns the messages that have arrived, each with its tag; does not wait."""
        try:
            while data := self._connection.recv(_CHUNK):
                self._received += data
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        messages, end = [], 0
        while len(self._received) >= (begin := end + _SIZE.size):
            (nbytes,) = _SIZE.unpack_from(self._received, end)
            if len(self._received) < begin + nbytes:
                break
            end = begin + nbytes
            tag, _, data = bytes(self._received[begin:end]).partition(b"\0")
            messages.append((tag.decode(), data))
        del self._received[:end]
        return messages

    def __del__(self) -> None:
        self._connection.close()


def connect_node(tree: Tree, token: str, limit: timedelta, check: Callable[[], None]) -> dict[int, Link]:
    """Returns this rank's links: a leader's to the other ranks of its node, any other rank's to its leader.

    Args:
        tree: the node's ranks.
        token: equal on the node's ranks, and unknown to other programs.
        limit: time within which the others have to connect.
        check: raises an error if one of them cannot come any more.

    Raises:
        LoadError: a rank has not connected in time.
    """
    address = address_of(token, tree.leader)
    until = time.monotonic() + limit.total_seconds()
    if tree.members:
        return _accept(address, token, tree, until, check)
    return {} if tree.leads else {tree.leader: _connect(address, token, tree, until, check)}


def address_of(token: str, leader: int) -> str:
    """Returns the address at which a leader listens. Other programs can see it, but not the token."""
    return f"\0epload/{hashlib.blake2b(token.encode(), digest_size=16).hexdigest()}/{leader}"


def _hello(token: str, rank: int) -> bytes:
    """Returns what a rank sends before any message."""
    return f"{token}{rank:12}".encode()


def _warner(rank: int) -> Callable[[str], None]:
    """Returns a function that logs once for what a rank waits, if that takes long."""
    warn_at = time.monotonic() + _WARN_SECONDS

    def warn(what: str) -> None:
        nonlocal warn_at
        if time.monotonic() >= warn_at:
            warn_at = math.inf
            logger.warning("rank %d waits for %s; %s", rank, what, _WAY_OUT)

    return warn


def _connect(address: str, token: str, tree: Tree, until: float, check: Callable[[], None]) -> Link:
    warn = _warner(tree.rank)
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
            connection.sendall(_hello(token, tree.rank))
            return Link(connection)
        except OSError as error:  # the leader does not listen yet
            connection.close()
            check()
            if time.monotonic() >= until or isinstance(error, PermissionError):
                text = f"rank {tree.rank} could not connect to rank {tree.leader} of its node: {error}"
                raise LoadError(f"{text}; {_WAY_OUT}") from error
            warn(f"rank {tree.leader} of its node, which does not answer ({error})")
            time.sleep(_POLL_SECONDS)


def _accept(address: str, token: str, tree: Tree, until: float, check: Callable[[], None]) -> dict[int, Link]:
    missing, links = {_hello(token, rank): rank for rank in tree.members}, dict[int, Link]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(len(tree.members))
        listener.settimeout(5 * _POLL_SECONDS)
        warn = _warner(tree.rank)
        while missing:
            check()
            if time.monotonic() >= until:
                names = list(missing.values())
                raise LoadError(f"ranks {names} did not connect to rank {tree.rank} of their node in time; {_WAY_OUT}")
            warn(f"ranks {[*missing.values()]} of its node to connect")
            try:
                connection, _ = listener.accept()
                connection.settimeout(_HELLO_SECONDS)
                rank = missing.pop(connection.recv(len(_hello(token, 0)), socket.MSG_WAITALL), None)
                if rank is None:
                    connection.close()
                else:
                    links[rank] = Link(connection)
            except OSError as error:  # nobody has connected yet, or it is another program
                if hint := limit_hint(error):
                    raise LoadError(f"rank {tree.rank}: {error.strerror}{hint}") from error
    return links
