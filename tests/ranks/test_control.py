"""Agreement rounds, links within a node, and the maxima of all ranks."""

from __future__ import annotations

import math
import os
import signal
import socket
import struct
import threading
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import epload
from epload.core.attempt import Attempt
from epload.errors import CheckpointError, LoadError, ManifestMismatch, ModelMismatch, RankExited
from epload.ranks.connection import connect_again
from epload.ranks.control import Control
from epload.ranks.groups import Group
from epload.ranks.links import Link, address_of, connect_node
from epload.ranks.maxima import as_integers, reduce_maxima
from epload.ranks.rendezvous import rendezvous
from epload.ranks.tree import FAN_OUT, Tree
from support import ranks
from support.failures import raised
from support.on_ranks import on_ranks
from support.small_syncs import outcome


def make_control(rank: int, members: tuple[int, ...], node: str = "") -> Control:
    store = dist.group.WORLD.get_group_store()
    control, _ = rendezvous(store, members, rank, timedelta(minutes=1), None, None, lambda views: None, node)
    return control


CASES: list[tuple[dict[int, Exception], str, tuple[str, ...]]] = [
    ({1: CheckpointError("file x is short")}, "CheckpointError", ("file x is short [rank 1]",)),
    ({0: ValueError("bad src")}, "ValueError", ("bad src [rank 0]",)),
    ({2: TypeError("a DTensor")}, "TypeError", ("a DTensor [rank 2]",)),
    ({0: ModelMismatch("no key"), 2: ModelMismatch("no key")}, "ModelMismatch", ("no key [ranks 0, 2]",)),
    ({1: ManifestMismatch("one"), 2: ManifestMismatch("two")}, "ManifestMismatch", ("one [rank 1]\ntwo [rank 2]",)),
    ({1: MemoryError("no room")}, "MemoryError", ("no room",)),
    ({2: OSError(2, "gone", "model.bin")}, "LoadError", ("FileNotFoundError", "model.bin")),
    ({1: KeyError("lost")}, "LoadError", ("KeyError",)),
    ({0: LoadError("a"), 1: LoadError("b"), 2: LoadError("a")}, "LoadError", ("a [ranks 0, 2]\nb [rank 1]",)),
    ({2: CheckpointError('text with "quotes", \n a line break and ünïcode')}, "CheckpointError", ("ünïcode",)),
]
"""Errors by rank; class and parts of the text that all raise."""


def settle_errors(rank: int) -> list[tuple[str, str]]:
    control = make_control(rank, (0, 1, 2))
    assert control.agree("first", None, rank, lambda views: sum(views.values())) == 3
    seen = [raised(partial(control.agree, "check", errors.get(rank))) for errors, _, _ in CASES]

    def broken(views: dict[int, object]) -> object:
        raise ManifestMismatch(f"ranks {sorted(views)} differ")

    seen.append(raised(lambda: control.agree("reduce", None, rank, broken)))
    assert control.agree("after", None, {"rank": rank}, lambda views: views[2]["rank"]) == 2
    return seen


def test_errors_of_some_reach_all() -> None:
    first, *others = ranks.run(3, settle_errors)
    assert others == [first] * 2
    *seen, reduced = first
    for (_, expected, parts), (kind, text) in zip(CASES, seen, strict=True):
        assert kind == expected, text
        assert [part for part in parts if part not in text] == [], text
    assert reduced == ("ManifestMismatch", "ranks [0, 1, 2] differ")


def notices_late(rank: int) -> int:
    """A rank that sees another one end while the last round is decided has succeeded like the others."""
    control = make_control(rank, (0, 1))
    control.begin(timedelta(seconds=20))
    wait = control._wait

    def wait_in_vain(*args: Any) -> Any:
        wait(*args)
        raise RankExited(0, 1)

    with control.guard(), mock.patch.object(control, "_wait", wait_in_vain) if rank == 1 else nullcontext():
        decision: int = control.agree("the last round", None, rank + 1, lambda views: sum(views.values()), last=True)
    control.end()
    return decision


def test_a_decision_counts_on_all_ranks() -> None:
    assert ranks.run(2, notices_late) == [3, 3]


MANY = [[rank] for rank in range(FAN_OUT + 3)]


def sums_of_ranks(control: Control) -> list[int]:
    found = []
    for _ in range(3):
        control.begin(timedelta(minutes=1))
        with control.guard():
            for last in (False, True):
                found.append(control.agree("turn", None, control.rank, lambda views: sum(views.values()), last=last))
    return found


@pytest.mark.parametrize("nodes", [[[0, 3], [1], [2, 4, 5]], MANY], ids=["three", "many"])
def test_rounds_of_several_nodes(nodes: list[list[int]]) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = tuple(rank for node in nodes for rank in node)
    results: dict[int, Any] = {}

    def one(rank: int) -> None:
        try:
            control = Control(dist.TCPStore("127.0.0.1", server.port, is_master=False), members, rank)
            control.timeout = timedelta(minutes=1)
            control.join_nodes(nodes, f"test-{server.port}")
            results[rank] = sums_of_ranks(control)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert results == dict.fromkeys(members, [sum(members)] * 6)


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


