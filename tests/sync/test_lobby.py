"""Who takes part in a version, where ranks leave and join again."""

from __future__ import annotations

from datetime import timedelta

import pytest

from epload.errors import LoadError, WaitTimeout
from epload.sync.lobby import Attendance, Lobby, Member, Participants
from epload.sync.store import connect, serve
from support.small_syncs import many_waves

LIMIT = timedelta(seconds=20)


def member(rank: int) -> Member:
    return Member.of_process("engine", rank, 2, "node")


def joined(address: tuple[str, int], who: Member) -> Attendance:
    return Attendance(connect(address, LIMIT), connect(address, LIMIT), who, LIMIT)


def nothing() -> None:
    pass


def test_a_member_that_was_replaced_takes_part_no_more() -> None:
    """Also if the one in its place, and with it its engine, is dropped for a while: its rank would not come."""
    with many_waves():
        server = serve(("127.0.0.1", 0))
        address = "127.0.0.1", server.port
        lobby = Lobby(server, expected=2)
        first, second = joined(address, member(0)), joined(address, member(1))
        offer = lobby.offer(1)
        for each in (first, second):
            each.accept_offer(LIMIT)
        assert len(lobby.gather(offer, LIMIT, nothing)) == 2
        lobby.close(offer, Participants(failed="a version that failed"))
        for each in (first, second):
            with pytest.raises(LoadError, match="a version that failed"):
                each.wait_for_participants(offer, LIMIT)

        again, restarted = member(0), member(1)
        first.join(again)
        second.close()
        offer = lobby.offer(2)
        first.accept_offer(LIMIT)
        with pytest.raises(WaitTimeout, match="0 receiving ranks are ready"):
            lobby.gather(offer, timedelta(seconds=1), nothing)
        lobby.close(offer, Participants(failed="nobody was ready"))
        with pytest.raises(LoadError, match="nobody was ready"):
            first.wait_for_participants(offer, LIMIT)

        second = joined(address, restarted)
        offer = lobby.offer(3)
        for each in (first, second):
            each.accept_offer(LIMIT)
        assert lobby.gather(offer, LIMIT, nothing) == (again, restarted)
        for each in (first, second):
            each.close()


def test_a_rank_that_joins_again_does_not_drop_its_engine() -> None:
    with many_waves():
        server = serve(("127.0.0.1", 0))
        lobby = Lobby(server, expected=2)
        ranks = [joined(("127.0.0.1", server.port), member(rank)) for rank in range(2)]
        lobby.close(lobby.offer(1), Participants(failed="a version that failed"))
        again = member(0), member(1)
        offer = lobby.offer(2)
        for each, anew in zip(ranks, again, strict=True):
            each.join(anew)
            with pytest.raises(WaitTimeout):
                lobby.gather(offer, timedelta(seconds=0.5), nothing)
            each.accept_offer(LIMIT)
        assert lobby.gather(offer, LIMIT, nothing) == again
        for each in ranks:
            each.close()
