"""A traced load: the events of all ranks on one clock, as a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from epload.errors import redact
from epload.observe.events import ROUND, Event, Events

_ORDER = {"MainThread": 0, "epload-read": 1, "epload-move": 2}
"""Threads in the order in which they are shown; others follow."""


@dataclass(frozen=True)
class Trace:
    """The events of one load. All times are nanoseconds of the first rank's clock."""

    ranks: tuple[Events, ...]
    accuracy: dict[int, float]
    """Seconds by which times of a rank may be off: 0 on the first rank's machine, infinite if nothing is known. Another machine's
    clock is known only from the agreement rounds: each is entered before the first rank decides it, and left afterwards."""

    @classmethod
    def merge(cls, ranks: Iterable[Events]) -> Trace:
        """``ranks``: the events of each, on its own clock. The first decides rounds."""
        first, *others = ranks
        merged, accuracy = [first], {first.rank: 0.0}
        for other in others:
            offset, accuracy[other.rank] = _offset(other, first)
            spans = [span._replace(begin=span.begin + offset, end=span.end + offset) for span in other.spans]
            merged.append(replace(other, spans=spans))
        return cls(tuple(_with_last_to_come(sorted(merged, key=lambda events: events.rank))), accuracy)

    @property
    def begin(self) -> int:
        return min((span.begin for events in self.ranks for span in events.spans), default=0)

    @property
    def end(self) -> int:
        return max((span.end for events in self.ranks for span in events.spans), default=0)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes it in the Trace Event Format. Each rank is a process, and each of its threads a track."""
        accuracy = {str(rank): bound if bound < math.inf else None for rank, bound in self.accuracy.items()}
        content = {
            "traceEvents": [event for events in self.ranks for event in self._describe(events)],
            "displayTimeUnit": "ms",
            "otherData": {"accuracy": accuracy},
        }
        Path(path).write_text(json.dumps(content, allow_nan=False))

    def _describe(self, events: Events) -> Iterator[dict[str, Any]]:
        rank, begin = events.rank, self.begin

        def named(kind: str, number: int, name: str, index: int) -> Iterator[dict[str, Any]]:
            for what, value in (("name", name), ("sort_index", index)):
                yield {"name": f"{kind}_{what}", "ph": "M", "pid": rank, "tid": number, "args": {what: value}}

        yield from named("process", 0, f"rank {rank} (node {events.node})", rank)
        lanes = sorted({span.lane for span in events.spans}, key=lambda lane: (_ORDER.get(lane, len(_ORDER)), lane))
        for number, lane in enumerate(lanes):
            yield from named("thread", number, lane, number)
        for span in sorted(events.spans, key=lambda span: (span.begin, -span.end)):
            args: dict[str, Any] = {"detail": redact(span.detail), "bytes": span.nbytes, "waits_for": list(span.ranks)}
            yield {
                "name": redact(span.name or span.phase), "cat": span.phase, "ph": "X", "pid": rank, "tid": lanes.index(span.lane),
                "ts": (span.begin - begin) / 1e3, "dur": (span.end - span.begin) / 1e3,
                "args": {name: value for name, value in args.items() if value},
            }  # fmt: skip


def _offset(other: Events, first: Events) -> tuple[int, float]:
    """Returns the nanoseconds to add to times of another rank, and the seconds by which that may be off."""
    if other.clock == first.clock:
        return 0, 0.0
    rounds = [(span, first.decided[span.detail]) for span in other.spans if span.detail in first.decided]
    if not rounds:
        return first.spans[0].begin - other.spans[0].begin if first.spans and other.spans else 0, math.inf
    smallest = max(decided - span.end for span, decided in rounds)
    largest = min(decided - span.begin for span, decided in rounds)
    return (smallest + largest) // 2, abs(largest - smallest) / 2e9


def _with_last_to_come(ranks: list[Events]) -> Iterable[Events]:
    """Yields the same with the rank that every round waited for."""
    last: dict[str, tuple[float, int]] = defaultdict(lambda: (-math.inf, -1))
    for events in ranks:
        for span in events.spans:
            if span.phase == ROUND:
                last[span.detail] = max(last[span.detail], (span.begin, events.rank))
    for events in ranks:
        waits = {detail: (rank,) for detail, (_, rank) in last.items() if rank != events.rank}
        spans = [s._replace(ranks=waits.get(s.detail, ())) if s.phase == ROUND else s for s in events.spans]
        yield replace(events, spans=spans)
