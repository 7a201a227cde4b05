"""Links within a node: what arrives together, what other programs send, and what does not fit into a socket."""

from __future__ import annotations

import socket
import struct
import threading
import time
from datetime import timedelta
from uuid import uuid4

import pytest

from epload.errors import LoadError
from epload.ranks.links import Link, connect_node
from epload.ranks.tree import Tree

HELLO = struct.pack("<I", 1)


def connect(address: str) -> socket.socket:
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
            return connection
        except OSError:
            connection.close()
            time.sleep(0.01)


def links_of_leader(token: str, seconds: float = 30) -> dict[int, Link]:
    return connect_node(Tree.of([[0, 1]], 0), token, timedelta(seconds=seconds), lambda: None)


def test_what_other_programs_send_is_ignored() -> None:
    """The member's first message is right behind its hello."""
    token, connections = uuid4().hex, list[socket.socket]()
    message = struct.pack("<IQ", 4, 5) + b"viewhello"

    def members() -> None:
        for hello in (b"", b"\0\0", struct.pack("<I", 7), b"\xff" * 12, HELLO + message):
            connections.append(connect(f"\0epload/{token}/0"))
            connections[-1].sendall(hello)
            if len(hello) < 4:
                connections[-1].close()

    thread = threading.Thread(target=members)
    thread.start()
    links = links_of_leader(token)
    thread.join()
    assert list(links) == [1]
    assert links[1].receive() == [("view", b"hello")]
    connections[-1].close()
    assert links[1].receive() == []
    assert links[1].closed


def test_a_rank_that_does_not_connect_is_named() -> None:
    with pytest.raises(LoadError, match=r"ranks \[1\] did not connect to rank 0 of their node in time"):
        links_of_leader(uuid4().hex, seconds=0.3)


def test_a_failure_follows_what_a_late_rank_has_not_read() -> None:
    """Heartbeats that nobody reads do not pile up."""
    sender, late = map(Link, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    while not sender.unsent:
        sender.send("beat", 600 * b"x", optional=True)
    sender.send("beat", b"too many", optional=True)
    sender.send("failed", 1_000_000 * b"y")
    received = []
    while sender.unsent:
        received += late.receive()
        sender.flush()
    received += late.receive()
    assert received.pop() == ("failed", 1_000_000 * b"y")
    assert set(received) == {("beat", 600 * b"x")}
