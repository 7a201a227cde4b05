"""Connections between the ranks of a node: Unix sockets between the leader and each of the others.

Each pair has two: one for the threads that run the rounds, one for the watches. So each has one reader, no message waits for a
thread to pass it on, and none goes through the store.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

from epload.errors import LoadError
from epload.ranks.tree import Tree

Kind = Literal["rounds", "watch"]
KINDS: tuple[Kind, ...] = ("rounds", "watch")
HELLO = "hello"
"""Tag of a link's first message: its kind and the rank that has connected."""
_HEADER = struct.Struct("<IQ")
"""Bytes of a message's tag and of its data."""
_POLL_SECONDS = 0.02
"""Between two attempts to connect to a leader that does not listen yet."""
_ACCEPT_POLL_MS = 100
"""Between two checks for ranks that cannot come any more."""
_CHUNK = 1 << 18
_MAX_HELLO = 1000
"""Bytes of a first message at most: other programs may connect, too."""


class Link:
    """One end of a connection. One thread sends and one receives; any may notify, on a link on which none sends."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._received = bytearray()
        self._unsent = bytearray()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.process, self.user, _ = struct.unpack("3i", credentials)
        self.closed = False
        """True if the other end has closed the connection."""

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, tag: str, data: bytes, wait: Callable[[], None]) -> None:
        """Sends a message, of which what another end has not taken is sent before the next.

        Args:
            wait: called while the other end takes nothing; an error that it raises ends the wait.

        Raises:
            OSError: the other end has closed the connection.
        """
        self._unsent += _frame(tag, data)
        while self._unsent:
            try:
                del self._unsent[: self._connection.send(self._unsent, socket.MSG_DONTWAIT)]
            except BlockingIOError:
                wait()

    def notify(self, tag: str, data: bytes) -> None:
        """Sends a small message that may be lost if the other end does not read or has closed the connection."""
        with self._lock, suppress(OSError):
            self._connection.send(_frame(tag, data), socket.MSG_DONTWAIT)

    def is_half_full(self) -> bool:
        """Returns True if the other end has so much unread that unimportant news should wait."""
        (unread,) = struct.unpack("i", fcntl.ioctl(self._connection, termios.TIOCOUTQ, bytes(4)))
        return bool(2 * unread > self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))

    def receive(self) -> list[tuple[str, bytes]]:
        """Returns the messages that have arrived since the last call; does not wait."""
        while not self.closed and self._read(_CHUNK) == _CHUNK:
            pass
        return self._take_messages()

    def receive_hello(self) -> Any:
        """Returns the content of the first message, None until it has arrived; does not wait.

        Reads no byte behind it: a message that has been read does not show as one that can be read.
        """
        while not self.closed:
            lacking = _HEADER.size - len(self._received)
            if lacking <= 0:
                tag, data = _HEADER.unpack_from(self._received)
                lacking += tag + data
                self.closed = tag + data > _MAX_HELLO
            if lacking == 0:
                with suppress(ValueError, RecursionError):
                    ((name, text),) = self._take_messages()
                    return json.loads(text) if name == HELLO else ""
                return ""
            if self.closed or not self._read(lacking):
                break
        return None

    def _read(self, most: int) -> int:
        """Reads at most ``most`` bytes without waiting; returns how many there were."""
        try:
            data = self._connection.recv(most, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        self.closed = not data
        self._received += data
        return len(data)

    def _take_messages(self) -> list[tuple[str, bytes]]:
        messages, at = [], 0
        while len(self._received) - at >= _HEADER.size:
            tag, data = _HEADER.unpack_from(self._received, at)
            begin = at + _HEADER.size
            if len(self._received) < begin + tag + data:
                break
            at = begin + tag + data
            messages.append((self._received[begin : begin + tag].decode(), bytes(self._received[begin + tag : at])))
        del self._received[:at]
        return messages

    def close(self) -> None:
        self._connection.close()


class NodeLinks:
    """This rank's links, by rank: a leader's to the others of its node, any other's to its leader."""

    def __init__(self, links: Mapping[Kind, dict[int, Link]]) -> None:
        self.rounds, self.watch = links["rounds"], links["watch"]

    @classmethod
    def none(cls) -> NodeLinks:
        return cls({"rounds": {}, "watch": {}})

    @classmethod
    def make(cls, tree: Tree, token: str, limit: timedelta, check: Callable[[], None]) -> NodeLinks:
        """Connects the ranks of a node, which all call this.

        Args:
            tree: this rank's place.
            token: equal on the node's ranks, and unknown to other programs.
            limit: time within which the others have to connect.
            check: raises an error if one of them cannot come any more.

        Raises:
            LoadError: a rank has not connected in time.
        """
        if len(tree.node) == 1:
            return cls.none()
        address = f"\0epload/{token}/{tree.leader}"
        until = time.monotonic() + limit.total_seconds()
        links: dict[Kind, dict[int, Link]] = {"rounds": {}, "watch": {}}
        try:
            if tree.leads:
                _accept(address, links, tree, until, check)
            else:
                for kind in KINDS:
                    links[kind][tree.leader] = _connect(address, kind, tree, until, check)
        except BaseException:
            cls(links).close()
            raise
        return cls(links)

    def close(self) -> None:
        for link in (*self.rounds.values(), *self.watch.values()):
            link.close()

    def __del__(self) -> None:
        self.close()


def _frame(tag: str, data: bytes) -> bytes:
    name = tag.encode()
    return _HEADER.pack(len(name), len(data)) + name + data


def _connect(address: str, kind: Kind, tree: Tree, until: float, check: Callable[[], None]) -> Link:
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
            link = Link(connection)
            link.notify(HELLO, json.dumps([kind, tree.rank]).encode())
            return link
        except OSError as error:  # the leader does not listen yet
            connection.close()
            check()
            if time.monotonic() >= until:
                raise LoadError(
                    f"rank {tree.rank} could not connect to rank {tree.leader} of its node: {error}"
                ) from error
            time.sleep(_POLL_SECONDS)


def _accept(
    address: str, links: dict[Kind, dict[int, Link]], tree: Tree, until: float, check: Callable[[], None]
) -> None:
    missing: list[Any] = [[kind, rank] for kind in KINDS for rank in tree.members]
    unknown: list[Link] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(len(missing))
        while missing:
            poll = select.poll()
            for each in (listener.fileno(), *(link.fileno() for link in unknown)):
                poll.register(each, select.POLLIN)
            poll.poll(_ACCEPT_POLL_MS)
            check()
            if time.monotonic() >= until:
                ranks = sorted({rank for _, rank in missing})
                raise LoadError(f"ranks {ranks} did not connect to rank {tree.rank} of their node in time")
            with suppress(BlockingIOError):
                listener.setblocking(False)
                unknown.append(Link(listener.accept()[0]))
                unknown[-1]._connection.setblocking(True)
            for link in list(unknown):
                hello = link.receive_hello()
                if hello is None and not link.closed:
                    continue
                unknown.remove(link)
                if link.user == os.getuid() and hello in missing:
                    missing.remove(hello)
                    kind, rank = hello
                    links[kind][rank] = link
                else:
                    link.close()
    for link in unknown:
        link.close()
