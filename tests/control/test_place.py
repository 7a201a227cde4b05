"""The connections of ranks to the store, and what leaders ask of it while nothing happens."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from bench_control import check, idle, loads, start, sum_operations
from control_bed import FIRST_ROUNDS, RELOAD_ROUNDS, Bed, Cluster
from costs import StoreRates, agreement
from epload.control.heartbeat import Heartbeats
from epload.control.node_connection import FreeStore
from epload.control.tree import Tree
from epload.control.waiter import Alarm, Waiter
from store_replay import replay

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


def test_one_connection_per_node_besides_one_per_rank() -> None:
    """And operations as the cost function counts them: of a leader, of its parent, and of the coordinator."""
    bed = Bed(ranks=6, per_node=3, processes=2)
    with Cluster(bed) as cluster:
        start(cluster)
        assert cluster.server.connections() == bed.ranks + len(bed.nodes)
        samples, _, _ = cluster.run(loads, 3, RELOAD_ROUNDS)
    check(samples)
    counts = sum((sample.operations for sample in samples), Counter[str]())
    # How often ranks post and look depends on the time.
    asked = {kind: count for kind, count in counts.items() if kind not in ("bytes", "set", "check")}
    assert asked == {"compare_set": 6, "multi_get": 6 * (2 + 2), "delete": 6 * 2}


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


@pytest.mark.parametrize("nodes", [1, 2, 35])
def test_the_replay_asks_what_the_cost_function_counts(nodes: int) -> None:
    operations, _ = replay(nodes, FIRST_ROUNDS)
    assert operations == agreement(nodes, 8 * nodes, FIRST_ROUNDS, StoreRates()).operations


@pytest.mark.parametrize("nodes", [64, 128, 2048])
def test_leaders_ask_little_while_nothing_happens(nodes: int) -> None:
    """A post and a look for failures each interval, per rank in nodes of 8; a failure is seen within 2 s."""
    heartbeats = Heartbeats(lambda: pytest.fail("asked"), Tree.of([range(8 * n, 8 * n + 8) for n in range(nodes)], 0))
    assert (1 / heartbeats.interval + 1 / heartbeats.look_interval) / 8 <= 0.15
    assert heartbeats.look_interval <= 1.5
