"""The rounds of several nodes, in threads over one store."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from control_bed import CountingStore
from epload.errors import LoadError
from epload.ranks.control import Control
from epload.ranks.tree import FAN_OUT


def run(nodes: list[list[int]], action: Callable[[Control], Any]) -> tuple[dict[int, Any], dict[int, Counter[str]]]:
    """``action`` on every rank, a thread each; its results or errors, and what each rank asked of the store meanwhile."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = tuple(rank for node in nodes for rank in node)
    results: dict[int, Any] = {}
    counts: dict[int, Counter[str]] = {}

    def one(rank: int) -> None:
        try:
            counts[rank] = Counter()
            store: Any = CountingStore(dist.TCPStore("127.0.0.1", server.port, is_master=False), counts[rank])
            control = Control(store, ranks, rank)
            control.timeout = timedelta(minutes=1)
            control.join_nodes(nodes, f"test-{server.port}")
            control.agree("all are here", None)
            counts[rank].clear()
            results[rank] = action(control)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results, counts


THREE = [[0, 3], [1], [2, 4, 5]]


def sum_of_ranks(control: Control) -> list[int]:
    found = []
    for number in range(3):
        control.begin(timedelta(minutes=1))
        with control.guard():
            for turn in range(2):
                found.append(
                    control.agree("turn", None, control.rank, lambda views: sum(views.values()), last=turn == 1)
                )
        assert number < 3
    return found


def test_rounds_of_several_nodes() -> None:
    results, counts = run(THREE, sum_of_ranks)
    assert results == dict.fromkeys(range(6), [15] * 6)
    members = [sum(counts[rank].values()) for rank in (3, 4, 5)]
    assert members == [0, 0, 0], "only leaders use the store"


def test_more_nodes_than_one_leader_has_children() -> None:
    nodes = [[rank] for rank in range(FAN_OUT + 3)]
    results, counts = run(nodes, sum_of_ranks)
    expected = sum(range(FAN_OUT + 3))
    assert results == dict.fromkeys(range(FAN_OUT + 3), [expected] * 6)
    most = {rank: sum(count for kind, count in counts[rank].items() if kind != "bytes") for rank in counts}
    assert max(most.values()) < 3 * 40, most


def absent(control: Control, ranks: tuple[int, ...], ended: threading.Barrier) -> tuple[str, float]:
    """``ended``: where the absent ranks wait for the others, their links open."""
    control.begin(timedelta(seconds=2))
    began = time.monotonic()
    result = "", 0.0
    if control.rank not in ranks:
        with pytest.raises(LoadError) as raised, control.guard():
            control.agree("the step", None)
        result = str(raised.value), time.monotonic() - began
    ended.wait(30)
    return result


@pytest.mark.parametrize(
    ("ranks", "named"),
    [((5,), "rank 5 did"), ((2,), "rank 2 did"), ((1,), "rank 1 did"), ((2, 4, 5), "ranks 2, 4, 5 did")],
    ids=["member", "leader", "alone", "node"],
)
def test_ranks_that_do_not_come_are_named(ranks: tuple[int, ...], named: str) -> None:
    ended = threading.Barrier(6)
    results, _ = run(THREE, lambda control: absent(control, ranks, ended))
    texts = {text for rank, (text, _) in results.items() if rank not in ranks}
    assert len(texts) == 1, results
    assert f"the step: {named} not arrive within 2 s" in texts.pop()
    assert max(seconds for rank, (_, seconds) in results.items() if rank not in ranks) < 10
