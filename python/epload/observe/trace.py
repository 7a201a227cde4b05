"""A traced load: the events of all ranks on one clock, as a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from epload.errors import redact
from epload.observe.events import ROUND, Events


class Trace:
    """The events of one load. Times are nanoseconds from the first event on, by the time of day of each rank's machine."""

    def __init__(self, ranks: Iterable[Events]) -> None:
        self.ranks = sorted(ranks, key=lambda events: events.rank)
        first = min((span.begin + events.offset for events in self.ranks for span in events.spans), default=0)
        last: dict[str, tuple[int, int]] = {}
        """Gives for each round the time at which the last rank entered it, and that rank, for which all others waited."""
        for events in self.ranks:
            shift = events.offset - first
            events.spans = [span._replace(begin=span.begin + shift, end=span.end + shift) for span in events.spans]
            for span in events.spans:
                if span.phase == ROUND:
                    last[span.detail] = max(last.get(span.detail, (0, 0)), (span.begin, events.rank))
        for events in self.ranks:
            for i, span in enumerate(events.spans):
                if span.phase == ROUND and last[span.detail][1] != events.rank:
                    events.spans[i] = span._replace(ranks=last[span.detail][1:])

    def save(self, path: str | PathLike[str]) -> None:
        """Writes it in the Trace Event Format. Each rank is a process, and each of its threads a track."""
        described = [event for events in self.ranks for event in _describe(events)]
        Path(path).write_text(json.dumps({"traceEvents": described, "displayTimeUnit": "ms"}, allow_nan=False))


def _describe(events: Events) -> Iterator[dict[str, Any]]:
    threads = sorted({span.thread for span in events.spans})
    names = [("process_name", 0, f"rank {events.rank} (node {events.node})")]
    for kind, number, name in (*names, *(("thread_name", number, thread) for number, thread in enumerate(threads))):
        yield {"name": kind, "ph": "M", "pid": events.rank, "tid": number, "args": {"name": name}}
    for span in sorted(events.spans, key=lambda span: (span.begin, -span.end)):
        args: dict[str, Any] = {"detail": redact(span.detail), "bytes": span.nbytes, "waits_for": list(span.ranks)}
        yield {
            "name": redact(span.name or span.phase), "cat": span.phase, "ph": "X", "pid": events.rank,
            "tid": threads.index(span.thread), "ts": span.begin / 1e3, "dur": (span.end - span.begin) / 1e3,
            "args": {name: value for name, value in args.items() if value},
        }  # fmt: skip
