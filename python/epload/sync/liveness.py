"""Tells which receivers are alive: each puts beats into the store, at which the sender's first rank looks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

from epload.core.log import logger

LEASE_SECONDS = 10.0
"""A receiver that has been silent for so long is dropped."""
LEFT = b"left"
"""The last beat of a receiver that leaves."""


class Participant(NamedTuple):
    """A receiving rank."""

    engine: str
    """Equal on the ranks that commit together."""
    rank: int
    """Among the engine's."""
    size: int
    """Ranks of the engine."""
    process: str
    """Process id and host, as messages show them."""
    number: int
    """Unique among the receivers of a sender."""
    joined: int = 0
    """Grows each time that it has left a generation, of which it then knows nothing any more."""

    def __str__(self) -> str:
        return f"rank {self.rank} of engine {self.engine} ({self.process})"


class Liveness:
    """The receivers that have left or are silent. Those that are silent are looked at until they are heard again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._beats: dict[int, tuple[bytes, float]] = {}
        """Last beat of each receiver, and the time at which it was first seen."""
        self._overdue: set[int] = set()
        """The receivers whose beats were overdue at the last look. It takes two to call one silent: a store that has answered no
        one for a while may answer this process first."""
        self.lost: dict[int, Participant | None] = {}
        """The receivers that are silent, by number; None for those that have left."""

    def look(self, participants: Iterable[Participant], now: float) -> list[Participant]:
        """Looks at the beats of receivers. Returns those that were silent and are heard again.

        Args:
            now: value of ``time.monotonic()``.
        """
        by_number = {number: participant for number, participant in self.lost.items() if participant is not None}
        by_number |= {participant.number: participant for participant in participants}
        beats = self._store.multi_get([f"alive/{number}" for number in by_number]) if by_number else []
        heard = []
        for (number, participant), beat in zip(by_number.items(), beats, strict=True):
            if number not in self._beats or self._beats[number][0] != beat:
                self._beats[number] = beat, now
                self._overdue.discard(number)
            is_overdue = now - self._beats[number][1] >= LEASE_SECONDS
            is_silent = is_overdue and number in self._overdue
            if is_overdue:
                self._overdue.add(number)
            if beat == LEFT or is_silent:
                if number not in self.lost:
                    logger.warning("engine %s takes part no more: %s has left or is silent", participant.engine, participant)
                self.lost[number] = None if beat == LEFT else participant
            elif number in self.lost:
                logger.warning("engine %s takes part again: %s is heard", participant.engine, participant)
                del self.lost[number]
                heard.append(participant)
        return heard
