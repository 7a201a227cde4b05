"""Who takes part in a version, where ranks leave and join again."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from epload.errors import LoadError, WaitTimeout
from epload.sync.lobby import Attendance, Lobby, Member, Participants
from epload.sync.store import connect, serve
from support.small_syncs import many_waves

LIMIT = timedelta(seconds=20)
SOON = timedelta(seconds=0.5)


def joined(port: int, rank: int) -> Attendance:
    stores = (connect(("127.0.0.1", port), LIMIT) for _ in range(2))
    return Attendance(*stores, "engine", rank, 2, "node", LIMIT)


@pytest.fixture
def lobby() -> Iterator[tuple[Lobby, int]]:
    with many_waves():
        server = serve(("127.0.0.1", 0))
        yield Lobby(server, expected=2), server.port


def gather(lobby: Lobby, timeout: timedelta = LIMIT) -> tuple[Member, ...]:
    return lobby.gather(1, timeout, lambda: None)


def fail(lobby: Lobby, number: int, *ranks: Attendance) -> None:
    """A version fails, and those that were ready for it join again."""
    lobby.close(Participants(failed="a version that failed"))
    for rank in ranks:
        with pytest.raises(LoadError, match="a version that failed"):
            rank.wait_for_participants(number, LIMIT)
        rank.join_again()


def test_a_rank_that_was_replaced_takes_part_no_more(lobby: tuple[Lobby, int]) -> None:
    """Its engine is not ready until the process in its place is."""
    sender, port = lobby
    first, second = joined(port, 0), joined(port, 1)
    sender.offer(1)
    for rank in (first, second):
        rank.accept_offer(LIMIT)
    assert gather(sender) == (first.member, second.member)
    fail(sender, 1, first, second)

    second.close()
    sender.offer(2)
    first.accept_offer(LIMIT)
    with pytest.raises(WaitTimeout, match="0 receiving ranks are ready"):
        gather(sender, SOON)
    fail(sender, 2, first)

    restarted = joined(port, 1)
    sender.offer(3)
    for rank in (first, restarted):
        rank.accept_offer(LIMIT)
    assert gather(sender) == (first.member, restarted.member)
    for rank in (first, restarted):
        rank.close()


def test_a_rank_that_joins_again_does_not_drop_its_engine(lobby: tuple[Lobby, int]) -> None:
    sender, port = lobby
    ranks = [joined(port, rank) for rank in range(2)]
    sender.offer(1)
    fail(sender, 1, *ranks)
    sender.offer(2)
    for rank in ranks:
        with pytest.raises(WaitTimeout):
            gather(sender, SOON)
        rank.accept_offer(LIMIT)
    assert gather(sender) == tuple(rank.member for rank in ranks)
    for rank in ranks:
        rank.close()
