"""A traced load: the events of all ranks on one clock, as a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from epload.errors import redact
from epload.observe.events import ROUND, Events

_ORDER = {"MainThread": 0, "epload-read": 1, "epload-move": 2}
"""Threads in the order in which they are shown; others follow."""


class Trace:
    """The events of one load. Times are nanoseconds from the first event on, by the time of day of each rank's machine."""

    def __init__(self, ranks: Iterable[Events]) -> None:
        self.ranks = sorted(ranks, key=lambda events: events.rank)
        spans = [(events, span) for events in self.ranks for span in events.spans]
        first = min((span.begin + events.offset for events, span in spans), default=0)
        last_of: dict[str, tuple[int, int]] = defaultdict(lambda: (0, -1))
        """The rank that entered each round last, for which all others waited."""
        for events, span in spans:
            if span.phase == ROUND:
                last_of[span.detail] = max(last_of[span.detail], (span.begin + events.offset - first, events.rank))
        for events in self.ranks:
            for i, span in enumerate(events.spans):
                last = last_of[span.detail][1] if span.phase == ROUND else events.rank
                begin, end = (time + events.offset - first for time in (span.begin, span.end))
                waited_for = span.ranks if last == events.rank else (last,)
                events.spans[i] = span._replace(begin=begin, end=end, ranks=waited_for)

    @property
    def end(self) -> int:
        return max((span.end for events in self.ranks for span in events.spans), default=0)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes it in the Trace Event Format. Each rank is a process, and each of its threads a track."""
        described = [event for events in self.ranks for event in _describe(events)]
        Path(path).write_text(json.dumps({"traceEvents": described, "displayTimeUnit": "ms"}, allow_nan=False))


def _describe(events: Events) -> Iterator[dict[str, Any]]:
    rank = events.rank
    lanes = sorted({span.lane for span in events.spans}, key=lambda lane: (_ORDER.get(lane, len(_ORDER)), lane))
    names = [("process", 0, rank, f"rank {rank} (node {events.node})")]
    names += [("thread", number, number, lane) for number, lane in enumerate(lanes)]
    for kind, number, index, name in names:
        for what, value in (("name", name), ("sort_index", index)):
            yield {"name": f"{kind}_{what}", "ph": "M", "pid": rank, "tid": number, "args": {what: value}}
    for span in sorted(events.spans, key=lambda span: (span.begin, -span.end)):
        args: dict[str, Any] = {"detail": redact(span.detail), "bytes": span.nbytes, "waits_for": list(span.ranks)}
        yield {
            "name": redact(span.name or span.phase), "cat": span.phase, "ph": "X", "pid": rank, "tid": lanes.index(span.lane),
            "ts": span.begin / 1e3, "dur": (span.end - span.begin) / 1e3,
            "args": {name: value for name, value in args.items() if value},
        }  # fmt: skip
