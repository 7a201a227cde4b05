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
_MAX_SILENCE_SECONDS = 10.0
"""Maximum seconds that an error waits to find out which ranks are silent."""
_MAX_RANKS = 32
"""Ranks described in one error."""

Position = tuple[int, int, int]
"""A load, an attempt in it, and the round that a rank is in, or was in last."""


class Heartbeat(NamedTuple):
    """The last heartbeat of a rank."""

    number: int
    """Counts the rank's heartbeats."""
    position: Position
    progress: int
    """Grows as the rank moves data."""
    doing: str
    age: float
    """Seconds since it arrived."""


class Heartbeats:
    """The heartbeats of all ranks of a control: those of its own node in memory, the others' in one key a node."""

    def __init__(self, store: Callable[[], Store], tree: Tree) -> None:
        """``store``: returns a connection that no wait blocks."""
        self._store = store
        self._tree = tree
        self._count = self._posts = 0
        self._arrived: dict[int, tuple[float, Heartbeat]] = {}
        """The last heartbeat of each rank of the node that this rank hears of, and when it came."""
        self._posted_at = 0.0
        self._posted: Position = (0, 0, 0)

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats of a node."""
        return min(max(1.0, len(self._tree.nodes) / _NODES_PER_SECOND), _MAX_INTERVALS) * INTERVAL

    def beat(self, position: Position, progress: int, doing: str) -> bytes:
        """Counts a heartbeat of this rank; returns it as sent to others of its node."""
        self._count += 1
        sent = json.dumps([self._count, position, progress, doing[:200]]).encode()
        self.hear(self._tree.rank, sent)
        return sent

    def hear(self, rank: int, sent: bytes) -> None:
        """Takes in a heartbeat of a rank of the node."""
        self._arrived[rank] = time.monotonic(), _parse([*json.loads(sent), 0.0])

    def forget(self, load: int) -> None:
        """Forgets heartbeats of the node's ranks in loads before this one."""
        self._arrived = {rank: near for rank, near in self._arrived.items() if near[1].position[0] >= load}

    def post(self, position: Position, waits: bool) -> None:
        """Replaces what the store has of this rank's node, or of this rank alone if it does not lead the node.

        Only once in an interval, or when this rank begins to wait (``waits``) in the round at ``position``.
        """
        if not (waits and position != self._posted) and time.monotonic() - self._posted_at < self.interval:
            return
        self._posted_at, self._posted = time.monotonic(), position
        self._posts += 1
        beats = self._near()
        ranks = beats if self._tree.leads else [self._tree.rank]
        self._store().set(f"heartbeat/{self._tree.rank}", json.dumps([self._posts, {r: beats[r] for r in ranks}]))

    def _near(self) -> dict[int, Heartbeat]:
        now = time.monotonic()
        return {rank: beat._replace(age=now - arrived) for rank, (arrived, beat) in self._arrived.items()}

    def _read(self, poster: int) -> tuple[int, dict[int, Heartbeat]]:
        """Returns how often a rank has posted, and the heartbeats in its last post."""
        if (value := read_if_set(self._store(), f"heartbeat/{poster}")) is None:
            return 0, {}
        posts, beats = json.loads(value)
        return posts, {int(rank): _parse(fields) for rank, fields in beats.items()}

    def state(self, ranks: Iterable[int], position: Position) -> list[tuple[int, int, int]]:
        """Returns a value that changes as long as any of ``ranks``, or of the nodes that they lead, moves data, or is alive and
        itself waits in the round at ``position``."""
        states = []
        for rank in ranks:
            if rank in self._tree.node:
                near = self._near()
                posts, beats = (near[rank].number, {rank: near[rank]}) if rank in near else (0, {})
            else:
                posts, beats = self._read(rank)
            for each, beat in sorted(beats.items()):
                states.append((each, beat.progress, posts if beat.position >= position else -1))
        return states

    def arrived(self, rank: int, position: Position) -> bool:
        """Returns True if a rank is known to have come to the round at ``position``."""
        beats = [self._near().get(rank)]
        if rank not in self._tree.node:
            beats += [self._read(poster)[1].get(rank) for poster in {self._tree.node_of[rank][0], rank}]
        return any(beat is not None and beat.position >= position for beat in beats)

    def describe(self, ranks: Sequence[int], ended: Collection[int], doing: str, find_silent: bool) -> str:
        """Returns the last known state of each rank, for an error message; empty if no rank has posted a heartbeat.

        Args:
            ranks: all ranks.
            ended: ranks whose process has ended.
            doing: this rank's activity.
            find_silent: also says which ranks post no heartbeats any more; takes two intervals.
        """
        shown = sorted(ranks, key=lambda rank: (rank not in ended, rank))[:_MAX_RANKS]
        posts, beats = self._look(shown)
        if not beats:
            return ""
        silent: set[int] = set()
        if find_silent:
            seconds, before = _SILENT_INTERVALS * self.interval, posts
            time.sleep(min(seconds, _MAX_SILENCE_SECONDS))
            posts, now = self._look(shown)
            hears = self._tree.members if self._tree.leads else (self._tree.leader,)
            for rank in shown:
                leader = self._tree.node_of[rank][0]
                same = leader not in self._tree.node and posts[leader] == before[leader]
                old = rank in now and now[rank].age > _SILENT_INTERVALS * INTERVAL
                if (same and seconds <= _MAX_SILENCE_SECONDS) or old or (rank in hears and rank not in now):
                    silent.add(rank)
            beats |= now
        lines = ["Last known state of each rank:"]
        for rank in sorted(shown):
            state = (
                doing if rank == self._tree.rank else (beats[rank].doing if rank in beats else "no heartbeat received")
            )
            note = ""
            if rank in ended:
                note = ", process ended"
            elif rank in silent and rank != self._tree.rank:
                note = ", silent: " + ("" if rank in beats else "not in this call, ") + "stopped or unreachable"
            lines.append(f"  rank {rank}: {state or 'not started'}{note}")
        if len(shown) < len(ranks):
            lines.append(f"  and {len(ranks) - len(shown)} more")
        return "\n".join(lines)

    def _look(self, ranks: Sequence[int]) -> tuple[dict[int, int], dict[int, Heartbeat]]:
        """Returns how often each leader of ``ranks`` has posted, and the last heartbeats of ``ranks``."""
        posts: dict[int, int] = {}
        beats: dict[int, Heartbeat] = {}
        for leader in {self._tree.node_of[rank][0] for rank in ranks}:
            posts[leader], posted = self._read(leader)
            beats |= posted
        beats |= self._near()
        return posts, {rank: beats[rank] for rank in ranks if rank in beats}


def _parse(fields: Sequence[object]) -> Heartbeat:
    number, position, progress, doing, age = fields
    return Heartbeat(number, tuple(position), progress, doing, age)  # type: ignore[arg-type]
