"""Counters in shared memory, by which the ranks of a node, and their threads, know how far the others are."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from time import monotonic

from torch import Tensor

from epload.errors import RemoteFailure, WaitTimeout
from epload.native import ops

STEPS = {"read": "read", "move": "relayed", "check": "checked", "verify": "verified", "unpack": "unpacked"}
"""Steps that each rank takes with a wave, each with its participle for messages."""
_SLICE = 1.0
"""Seconds after which a wait returns to the interpreter, so that an interrupt is handled."""


class ProgressCounters:
    """Counts the waves that each rank of a node has finished in each step. Threads and processes can share it."""

    def __init__(self, words: Tensor, ranks: Sequence[int], rank: int) -> None:
        """``words``: int32, zeros."""
        self.words = words
        self._ranks = list(ranks)
        self._rank = rank

    @staticmethod
    def size(ranks: int) -> int:
        """Returns the words that the counters of so many ranks take."""
        return ops.BOARD_FIXED_WORDS + ranks * len(STEPS)

    def clear(self) -> None:
        """Sets this rank back to the start of a load; all do it before any of them goes on."""
        for step in STEPS:
            self.post(step, 0)

    def _slot(self, step: str, rank: int) -> int:
        return self._ranks.index(rank) * len(STEPS) + list(STEPS).index(step)

    def post(self, step: str, waves: int) -> None:
        """Says that this rank has finished ``step`` of so many waves."""
        ops.board_post(self.words, self._slot(step, self._rank), waves)

    def fail(self) -> None:
        """Wakes all that wait, now and later: this rank cannot go on."""
        ops.board_post(self.words, -1, 1)

    def wait(self, step: str, waves: int, ranks: Sequence[int], limit: timedelta) -> None:
        """Returns when each of ``ranks`` has finished ``step`` of so many waves.

        Raises:
            WaitTimeout: it took longer than ``limit``.
            RemoteFailure: a rank of the node has failed.
        """
        slots = [self._slot(step, rank) for rank in ranks]
        until = monotonic() + limit.total_seconds()
        while True:
            seconds = until - monotonic()
            slot = ops.board_wait(self.words, slots, waves, max(0.0, min(_SLICE, seconds)))
            if slot == ops.BOARD_REACHED:
                return
            if slot == ops.BOARD_FAILED:
                raise RemoteFailure("another rank failed")
            if seconds <= 0:
                raise WaitTimeout(
                    f"rank {self._rank} waited {limit.total_seconds():.0f} s for rank {self._ranks[slot // len(STEPS)]} of its "
                    f"node, which has not {STEPS[step]} wave {waves - 1}"
                )
