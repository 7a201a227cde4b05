"""The board on which the ranks of a node, and their threads, tell each other how far they are: counters in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from time import monotonic

from torch import Tensor

from epload.errors import RemoteFailure, WaitTimeout
from epload.native import ops

STAGES = ("read", "relayed", "checked", "verified", "unpacked")
_SLICE = 1.0
"""Seconds after which a wait returns to the interpreter, so that an interrupt is handled."""


class Board:
    """Counts the waves that each rank of a node has finished in each stage. Threads and processes can share it."""

    def __init__(self, words: Tensor, ranks: Sequence[int], rank: int) -> None:
        """``words``: int32, zeros."""
        self.words = words
        self._ranks = list(ranks)
        self._me = self._ranks.index(rank)

    @staticmethod
    def size(ranks: int) -> int:
        """Returns the words that a board for so many ranks takes."""
        return ops.BOARD_FIXED_WORDS + ranks * len(STAGES)

    def clear(self) -> None:
        """Sets this rank back to the start of a load; all do it before any of them goes on."""
        for stage in STAGES:
            self.post(stage, 0)

    def _slot(self, stage: str, rank: int) -> int:
        return self._ranks.index(rank) * len(STAGES) + STAGES.index(stage)

    def post(self, stage: str, waves: int) -> None:
        """Says that this rank has finished ``stage`` of so many waves."""
        ops.board_post(self.words, self._slot(stage, self._ranks[self._me]), waves)

    def fail(self) -> None:
        """Wakes all that wait, now and later: this rank cannot go on."""
        ops.board_post(self.words, -1, 1)

    def wait(self, stage: str, waves: int, ranks: Sequence[int], limit: timedelta) -> None:
        """Returns when each of ``ranks`` has finished ``stage`` of so many waves.

        Raises:
            WaitTimeout: it took longer than ``limit``.
            RemoteFailure: a rank failed, and the node has been told.
        """
        slots = [self._slot(stage, rank) for rank in ranks]
        until = monotonic() + limit.total_seconds()
        behind = 0
        while behind not in (ops.BOARD_REACHED, ops.BOARD_FAILED):
            left = until - monotonic()
            behind = ops.board_wait(self.words, slots, waves, max(0.0, min(_SLICE, left)))
            if left <= 0:
                break
        if behind == ops.BOARD_FAILED:
            raise RemoteFailure("another rank failed")
        if behind != ops.BOARD_REACHED:
            rank = self._ranks[behind // len(STAGES)]
            raise WaitTimeout(
                f"rank {self._ranks[self._me]} waited {limit.total_seconds():.0f} s for rank {rank} of its node, which has "
                f"not {stage} wave {waves - 1}"
            )
