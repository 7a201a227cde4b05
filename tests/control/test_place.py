"""The connections of ranks to the store, and what leaders ask of it while nothing happens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from bench_control import idle, start, sum_operations
from control_bed import Bed, Cluster
from epload.control.heartbeat import Heartbeats
from epload.control.node_connection import FreeStore
from epload.control.tree import Tree
from epload.control.waiter import Alarm, Waiter

SECONDS = 20.0


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=2 * SECONDS))


def returns(call: Callable[[], object]) -> bool:
    """Whether a call returns in time."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return not thread.is_alive()


def ask_everything(store: FreeStore, prefix: str) -> None:
    store.set(f"{prefix}/key", "1")
    assert store.check([f"{prefix}/key"])
    assert store.get(f"{prefix}/key") == b"1"
    assert store.add(f"{prefix}/count", 2) == 2
    assert store.compare_set(f"{prefix}/key", "1", "2") == b"2"


def test_no_wait_of_a_round_blocks(server: TCPStore) -> None:
    alarm = Alarm()
    waiter = Waiter(server.clone(), alarm)
    free = FreeStore(server, waiter)
    waiter.start()
    wait = waiter.wait_for(["outcome"])
    assert returns(lambda: ask_everything(free, "during"))
    assert not wait.done
    free.set("outcome", "x")
    waiter.stop()
    assert wait.result() == [b"x"]
    assert returns(lambda: ask_everything(free, "after"))


def test_no_group_that_is_being_made_blocks(server: TCPStore) -> None:
    """The job's connection waits for a key that another rank sets."""
    making = threading.Thread(target=lambda: server.get("address"), daemon=True)
    making.start()
    free = FreeStore(server, Waiter(server.clone(), Alarm()))
    assert returns(lambda: ask_everything(free, "during"))
    assert making.is_alive()
    free.set("address", "x")
    making.join(SECONDS)
    assert not making.is_alive()


def test_ranks_hear_of_a_failure_from_their_leader() -> None:
    """When a rank of the last node is killed, ranks of other nodes that lead none neither connect to the store nor ask it."""
    bed = Bed(ranks=9, per_node=3, processes=4)
    with Cluster(bed) as cluster:
        start(cluster)
        before = cluster.server.connections()
        samples, _, _ = cluster.run(idle, SECONDS, kill_after=1.0)
        witnesses = len(bed.nodes[-1]) - 1
        assert cluster.server.connections() - (before - 1) <= witnesses
    texts = {sample.error for sample in samples}
    assert len(texts) == 1
    assert f"rank {bed.victim} has exited" in texts.pop()
    asked = {rank: sum_operations(samples[rank].operations) for node in bed.nodes[:-1] for rank in node[1:]}
    assert asked == dict.fromkeys(asked, 0)


@pytest.mark.parametrize("nodes", [64, 128, 2048])
def test_leaders_ask_little_while_nothing_happens(nodes: int) -> None:
    """A post and a look for failures each interval, per rank in nodes of 8; a failure is seen within 2 s."""
    heartbeats = Heartbeats(lambda: pytest.fail("asked"), Tree.of([range(8 * n, 8 * n + 8) for n in range(nodes)], 0))
    assert (1 / heartbeats.interval + 1 / heartbeats.look_interval) / 8 <= 0.15
    assert heartbeats.look_interval <= 1.5
