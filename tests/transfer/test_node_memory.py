"""The progress counters and the memory that a node's ranks share: between threads, between processes, between nodes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from epload import HierarchicalLoader, LoadError, Topology
from epload.errors import RemoteFailure
from epload.native import ops
from epload.transfer.shared_memory import STEPS, NodeMemory
from support import ranks
from support.checks import all_fine
from support.memory import mapped_memfds, memfds
from support.small_model import BUCKET, meta_net, state_for, wrong

LONG = 60.0
"""Seconds nobody is to wait."""


def words(slots: int) -> Tensor:
    return torch.zeros(ops.BOARD_FIXED_WORDS + slots, dtype=torch.int32)


def test_reached_behind_and_failed() -> None:
    board = words(4)
    for slot, value in ((0, 3), (1, 5), (2, 2)):
        ops.board_post(board, slot, value)
    for slots, value, outcome in (
        ([0, 1], 3, ops.BOARD_REACHED), ([], 99, ops.BOARD_REACHED), ([1, 0, 2], 4, 0), ([2, 1, 0], 4, 2), ([3], 1, 3)
    ):  # fmt: skip
        assert ops.board_wait(board, slots, value, 0.01) == outcome, "the first that is behind, in the order asked"
    ops.board_post(board, 3, 2**31 - 1)
    assert ops.board_wait(board, [3], 2**31 - 1, 0.0) == ops.BOARD_REACHED
    ops.board_post(board, -1, 1)
    assert ops.board_wait(board, [2], 4, LONG) == ops.BOARD_FAILED
    assert ops.board_wait(board, [0], 3, LONG) == ops.BOARD_REACHED, "what has been reached stays so"


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


def test_progress_counters_say_who_is_behind() -> None:
    shared = torch.zeros(4 * len(words(3 * len(STEPS))) + 16, dtype=torch.uint8)
    counters = {rank: NodeMemory(shared, 0, (4, 2, 9), rank, True) for rank in (4, 2, 9)}
    limit = timedelta(seconds=0.01)
    counters[4].post("read", 2)
    counters[2].post("read", 2)
    counters[9].wait("read", 2, (4, 2), limit)
    with pytest.raises(LoadError, match=r"rank 2 waited .* for rank 9 of its node, which has not read wave 1"):
        counters[2].wait("read", 2, (4, 9), limit)
    for step, participle in list(STEPS.items())[1:]:
        with pytest.raises(LoadError, match=f"rank 9 waited .* for rank 4 .* has not {participle} wave 1"):
            counters[9].wait(step, 2, (4, 2), limit)
    counters[4].restart()
    counters[9].wait("read", 2, (2,), limit)
    with pytest.raises(LoadError, match="rank 4"):
        counters[9].wait("read", 1, (2, 4), limit)
    counters[9].fail()
    for rank in (4, 2, 9):
        with pytest.raises(RemoteFailure, match="another rank failed"):
            counters[rank].wait("unpack", 1, (2,), timedelta(seconds=LONG))


# ---- NodeMemory ----


@contextmanager
def rejected(name: str) -> Iterator[list[str]]:
    """This rank cannot open the memory of other processes, or cannot make memory; notes each try."""
    real, tries = getattr(os, name), list[str]()

    def reject(what: Any, *args: Any, **options: Any) -> Any:
        if name == "open" and not str(what).startswith("/proc/"):
            return real(what, *args, **options)
        tries.append(str(what))
        raise PermissionError(13, "not in this container")

    with mock.patch.object(os, name, reject):
        yield tries


def cannot_share(rank: int, odd: int, what: str) -> list[str]:
    problems = []
    nodes = [[0, 1], [2, 3]]
    state = state_for(1)
    for readers in ("one", "per_node", "partitioned"):
        for algorithm in ("two_level", "striped"):
            loader = HierarchicalLoader(
                Topology.from_nodes(nodes), readers=readers, algorithm=algorithm, bucket_bytes=BUCKET, timeout=30
            )
            model = meta_net()
            if rank == odd:
                with rejected(what) as tries:
                    report = loader.load(model, state)
                if len(tries) != 1:
                    problems.append(f"{readers} {algorithm}: tried {tries}")
            else:
                report = loader.load(model, state)
            assert loader._resources.memory is not None
            if loader._resources.memory.shared or loader._resources.memory.ranks != (rank,):
                problems.append(f"{readers} {algorithm}: {loader._resources.memory.ranks} share")
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
