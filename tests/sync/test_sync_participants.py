"""Participants of a version, where ranks leave and join again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from unittest.mock import Mock

import pytest

from epload.errors import LoadError, WaitTimeout
from epload.sync.liveness import Participant
from epload.sync.participants import EngineRank, ReceiverRendezvous, SenderRendezvous, Start
from epload.sync.store import connect, serve
from support.small_syncs import many_waves

LIMIT = timedelta(seconds=20)
SOON = timedelta(seconds=0.5)


def joined(port: int, rank: int, engine: str = "engine", size: int = 2) -> ReceiverRendezvous:
    stores = (connect(("127.0.0.1", port), LIMIT) for _ in range(2))
    return ReceiverRendezvous(*stores, EngineRank(engine, rank, size), LIMIT)


@pytest.fixture
def rendezvous() -> Iterator[tuple[SenderRendezvous, int]]:
    with many_waves():
        server = serve(("127.0.0.1", 0), LIMIT)
        yield SenderRendezvous(server.store, expected=2), server.port


def gather(sender: SenderRendezvous, timeout: timedelta = LIMIT) -> tuple[Participant, ...]:
    return sender.gather(1, timeout, lambda: None)


def fail(sender: SenderRendezvous, number: int, *ranks: ReceiverRendezvous) -> None:
    """A version fails, and those that were ready for it join again."""
    sender.start(Start(failed="a version that failed"))
    for rank in ranks:
        with pytest.raises(LoadError, match="a version that failed"):
            rank.versions.wait_for_start(number, LIMIT)
        rank.join_again()


def test_a_rank_that_was_replaced_takes_part_no_more(rendezvous: tuple[SenderRendezvous, int]) -> None:
    """Its engine is not ready until the process in its place is."""
    sender, port = rendezvous
    first, second = joined(port, 0), joined(port, 1)
    sender.announce(1)
    for rank in (first, second):
        rank.get_ready(LIMIT)
    assert gather(sender) == (first.participant, second.participant)
    fail(sender, 1, first, second)

    second.close()
    sender.announce(2)
    first.get_ready(LIMIT)
    with pytest.raises(WaitTimeout, match="0 receiving ranks ready"):
        gather(sender, SOON)
    fail(sender, 2, first)

    restarted = joined(port, 1)
    sender.announce(3)
    for rank in (first, restarted):
        rank.get_ready(LIMIT)
    assert gather(sender) == (first.participant, restarted.participant)
    for rank in (first, restarted):
        rank.close()


def test_an_engine_that_was_silent_is_waited_for_once_it_is_heard(rendezvous: tuple[SenderRendezvous, int]) -> None:
    sender, port = rendezvous
    first, second = (joined(port, 0, engine, 1) for engine in "ab")
    sender.announce(1)
    for rank in (first, second):
        rank.get_ready(LIMIT)
    assert gather(sender) == (first.participant, second.participant)
    fail(sender, 1, first, second)

    beats, second._beats = second._beats, Mock()
    sender.announce(2)
    first.get_ready(LIMIT)
    assert gather(sender) == (first.participant,)
    fail(sender, 2, first)

    second._beats = beats
    time.sleep(1)
    sender.announce(3)
    first.get_ready(LIMIT)
    with pytest.raises(WaitTimeout, match="engine b: 0 of 1 ranks called receive_weights"):
        gather(sender, SOON)
    second.get_ready(LIMIT)
    assert gather(sender) == (first.participant, second.participant)
    for rank in (first, second):
        rank.close()
