"""Heartbeats: each rank's watch posts that the rank is alive and what it is doing; ranks that wait for it read them."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

INTERVAL = 1.0
"""Seconds between two heartbeats."""
_MAX_RANKS = 32
"""Ranks described in one error."""


class Heartbeat(NamedTuple):
    """The last heartbeat of a rank."""

    number: int
    """Counts the rank's heartbeats."""
    round: int
    """The agreement round that the rank is in, or was in last."""
    progress: int
    """Grows as the rank moves data."""
    doing: str


class Heartbeats:
    """The heartbeats of all ranks of a control, one key of the store per rank."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._count = 0

    def post(self, round_: int, progress: int, doing: str) -> None:
        """Replaces this rank's heartbeat."""
        self._count += 1
        self._store.set(f"heartbeat/{self._rank}", json.dumps(Heartbeat(self._count, round_, progress, doing)))

    def read(self, ranks: Sequence[int]) -> dict[int, Heartbeat]:
        """The last heartbeat of each of ``ranks`` that has posted one."""
        keys = {rank: f"heartbeat/{rank}" for rank in ranks}
        return {
            rank: Heartbeat(*json.loads(self._store.get(key))) for rank, key in keys.items() if self._store.check([key])
        }

    def progress(self, ranks: Sequence[int], round_: int) -> list[tuple[int, int, int]]:
        """A value that changes as long as any of ``ranks`` moves data, or is alive and itself waits in round ``round_``."""
        beats = self.read(ranks)
        return [
            (rank, beat.progress, beat.number if beat.round >= round_ else -1) for rank, beat in sorted(beats.items())
        ]

    def describe(self, ranks: Sequence[int], ended: Collection[int], doing: str, find_silent: bool) -> str:
        """The last known state of each rank, for an error message; empty if no rank has posted a heartbeat.

        Args:
            ended: ranks whose process has ended.
            doing: this rank's activity.
            find_silent: also says which ranks post no heartbeats any more; takes two intervals.
        """
        last: dict[int, Heartbeat] = self.read(ranks)
        if not last:
            return ""
        silent: set[int] = set()
        if find_silent:
            time.sleep(2.2 * INTERVAL)
            now = self.read(ranks)
            silent = {rank for rank, beat in now.items() if rank in last and last[rank].number == beat.number}
            silent -= {*ended, self._rank}
            last |= now
        last[self._rank] = Heartbeat(0, 0, 0, doing)
        return _describe(ranks, last, set(ended), silent)


def _describe(ranks: Sequence[int], last: Mapping[int, Heartbeat], ended: set[int], silent: set[int]) -> str:
    """Ranks that have ended or are silent come first where not all can be shown."""
    first = [*sorted(ended & set(ranks)), *sorted(silent)]
    shown = [*first, *(rank for rank in ranks if rank not in first)][:_MAX_RANKS]
    lines = ["Last known state of each rank:"]
    for rank in sorted(shown):
        beat = last.get(rank)
        state = (beat.doing or "not started") if beat else "no heartbeat received"
        note = ", process ended" if rank in ended else ", silent: stopped or unreachable" if rank in silent else ""
        lines.append(f"  rank {rank}: {state}{note}")
    if len(shown) < len(ranks):
        lines.append(f"  and {len(ranks) - len(shown)} more")
    return "\n".join(lines)