def test_a_leader_that_may_open_no_more_files_says_so() -> None:
    full = OSError(24, "Too many open files")
    with mock.patch.object(socket.socket, "accept", side_effect=full), pytest.raises(LoadError, match="raise the limit on open"):
        links_of_leader(uuid4().hex)


def test_what_other_programs_send_is_ignored() -> None:
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


def reduce(topology: epload.Topology, values: list[float] | Exception) -> Tensor:
    def own() -> Tensor:
        if isinstance(values, Exception):
            raise values
        return as_integers(torch.tensor(values))

    topology.control.begin()
    try:
        with topology.control.guard():
            return reduce_maxima(topology, Attempt(own)).view(torch.float32)
    finally:
        topology.control.end()


@on_ranks(3)
def test_values_and_errors(rank: int) -> None:
    topology = epload.Topology.discover()
    own = [[1.0, 0.0, 2.0, math.nan, 0.0], [0.5, 0.0, math.inf, 9.0, 1e-45], [3.0, 0.0, -math.nan, 8.0, 0.0]][rank]
    for _ in range(2):
        found = reduce(topology, own)
        assert found.tolist()[:2] == [3.0, 0.0]
        assert found[2:4].isnan().all()
        assert found[4] == torch.tensor(1e-45)
        assert outcome(lambda: reduce(topology, ValueError("none") if rank == 1 else own)) == "none [rank 1]"
        assert "quantizes 5 blocks that ranks share" in outcome(lambda: reduce(topology, own[: 5 - rank]))
    assert reduce(topology, []).numel() == 0


@pytest.mark.parametrize("nodes", [[[0, 1, 2, 3, 4]], [[0, 1], [2], [3, 4]], [[4, 1], [3], [0, 2]], [[0], [1], [2], [3], [4]]])
@on_ranks(5)
def test_the_largest_of_all_ranks(rank: int, nodes: list[list[int]]) -> None:
    topology = epload.Topology.from_nodes(nodes)
    values = torch.tensor([[(7 * of + 3 * i) % 11 / 8 for i in range(9)] for of in range(5)])
    values[range(5), range(5)] = torch.tensor([2.0, math.nan, 2.0, 2.0, 2.0])
    expected = values.amax(0)  # in which NaN is the largest
    assert torch.equal(reduce(topology, values[rank].tolist()).nan_to_num(9), expected.nan_to_num(9))
    text = outcome(lambda: reduce(topology, values[rank].tolist()[: 9 - rank // 2]))
    assert "rank 0 quantizes 9 blocks that ranks share, rank 2 8" in text


def one_dies(rank: int) -> tuple[str, float]:
    topology = epload.Topology.discover(timeout=60)
    reduce(topology, [1.0])

    def die(self: Group, tensor: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    began = time.monotonic()
    with mock.patch.object(Group, "all_reduce_maximum", die) if rank == 1 else nullcontext():
        text = outcome(lambda: reduce(topology, [1.0]))
    return text, time.monotonic() - began


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_rank_that_dies_is_named(world: int) -> None:
    for text, seconds in filter(None, ranks.run(world, one_dies, dying=(1,))):
        assert "rank 1 has exited" in text
        assert seconds < 30


def late_to_refused_loads(rank: int) -> list[str]:
    """Each rank is a node. Rank 2 comes to a load that rank 1 has refused when the others have failed in two loads after it."""
    store = dist.group.WORLD.get_group_store()
    control = make_control(rank, (0, 1, 2), node=str(rank))
    control.agree("all here", None)
    refusing = (1, 0, 0)
    if rank == 2:
        store.wait(["test/others-failed"], timedelta(seconds=60))
    texts = []
    for load, refuses in enumerate(refusing):
        if rank == refuses:
            texts.append(control.refuse(control.next_load(), LoadError(f"refused {load}")).text)
        else:
            control.begin(timedelta(minutes=1))
            texts.append(raised(lambda: control.agree("turn", None))[1])
    if rank == 1:
        store.set("test/others-failed", "")
    control.begin(timedelta(minutes=1))
    control.agree("turn", None)
    return texts


def test_a_late_rank_hears_why_a_load_was_refused() -> None:
    assert ranks.run(3, late_to_refused_loads) == [["refused 0", "refused 1", "refused 2"]] * 3


def kept_alive(before: list[str], port: int = 0) -> list[bool]:
    """Returns whether each TCP connection of this process is kept alive that is not one of these descriptors, and leads to a port
    unless that is 0."""
    alive = []
    for name in {*os.listdir("/proc/self/fd")}.difference(before):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family != socket.AF_UNIX and connection.getpeername()[1] in {port or connection.getpeername()[1]}:
                alive.append(bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)))
    return alive


def connections_of_a_group(rank: int) -> list[bool]:
    topology = epload.Topology.from_nodes([[0], [1]])
    before = os.listdir("/proc/self/fd")
    topology.route(0, "two_level")
    return kept_alive(before)


def test_connections_of_groups_are_kept_alive() -> None:
    for alive in ranks.run(2, connections_of_a_group):
        assert alive
        assert all(alive)


def test_connections_to_a_store_are_kept_alive() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = connect_again(dist.TCPStore("127.0.0.1", host.port, is_master=False))
    alive = kept_alive([], host.port)
    assert len(alive) >= 2
    assert all(alive)
    client.set("key", "value")
    assert host.get("key") == b"value"
