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
from epload.ranks.links import Link, address_of, connect_node
from epload.ranks.tree import Tree


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
    return connect_node(Tree([[0, 1]], 0), token, timedelta(seconds=seconds), lambda: None)


def test_what_other_programs_send_is_ignored() -> None:
    """The member's first message is right behind its hello."""
    token, connections = uuid4().hex, list[socket.socket]()
    message = struct.pack("<Q", 10) + b"view\0hello"

    def members() -> None:
        for hello in ("", token, f"{token}{7:12}", f"{token[:16]:44}", f"{token}{1:12}"):
            connections.append(connect(address_of(token, 0)))
            connections[-1].sendall(hello.encode() + message)
            if len(hello) < 44:
                connections[-1].shutdown(socket.SHUT_WR)

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
