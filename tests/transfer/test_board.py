"""The board and the memory that a node's ranks share: between threads, between processes, between nodes."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from epload import HierarchicalLoader, LoadError, Topology
from epload.errors import RemoteFailure
from epload.native import ops
from epload.transfer.board import STAGES, Board
from support import ranks
from support.checks import all_fine
from support.small_model import BUCKET, meta_net, state_for, wrong

LONG = 60.0
"""Seconds nobody is to wait."""


def words(slots: int) -> Tensor:
    return torch.zeros(ops.BOARD_FIXED_WORDS + slots, dtype=torch.int32)


# ---- the ops ----


def test_reached_and_behind() -> None:
    board = words(4)
    for slot, value in ((0, 3), (1, 5), (2, 2)):
        ops.board_post(board, slot, value)
    assert ops.board_wait(board, [0, 1], 3, 0.0) == ops.BOARD_REACHED
    assert ops.board_wait(board, [], 99, 0.0) == ops.BOARD_REACHED
    assert ops.board_wait(board, [1, 0, 2], 4, 0.01) == 0, "the first that is behind, in the order asked"
    assert ops.board_wait(board, [2, 1, 0], 4, 0.0) == 2
    assert ops.board_wait(board, [3], 1, 0.0) == 3
    ops.board_post(board, 3, -(2**31))
    assert ops.board_wait(board, [3], 0, 0.0) == 3
    ops.board_post(board, 3, 2**31 - 1)
    assert ops.board_wait(board, [3], 2**31 - 1, 0.0) == ops.BOARD_REACHED


def test_failure_is_seen_by_those_who_would_wait() -> None:
    board = words(2)
    ops.board_post(board, 0, 1)
    ops.board_post(board, -1, 1)
    assert ops.board_wait(board, [1], 1, LONG) == ops.BOARD_FAILED
    assert ops.board_wait(board, [0], 1, LONG) == ops.BOARD_REACHED, "what has been reached stays so"


def test_wrong_arguments() -> None:
    board = words(2)
    for slot in (2, -2, 2**40):
        with pytest.raises(ValueError, match="slot"):
            ops.board_post(board, slot, 1)
    for slots in ([2], [0, -1], [0, 2**40]):
        with pytest.raises(ValueError, match="slot"):
            ops.board_wait(board, slots, 0, 0.0)
    for value in (2**31, -(2**31) - 1):
        with pytest.raises(ValueError, match="int32"):
            ops.board_post(board, 0, value)
    for seconds in (-1.0, float("nan"), float("inf"), 1e9):
        with pytest.raises(ValueError, match="seconds"):
            ops.board_wait(board, [0], 1, seconds)
    wrong_boards = [
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(4),
        torch.zeros(2, 2, dtype=torch.int32),
        words(9)[::2],
    ]
    for bad in wrong_boards:
        with pytest.raises(ValueError, match="int32"):
            ops.board_post(bad, 0, 1)
        with pytest.raises(ValueError, match="int32"):
            ops.board_wait(bad, [0], 1, 0.0)
    assert not board.any()


# ---- threads ----


@pytest.mark.parametrize("slot", [0, 31, 99])
def test_a_post_wakes_those_who_wait_for_it(slot: int) -> None:
    """Whichever slots others wait for, and though they all sleep on one word."""
    board, got = words(100), {}

    def wait(mine: int) -> None:
        got[mine] = ops.board_wait(board, [mine], 1, LONG)

    others = [other for other in range(100) if other != slot][::9]
    waiters = {mine: threading.Thread(target=wait, args=(mine,)) for mine in (slot, *others)}
    for waiter in waiters.values():
        waiter.start()
    time.sleep(0.1)
    ops.board_post(board, slot, 1)
    waiters[slot].join(LONG / 4)
    assert got == {slot: ops.BOARD_REACHED}
    ops.board_post(board, -1, 1)
    for waiter in waiters.values():
        waiter.join(LONG / 4)
    assert got == {slot: ops.BOARD_REACHED, **dict.fromkeys(others, ops.BOARD_FAILED)}


# ---- processes ----


# ---- Board ----


def test_a_board_says_who_is_behind() -> None:
    shared = torch.zeros(Board.size(3), dtype=torch.int32)
    boards = {rank: Board(shared, (4, 2, 9), rank) for rank in (4, 2, 9)}
    limit = timedelta(seconds=0.01)
    boards[4].post("read", 2)
    boards[2].post("read", 2)
    boards[9].wait("read", 2, (4, 2), limit)
    with pytest.raises(LoadError, match=r"rank 2 waited .* for rank 9 of its node, which has not read wave 1"):
        boards[2].wait("read", 2, (4, 9), limit)
    for stage in STAGES[1:]:
        with pytest.raises(LoadError, match=f"rank 9 waited .* for rank 4 of its node, which has not {stage} wave 1"):
            boards[9].wait(stage, 2, (4, 2), limit)
    boards[4].clear()
    boards[9].wait("read", 2, (2,), limit)
    with pytest.raises(LoadError, match="rank 4"):
        boards[9].wait("read", 1, (2, 4), limit)
    boards[9].fail()
    for rank in (4, 2, 9):
        with pytest.raises(RemoteFailure, match="another rank failed"):
            boards[rank].wait("unpacked", 1, (2,), timedelta(seconds=LONG))


# ---- NodeMemory ----


def mapped_memfds() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:epload" in line for line in maps)


def open_memfds() -> int:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return sum("memfd:epload" in name for name in names)


class Refused:
    """One rank cannot open the memory of other processes, or cannot make memory."""

    def __init__(self, name: str) -> None:
        self._name, self._real = name, getattr(os, name)
        self._patch = mock.patch.object(os, name, self._refuse)
        self.calls = 0

    def _refuse(self, *args: Any, **options: Any) -> Any:
        if self._name == "open" and not str(args[0]).startswith("/proc/"):
            return self._real(*args, **options)
        self.calls += 1
        raise PermissionError(13, "not in this container")

    def __enter__(self) -> Refused:
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


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
                with Refused(what) as refused:
                    report = loader.load(model, state)
                if refused.calls != 1:
                    problems.append(f"{readers} {algorithm}: asked {refused.calls} times")
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
            if mapped_memfds() or open_memfds():
                problems.append(f"{readers} {algorithm}: left {mapped_memfds()} mappings, {open_memfds()} descriptors")
    return problems


@pytest.mark.parametrize(("odd", "what"), [(3, "open"), (2, "memfd_create")])
def test_where_one_rank_cannot_share_all_have_their_own(odd: int, what: str) -> None:
    all_fine(ranks.run(4, cannot_share, odd, what))
