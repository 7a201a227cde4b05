"""Heartbeats: that a rank is alive and what it is doing. Ranks tell the leader of their node, which posts one for all of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

from epload.ranks.messages import read_if_set
from epload.ranks.tree import Tree

INTERVAL = 1.0
"""Seconds between two heartbeats of a rank to its leader."""
_NODES_PER_SECOND, _MAX_INTERVALS = 8, 30
"""A leader posts more rarely the more nodes there are, so that all of them post so many in a second; and at least so often."""
_LOOK_PER_NODE, _MAX_LOOK = 1 / 128, 1.5
"""Growth, with each node, of the time between a leader's checks for a failure, and maximum of that time; in intervals."""
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

    @classmethod
    def parse(cls, fields: Sequence[object]) -> Heartbeat:
        number, position, progress, doing = fields
        return cls(number, tuple(position), progress, doing)  # type: ignore[arg-type]


State = list[tuple[int, int, int]]


class Heartbeats:
    """The heartbeats of all ranks of a control: those of its own node in memory, the others' in one key a node."""

    def __init__(self, store: Callable[[], Store], tree: Tree) -> None:
        """``store``: returns a connection that no wait blocks."""
        self._store = store
        self._tree = tree
        self._count = 0
        self._posts = 0
        self._near: dict[int, tuple[Heartbeat, float]] = {}
        """The last heartbeat of each rank of the node that this rank hears of, and when it came."""
        self._posted_at = 0.0
        self._posted: Position = (0, 0, 0)

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats of a node."""
        return min(max(1.0, len(self._tree.nodes) / _NODES_PER_SECOND), _MAX_INTERVALS) * INTERVAL

    @property
    def look_interval(self) -> float:
        """Seconds between two looks of a leader whether a rank of another node has failed."""
        return min(1.0 + _LOOK_PER_NODE * len(self._tree.nodes), _MAX_LOOK) * INTERVAL

    def beat(self, position: Position, progress: int, doing: str) -> bytes:
        """Counts a heartbeat of this rank; returns it as sent to others of its node."""
        self._count += 1
        own = Heartbeat(self._count, position, progress, doing[:200])
        self._near[self._tree.rank] = own, time.monotonic()
        return json.dumps(own).encode()

    def hear(self, rank: int, sent: bytes) -> None:
        """A heartbeat of another rank of the node."""
        self._near[rank] = Heartbeat.parse(json.loads(sent)), time.monotonic()

    def forget(self, load: int) -> None:
        """Heartbeats of the node's ranks in loads before this one."""
        self._near = {rank: near for rank, near in self._near.items() if near[0].position[0] >= load}

    def due(self, position: Position | None) -> bool:
        """Returns True if a heartbeat is due: an interval has passed, or the rank began to wait in the round at ``position``."""
        began_to_wait = position is not None and position != self._posted
        return began_to_wait or time.monotonic() - self._posted_at >= self.interval

    def post(self, position: Position) -> None:
        """Replaces what the store has of this rank's node; of this rank alone if it does not lead the node."""
        self._posted_at, self._posted = time.monotonic(), position
        self._posts += 1
        ranks = self._tree.node if self._tree.leads else (self._tree.rank,)
        now = time.monotonic()
        beats = {rank: [*self._near[rank][0], now - self._near[rank][1]] for rank in ranks if rank in self._near}
        self._store().set(f"heartbeat/{self._tree.rank}", json.dumps([self._posts, beats]))

    def near(self, ranks: Iterable[int], position: Position) -> State:
        """Returns what :meth:`far` does, for ranks of this node; does not read the store."""
        known = {rank: self._near[rank][0] for rank in ranks if rank in self._near}
        return [_state(rank, beat, beat.number, position) for rank, beat in sorted(known.items())]

    def far(self, leaders: Iterable[int], position: Position) -> State:
        """A value that changes as long as any of ``leaders`` or their nodes' ranks moves data, or is alive and itself waits in
        the round at ``position``."""
        states = []
        for leader in leaders:
            posts, beats = self._read(leader)
            states += [_state(rank, beat, posts, position) for rank, (beat, _) in sorted(beats.items())]
        return states

    def arrived(self, rank: int, position: Position) -> bool:
        """Returns True if a rank is known to have come to the round at ``position``."""
        keys = {self._tree.leader_of[rank], rank}
        beats = [beats[rank][0] for key in keys if rank in (beats := self._read(key)[1])]
        return any(beat.position >= position for beat in beats)

    def _read(self, poster: int) -> tuple[int, dict[int, tuple[Heartbeat, float]]]:
        """Returns how often a rank has posted, and the last heartbeat of each rank with its age in seconds."""
        value = read_if_set(self._store(), f"heartbeat/{poster}")
        if value is None:
            return 0, {}
        posts, beats = json.loads(value)
        return posts, {int(rank): (Heartbeat.parse(fields), age) for rank, (*fields, age) in beats.items()}

    def describe(self, ranks: Sequence[int], ended: Collection[int], doing: str, find_silent: bool) -> str:
        """The last known state of each rank, for an error message; empty if no rank has posted a heartbeat.

        Args:
            ended: ranks whose process has ended.
            doing: this rank's activity.
            find_silent: also says which ranks post no heartbeats any more; takes two intervals.
        """
        rank = self._tree.rank
        shown = [*sorted({*ended} & {*ranks}), *(each for each in ranks if each not in ended)][:_MAX_RANKS]
        posts, last, silent = self._look(shown)
        if not last:
            return ""
        silent_after = _SILENT_INTERVALS * self.interval
        if find_silent:
            time.sleep(min(silent_after, _MAX_SILENCE_SECONDS))
            before = posts
            posts, now, silent = self._look(shown)
            if silent_after <= _MAX_SILENCE_SECONDS:
                far = {
                    leader
                    for leader, count in posts.items()
                    if leader not in self._tree.node and before[leader] == count
                }
                silent |= {each for each in now if self._tree.leader_of[each] in far} | (far & {*shown})
                silent |= {each for each in self._hears if each in shown and each not in now}
            last |= now
        silent = silent - {*ended, rank} if find_silent else set()
        last[rank] = Heartbeat(0, (0, 0, 0), 0, doing)
        return _describe(ranks, shown, last, set(ended), silent)

    @property
    def _hears(self) -> Sequence[int]:
        """The ranks that send this one their heartbeats."""
        return self._tree.members if self._tree.leads else (self._tree.leader,)

    def _look(self, ranks: Sequence[int]) -> tuple[dict[int, int], dict[int, Heartbeat], set[int]]:
        """Returns how often each leader of ``ranks`` has posted, the last heartbeats of ``ranks``, and which of those are old."""
        limit = _SILENT_INTERVALS * INTERVAL
        posts: dict[int, int] = {}
        found: dict[int, tuple[Heartbeat, float]] = {}
        for leader in dict.fromkeys(self._tree.leader_of[rank] for rank in ranks):
            posts[leader], beats = self._read(leader)
            found |= beats
        now = time.monotonic()
        found |= {rank: (beat, now - when) for rank, (beat, when) in self._near.items()}
        found = {rank: found[rank] for rank in ranks if rank in found}
        return (
            posts,
            {rank: beat for rank, (beat, _) in found.items()},
            {r for r, (_, age) in found.items() if age > limit},
        )


def _state(rank: int, beat: Heartbeat, number: int, position: Position) -> tuple[int, int, int]:
    return rank, beat.progress, number if beat.position >= position else -1


def _describe(
    ranks: Sequence[int], shown: Sequence[int], last: Mapping[int, Heartbeat], ended: set[int], silent: set[int]
) -> str:
    lines = ["Last known state of each rank:"]
    for rank in sorted(shown):
        beat = last.get(rank)
        state = (beat.doing or "not started") if beat else "no heartbeat received"
        stopped = "stopped or unreachable" if beat else "not in this call, stopped, or unreachable"
        note = ", process ended" if rank in ended else f", silent: {stopped}" if rank in silent else ""
        lines.append(f"  rank {rank}: {state}{note}")
    if len(shown) < len(ranks):
        lines.append(f"  and {len(ranks) - len(shown)} more")
    return "\n".join(lines)
