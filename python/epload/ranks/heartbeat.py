"""Heartbeats: that a rank is alive and what it is doing. Ranks tell the leader of their node, which posts one for all of them."""

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
    position: Position
    progress: int
    """Grows as the rank moves data."""
    doing: str

    @classmethod
    def decode(cls, fields: Sequence[object]) -> Heartbeat:
        time, position, progress, doing = fields
        return cls(time, tuple(position), progress, doing)  # type: ignore[arg-type]


class Heartbeats:
    """The heartbeats of all ranks of a control: those of its own node in memory, the others' in one key a node."""

    def __init__(self, store: Callable[[], Store], tree: Tree) -> None:
        """``store``: returns a connection that no wait blocks."""
        self._store = store
        self._tree = tree
        self._near: dict[int, Heartbeat] = {}
        """The last heartbeat of each rank of the node that this rank hears of."""
        self._posted_at = 0.0
        self._posted: Position = (0, 0, 0)

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats of a node."""
        return min(max(1.0, len(self._tree.nodes) / _NODES_PER_SECOND), _MAX_INTERVALS) * INTERVAL

    def beat(self, position: Position, progress: int, doing: str) -> bytes:
        """Returns a heartbeat of this rank, as sent to others of its node."""
        self._near[self._tree.rank] = beat = Heartbeat(time.time(), position, progress, doing[:200])
        return json.dumps(beat).encode()

    def hear(self, rank: int, sent: bytes) -> None:
        """Takes in a heartbeat of another rank of the node."""
        self._near[rank] = Heartbeat.decode(json.loads(sent))

    def forget(self, load: int) -> None:
        """Forgets heartbeats of the node's ranks in loads before this one."""
        self._near = {rank: beat for rank, beat in self._near.items() if beat.position[0] >= load}

    def post(self, position: Position, waits: bool) -> None:
        """Replaces what the store has of this rank's node, or of this rank alone if it does not lead the node.

        Only once in an interval, or when this rank begins to wait (``waits``) in the round at ``position``.
        """
        if not (waits and position != self._posted) and time.monotonic() - self._posted_at < self.interval:
            return
        self._posted_at, self._posted = time.monotonic(), position
        beats = self._near if self._tree.leads else {self._tree.rank: self._near[self._tree.rank]}
        self._store().set(f"heartbeat/{self._tree.rank}", json.dumps(beats))

    def _read(self, poster: int) -> dict[int, Heartbeat]:
        """Returns the heartbeats in the last post of a rank."""
        value = read_if_set(self._store(), f"heartbeat/{poster}") or b"{}"
        return {int(rank): Heartbeat.decode(fields) for rank, fields in json.loads(value).items()}

    def state(self, ranks: Iterable[int], position: Position) -> list[tuple[int, int, float]]:
        """Returns a value that changes as long as any of ``ranks``, or of the nodes that they lead, moves data, or is alive and
        itself waits in the round at ``position``."""
        beats: dict[int, Heartbeat] = {}
        for rank in ranks:
            if rank not in self._tree.node:
                beats |= self._read(rank)
            elif rank in self._near:
                beats[rank] = self._near[rank]
        return [
            (rank, beat.progress, beat.time if beat.position >= position else 0.0)
            for rank, beat in sorted(beats.items())
        ]

    def arrived(self, rank: int, position: Position) -> bool:
        """Returns True if a rank is known to have come to the round at ``position``."""
        posters = {self._tree.node_of[rank][0], rank} if rank not in self._tree.node else ()
        beats = [self._near, *map(self._read, posters)]
        return any(rank in heard and heard[rank].position >= position for heard in beats)

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
        beats |= self._near
        if not beats:
            return ""
        oldest = time.time() - _SILENT_INTERVALS * self.interval
        lines = ["Last known state of each rank:"]
        for rank in sorted(shown):
            state, note = "no heartbeat received", ", silent: not in this call, stopped or unreachable"
            if rank in beats:
                state, note = beats[rank].doing or "not started", ", silent: stopped or unreachable"
            if rank == self._tree.rank:
                state, note = doing, ""
            elif rank in ended:
                note = ", process ended"
            elif not timed_out or (rank in beats and beats[rank].time >= oldest):
                note = ""
            lines.append(f"  rank {rank}: {state}{note}")
        if len(shown) < len(ranks):
            lines.append(f"  and {len(ranks) - len(shown)} more")
        return "\n".join(lines)
