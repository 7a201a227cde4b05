"""When a node's ranks are told that a wave has arrived."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch

from epload.control.activity import Activity
from epload.errors import RemoteFailure
from epload.planning.schedule import Flow
from epload.planning.waves import Wave
from epload.staging.host_ring import HostRing
from epload.staging.shared_memory import NodeMemory

NODES = ((0,), (1,))
BEFORE = 5
"""Waves that went through the same memory in the transfer before."""


def ring_of(flow: Flow) -> tuple[HostRing, NodeMemory]:
    memory = NodeMemory(torch.zeros(1 << 16, dtype=torch.uint8), 256, flow.sharers, flow.rank, flow.shared)
    for stage in ("read", "relayed", "checked", "unpacked"):
        memory.board.post(stage, BEFORE)
    return HostRing(memory, flow, timedelta(seconds=5), mock.MagicMock(spec=Activity), BEFORE), memory


def wave(index: int) -> Wave:
    return Wave(index, (index,), (0,), (256,))


def announced(memory: NodeMemory) -> int:
    """Waves of this transfer that the node's ranks have been told of."""
    rank = memory.ranks[-1]
    return next(count for count in range(9, -1, -1) if memory.board.reached("relayed", BEFORE + count, [rank]))


@pytest.fixture
def receiving() -> tuple[HostRing, NodeMemory]:
    """Of rank 1, which receives from rank 0."""
    return ring_of(Flow(NODES, 1, 0, "one", "two_level", shared=True))


def test_a_wave_is_announced_with_the_next_one(receiving: tuple[HostRing, NodeMemory]) -> None:
    ring, memory = receiving
    ring.begin_move(wave(0))
    assert ring.announcement() is None, "nothing has arrived"
    ring.moved(wave(0))
    assert announced(memory) == 0
    ring.begin_move(wave(1))
    assert announced(memory) == 0, "the next can begin at once, and its mover announces this one"
    assert ring.announcement() == (memory.board.slot("relayed", 1), BEFORE + 1)
    assert ring.announcement() is None, "once"


def test_a_wave_is_announced_before_the_ring_waits(receiving: tuple[HostRing, NodeMemory]) -> None:
    """Else nobody would unpack it, and its buffer never be free."""
    ring, memory = receiving
    for index in (0, 1):
        ring.begin_move(wave(index))
        ring.announcement()
        ring.moved(wave(index))
    memory.board.fail()  # else it would wait for wave 0 to be unpacked
    with pytest.raises(RemoteFailure):
        ring.begin_move(wave(2))
    assert announced(memory) == 2


def test_the_last_wave_is_announced_at_the_end(receiving: tuple[HostRing, NodeMemory]) -> None:
    ring, memory = receiving
    ring.begin_move(wave(0))
    ring.moved(wave(0))
    ring.end_move()
    assert announced(memory) == 1


def test_a_wave_is_announced_at_once() -> None:
    """If others pass on parts of it too, and wait for this rank's."""
    ring, memory = ring_of(Flow(((0, 1), (2, 3)), 1, 0, "one", "striped", shared=True))
    memory.board.fail()  # rank 0 of the node is not there
    with pytest.raises(RemoteFailure):
        ring.moved(wave(0))
    assert announced(memory) == 1
