"""Unix sockets between the leader of a node and each of its other ranks, over which their watches exchange messages."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from epload.errors import LoadError
from epload.ranks.tree import Tree

_HEADER = struct.Struct("<IQ")
"""Number of bytes of a message's tag and of its data."""
_HELLO = struct.Struct("<I")
"""The rank that has connected, before any message."""
_HELLO_SECONDS = 5.0
"""Maximum seconds from a connection to its hello: other programs may connect, too."""
_POLL_SECONDS = 0.02
_CHUNK = 1 << 18


class Link:
    """One end of a connection. Any thread may send; the watch receives, and sends what did not fit into the socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._lock = threading.Lock()
        self._received = bytearray()
        self._unsent = bytearray()
        self.closed = False
        """True if the other end has closed the connection."""

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def unsent(self) -> bool:
        """True if a message is not sent yet, as the other end does not read."""
        return bool(self._unsent)

    def send(self, tag: str, data: bytes, optional: bool = False) -> None:
        """Sends a message, or as much of it as fits into the socket; :meth:`flush` sends the rest.

        ``optional``: the message is dropped if others are not sent yet.
        """
        with self._lock:
            if self._unsent and optional:
                return
            name = tag.encode()
            self._unsent += _HEADER.pack(len(name), len(data)) + name + data
        self.flush()

    def flush(self) -> None:
        with self._lock:
            try:
                while self._unsent:
                    del self._unsent[: self._connection.send(self._unsent)]
            except BlockingIOError:
                return
            except OSError:  # the watch detects that the process has ended
                self._unsent.clear()

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
        messages, at = [], 0
        while len(self._received) - at >= _HEADER.size:
            tag, nbytes = _HEADER.unpack_from(self._received, at)
            begin = at + _HEADER.size
            if len(self._received) < begin + tag + nbytes:
                break
            at = begin + tag + nbytes
            messages.append((self._received[begin : begin + tag].decode(), bytes(self._received[begin + tag : at])))
        del self._received[:at]
        return messages

    def close(self) -> None:
        self._connection.close()

    def __del__(self) -> None:
        self.close()


def connect_node(tree: Tree, token: str, limit: timedelta, check: Callable[[], None]) -> dict[int, Link]:
    """Returns this rank's links: a leader's to the other ranks of its node, any other rank's to its leader.

    Args:
        tree: this rank's place.
        token: equal on the node's ranks, and unknown to other programs.
        limit: time within which the others have to connect.
        check: raises an error if one of them cannot come any more.

    Raises:
        LoadError: a rank has not connected in time.
    """
    if len(tree.node) == 1:
        return {}
    address = f"\0epload/{token}/{tree.leader}"
    until = time.monotonic() + limit.total_seconds()
    if tree.leads:
        return _accept(address, tree, until, check)
    return {tree.leader: _connect(address, tree, until, check)}


def _connect(address: str, tree: Tree, until: float, check: Callable[[], None]) -> Link:
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
            connection.sendall(_HELLO.pack(tree.rank))
            return Link(connection)
        except OSError as error:  # the leader does not listen yet
            connection.close()
            check()
            if time.monotonic() >= until:
                text = f"rank {tree.rank} could not connect to rank {tree.leader} of its node: {error}"
                raise LoadError(text) from error
            time.sleep(_POLL_SECONDS)


def _accept(address: str, tree: Tree, until: float, check: Callable[[], None]) -> dict[int, Link]:
    links: dict[int, Link] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(len(tree.members))
        listener.settimeout(5 * _POLL_SECONDS)
        while missing := sorted(set(tree.members) - links.keys()):
            check()
            if time.monotonic() >= until:
                raise LoadError(f"ranks {missing} did not connect to rank {tree.rank} of their node in time")
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            rank = _hello(connection)
            if rank in missing:
                links[rank] = Link(connection)
            else:
                connection.close()
    return links


def _hello(connection: socket.socket) -> int | None:
    """Returns the rank that has connected; None if it is another program."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if user != os.getuid():
        return None
    connection.settimeout(_HELLO_SECONDS)
    try:
        data = connection.recv(_HELLO.size, socket.MSG_WAITALL)
    except OSError:
        return None
    return int(_HELLO.unpack(data)[0]) if len(data) == _HELLO.size else None
