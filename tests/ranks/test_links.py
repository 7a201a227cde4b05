"""Links within a node: what arrives together, and what other programs send."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from datetime import timedelta
from uuid import uuid4

import pytest

from epload.errors import LoadError
from epload.ranks.links import HELLO, KINDS, Link, NodeLinks, _frame
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


def make(token: str, seconds: float = 30) -> NodeLinks:
    return NodeLinks.make(Tree.of([[0, 1]], 0), token, timedelta(seconds=seconds), lambda: None)


def test_a_message_right_behind_the_first_one_shows_as_readable() -> None:
    """A leader polls its links; what it had read with the first message would wait there for good."""
    token = uuid4().hex
    connections: list[socket.socket] = []

    def member() -> None:
        for kind in KINDS:
            connections.append(connect(f"\0epload/{token}/0"))
            hello = _frame(HELLO, json.dumps([kind, 1]).encode())
            connections[-1].sendall(hello + _frame("view", kind.encode()) + _frame("next", b"")[:5])

    thread = threading.Thread(target=member)
    thread.start()
    links = make(token)
    thread.join()
    for kind, column in (("rounds", links.rounds), ("watch", links.watch)):
        poll = select.poll()
        poll.register(column[1], select.POLLIN)
        assert poll.poll(10_000), "nothing shows that a message has arrived"
        assert column[1].receive() == [("view", kind.encode())]
    for connection in connections:
        connection.sendall(_frame("next", b"")[5:])
    assert [link.receive() for link in (links.rounds[1], links.watch[1])] == [[("next", b"")]] * 2
    links.close()
    for connection in connections:
        connection.close()


HOSTILE = {
    "nothing": b"",
    "half of a header": b"\0\0",
    "not JSON": _frame(HELLO, b"{"),
    "another tag": _frame("view", b"[]"),
    "not a list": _frame(HELLO, b"3"),
    "unhashable": _frame(HELLO, b'[["rounds"], 1]'),
    "a rank of another node": _frame(HELLO, b'["rounds", 7]'),
    "a tag that is not UTF-8": b"\x01\0\0\0" + bytes(8) + b"\xff",
    "lists in lists": _frame(HELLO, b"[" * 990),
    "too long": _frame(HELLO, b" " * 5000),
    "a length of 4 EB": b"\xff" * 12,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_another_program_sends_is_ignored(what: str) -> None:
    token = uuid4().hex

    def member() -> None:
        with connect(f"\0epload/{token}/0") as stranger:
            stranger.sendall(HOSTILE[what])
            for kind in KINDS:
                connections.append(connect(f"\0epload/{token}/0"))
                connections[-1].sendall(_frame(HELLO, json.dumps([kind, 1]).encode()))
            done.wait(30)

    connections: list[socket.socket] = []
    done = threading.Event()
    thread = threading.Thread(target=member)
    thread.start()
    links = make(token)
    assert list(links.rounds) == list(links.watch) == [1]
    done.set()
    thread.join()
    links.close()
    for connection in connections:
        connection.close()


def test_a_rank_that_does_not_connect_is_named() -> None:
    with pytest.raises(LoadError, match=r"ranks \[1\] did not connect to rank 0 of their node in time"):
        make(uuid4().hex, seconds=0.3)


def test_a_failure_finds_room_behind_heartbeats_that_nobody_reads() -> None:
    """A rank that comes minutes late has not read its link before."""
    sender, late = map(Link, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    beats = 0
    while not sender.is_half_full():
        sender.notify("beat", 60 * b"x")
        beats += 1
    assert beats > 10
    sender.notify("failed", 16_000 * b"y")
    assert late.receive() == [("beat", 60 * b"x")] * beats + [("failed", 16_000 * b"y")]
    assert not sender.is_half_full()
    sender.close()
    late.close()
