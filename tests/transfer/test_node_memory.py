"""The progress counters and the memory that a node's ranks share: between threads, between processes, between nodes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from epload import HierarchicalLoader, Topology
from epload.native import ops
from support import ranks
from support.checks import all_fine
from support.memory import mapped_memfds, memfds
from support.small_model import BUCKET, NODES, meta_net, state_for, wrong

LONG = 60.0
"""Seconds nobody is to wait."""


def words(slots: int) -> Tensor:
    return torch.zeros(ops.BOARD_FIXED_WORDS + slots, dtype=torch.int32)


def test_wrong_arguments() -> None:
    board = words(2)
    calls = [("slot", ops.board_post, (board, slot, 1)) for slot in (2, -2, 2**40)]
    calls += [("int32", ops.board_post, (board, 0, value)) for value in (2**31, -(2**31) - 1)]
    calls += [("slot", ops.board_wait, (board, slots, 0, 0.0)) for slots in ([2], [0, -1], [0, 2**40])]
    calls += [("seconds", ops.board_wait, (board, [0], 1, s)) for s in (-1.0, float("nan"), float("inf"), 1e9)]
    for bad in (words(-1), torch.zeros(4), torch.zeros(2, 2, dtype=torch.int32), words(9)[::2]):
        text = "words" if bad.dtype is torch.int32 else "int32"
        calls += [(text, ops.board_post, (bad, 0, 1)), (text, ops.board_wait, (bad, [0], 1, 0.0))]
    for text, op, arguments in calls:
        with pytest.raises(ValueError, match=text):
            op(*arguments)
    assert not board.any()


@pytest.mark.parametrize("slot", [0, 31, 99])
def test_a_post_wakes_those_who_wait_for_it(slot: int) -> None:
    """Whichever slots others wait for, and though they all sleep on one word."""
    board, outcomes = words(100), {}

    def wait(own: int) -> None:
        outcomes[own] = ops.board_wait(board, [own], 1, LONG)

    others = [other for other in range(100) if other != slot][::9]
    waiters = {own: threading.Thread(target=wait, args=(own,)) for own in (slot, *others)}
    for waiter in waiters.values():
        waiter.start()
    time.sleep(0.1)
    ops.board_post(board, slot, 1)
    waiters[slot].join(LONG / 4)
    assert outcomes == {slot: ops.BOARD_REACHED}
    ops.board_post(board, -1, 1)
    for waiter in waiters.values():
        waiter.join(LONG / 4)
    assert outcomes == {slot: ops.BOARD_REACHED, **dict.fromkeys(others, ops.BOARD_FAILED)}


@contextmanager
def rejected(name: str) -> Iterator[None]:
    """This rank cannot open the memory of other processes, or cannot make memory."""
    real = getattr(os, name)

    def reject(what: Any, *args: Any, **options: Any) -> Any:
        if name == "open" and not str(what).startswith("/proc/"):
            return real(what, *args, **options)
        raise PermissionError(13, "not in this container")

    with mock.patch.object(os, name, reject):
        yield


def cannot_share(rank: int, odd: int, what: str) -> list[str]:
    problems, state = [], state_for(1)
    for readers in ("one", "per_node", "partitioned"):
        for algorithm in ("two_level", "striped"):
            options: dict[str, Any] = {"algorithm": algorithm, "bucket_bytes": BUCKET, "timeout": 30}
            loader = HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, **options)
            model = meta_net()
            with rejected(what) if rank == odd else nullcontext():
                report = loader.load(model, state)
            if report.algorithm != "two_level":
                problems.append(f"{readers} {algorithm}: reports {report.algorithm}")
            problems += [f"{readers} {algorithm}: {text}" for text in wrong(model, state)]
            loader.load(model, state_for(2))
            problems += [f"{readers} {algorithm}, again: {text}" for text in wrong(model, state_for(2))]
            if left := mapped_memfds() + memfds():
                problems.append(f"{readers} {algorithm}: left {left}")
    return problems


@pytest.mark.parametrize(("odd", "what"), [(3, "open"), (2, "memfd_create")])
def test_where_one_rank_cannot_share_all_have_their_own(odd: int, what: str) -> None:
    all_fine(ranks.run(4, cannot_share, odd, what))
