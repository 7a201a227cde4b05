"""Heartbeats: each says that a rank is alive and what it is doing. Ranks send theirs to the leader of their node, which posts one
for all of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

from epload.ranks.messages import read_if_set
from epload.ranks.tree import Tree

INTERVAL = 1.0
"""Seconds between two heartbeats of a rank to its leader."""
_NODES_PER_SECOND, _MAX_INTERVALS = 8, 30
"""A leader posts more rarely the more nodes there are, so that all of them post so many in a second; and at least so often."""
_SILENT_INTERVALS = 2.2
"""A rank is silent if its last heartbeat is older than so many intervals of a node."""
_MAX_RANKS = 32
"""Ranks described in one error."""

Position = tuple[int, int, int]
"""A load, an attempt in it, and the round that a rank is in, or was in last."""


class Heartbeat(NamedTuple):
    """The last heartbeat of a rank."""

    time: float
    """Seconds since 1970, on the rank's machine."""
    load: int
    attempt: int
    step: int
    progress: int
    """Grows as the rank moves data."""
    doing: str

    @property
    def position(self) -> Position:
        return self[1:4]


class Heartbeats:
    """The heartbeats of all ranks of a control: those of its own node in memory, the others' in one key a node."""

    def __init__(self, store: Callable[[], Store], tree: Tree) -> None:
        """``store``: returns a connection that no wait blocks."""
        self._store = store
        self._tree = tree
        self.local: dict[int, Heartbeat] = {}
        """The last heartbeat in this load of each rank of the node that this rank receives any from."""
        self._posted_at = 0.0
        self._posted: Position = (0, 0, 0)

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats of a node."""
        return min(max(1.0, len(self._tree.nodes) / _NODES_PER_SECOND), _MAX_INTERVALS) * INTERVAL

    def beat(self, position: Position, progress: int, doing: str) -> bytes:
        """Returns a heartbeat of this rank, as sent to others of its node."""
        self.local[self._tree.rank] = beat = Heartbeat(time.time(), *position, progress, doing[:200])
        return json.dumps(beat).encode()

    def receive(self, rank: int, beat: bytes) -> None:
        """Remembers a heartbeat of another rank of the node."""
        self.local[rank] = Heartbeat(*json.loads(beat))

    def post(self, position: Position, waits: bool) -> None:
        """Replaces what the store has of this rank's node, or of this rank alone if it does not lead the node.

        Only once in an interval, to half a beat, or when this rank begins to wait (``waits``) in the round at ``position``.
        """
        if (not waits or position == self._posted) and time.monotonic() - self._posted_at < self.interval - INTERVAL / 2:
            return
        self._posted_at, self._posted = time.monotonic(), position
        beats = self.local if self._tree.leads else {self._tree.rank: self.local[self._tree.rank]}
        self._store().set(f"heartbeat/{self._tree.rank}", json.dumps(beats))

    def _read(self, poster: int) -> dict[int, Heartbeat]:
        """Returns the heartbeats in the last post of a rank."""
        beats = json.loads(read_if_set(self._store(), f"heartbeat/{poster}") or "{}")
        return {int(rank): Heartbeat(*fields) for rank, fields in beats.items()}

    def state(self, ranks: Iterable[int], position: Position) -> list[tuple[int, int, float]]:
        """Returns a value that changes as long as any of ``ranks``, or of the nodes that they lead, moves data, or is alive and
        itself waits in the round at ``position``."""
        beats: dict[int, Heartbeat] = {}
        for rank in ranks:
            if rank in self.local:
                beats[rank] = self.local[rank]
            elif rank not in self._tree.node:
                beats |= self._read(rank)
        return sorted((rank, beat.progress, beat.time if beat.position >= position else 0.0) for rank, beat in beats.items())

    def last(self, rank: int) -> Heartbeat | None:
        """Returns the last heartbeat of a rank; None if none is known."""
        leader = self._tree.node_of[rank][0]
        reports = [self.local] if rank in self._tree.node else [self._read(poster) for poster in {leader, rank}]
        known = (beats[rank] for beats in reports if rank in beats)
        return max(known, key=lambda beat: beat.position, default=None)

    def arrived(self, rank: int, position: Position) -> bool:
        """Returns True if a rank is known to have come to the round at ``position``."""
        beat = self.last(rank)
        return beat is not None and beat.position >= position

    def describe(self, ranks: Sequence[int], ended: Collection[int], doing: str, timed_out: bool) -> str:
        """Returns the last known state of each rank, for an error message; empty if no rank has posted a heartbeat.

        Args:
            ranks: all ranks.
            ended: ranks whose process has ended.
            doing: this rank's activity.
            timed_out: also says which ranks post no heartbeats any more. Clocks of machines are the same to about a second.
        """
        shown = sorted(ranks, key=lambda rank: (rank not in ended, rank))[:_MAX_RANKS]
        beats: dict[int, Heartbeat] = {}
        for leader in {self._tree.node_of[rank][0] for rank in shown}:
            beats |= self._read(leader)
        beats |= self.local
        if not beats:
            return ""
        oldest = time.time() - _SILENT_INTERVALS * self.interval
        lines = ["Last known state of each rank:"]
        for rank in sorted(shown):
            beat, note = beats.get(rank), ""
            state = "no heartbeat received" if beat is None else beat.doing or "not started"
            if rank == self._tree.rank:
                state = doing
            elif rank in ended:
                note = ", process ended"
            elif timed_out and beat is None:
                note = ", silent: not in this call, stopped or unreachable"
            elif timed_out and beat is not None and beat.time < oldest:
                note = ", silent: stopped or unreachable"
            lines.append(f"  rank {rank}: {state}{note}")
        if len(shown) < len(ranks):
            lines.append(f"  and {len(ranks) - len(shown)} more")
        return "\n".join(lines)
