"""The rounds of several nodes, in threads over one store."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from epload.ranks.control import Control
from epload.ranks.tree import FAN_OUT

MANY = [[rank] for rank in range(FAN_OUT + 3)]
"""More nodes than one leader has children."""


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
    ranks = tuple(rank for node in nodes for rank in node)
    results: dict[int, Any] = {}

    def one(rank: int) -> None:
        try:
            control = Control(dist.TCPStore("127.0.0.1", server.port, is_master=False), ranks, rank)
            control.timeout = timedelta(minutes=1)
            control.join_nodes(nodes, f"test-{server.port}")
            results[rank] = sums_of_ranks(control)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert results == dict.fromkeys(ranks, [sum(ranks)] * 6)
