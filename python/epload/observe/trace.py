"""Records what each rank did, and when: spans of time by thread. Only a load that is traced records them.

Merged, they are a file that Perfetto and chrome://tracing open.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import Any, NamedTuple

from epload.errors import redact

ROUND = "round"
"""The phase of an agreement round. The detail of such an event is the number of the round, equal on all ranks."""


class Event(NamedTuple):
    """One span of time. Of one thread they nest: a wait may be part of a phase."""

    thread: str
    """Name of the thread."""
    phase: str
    """One of ``epload.report.PHASES``, or ``ROUND``."""
    begin: int
    """Nanoseconds of the rank's monotonic clock, or, once the ranks are merged, since the first event of all."""
    end: int
    nbytes: int = 0
    """Bytes handled in it."""
    detail: str = ""
    ranks: tuple[int, ...] = ()
    """The ranks that it waited for."""
    name: str = ""
    """Name of the span; empty if it is the phase's."""


@dataclass
class Events:
    """One rank's events. Any thread may add to them."""

    rank: int
    node: int = 0
    """Number of the rank's node in the topology."""
    offset: int = field(default_factory=lambda: time_ns() - monotonic_ns())
    """Nanoseconds from the monotonic clock to the time of day, which machines keep in step."""
    spans: list[Event] = field(default_factory=list)

    def add(self, phase: str, begin: int, nbytes: int = 0, detail: str = "", ranks: tuple[int, ...] = (), name: str = "") -> None:
        """Adds a span of the calling thread that ends now."""
        thread = threading.current_thread().name
        self.spans.append(Event(thread, phase, begin, monotonic_ns(), nbytes, detail, ranks, name))

    @contextmanager
    def round(self, what: str, number: str) -> Iterator[None]:
        """Adds the time of the block as an agreement round."""
        begin = monotonic_ns()
        try:
            yield
        finally:
            self.add(ROUND, begin, detail=number, name=what)

    def encode(self) -> bytes:
        return zlib.compress(json.dumps(vars(self)).encode(), 1)

    @classmethod
    def decode(cls, data: bytes) -> Events:
        events = cls(**json.loads(zlib.decompress(data)))
        events.spans = [Event(*span[:6], tuple(span[6]), span[7]) for span in events.spans]
        return events


def merge_events(ranks: Iterable[Events]) -> list[Events]:
    """Returns the events of all ranks of a load, by rank. Their times become nanoseconds from the first event on, by the time of
    day of each rank's machine, and agreement rounds are of the rank that all others waited for."""
    merged = sorted(ranks, key=lambda events: events.rank)
    first = min((span.begin + events.offset for events in merged for span in events.spans), default=0)
    last: dict[str, tuple[int, int]] = {}
    """Gives for each round the time at which the last rank entered it, and that rank, for which all others waited."""
    for events in merged:
        shift = events.offset - first
        events.spans = [span._replace(begin=span.begin + shift, end=span.end + shift) for span in events.spans]
        for span in events.spans:
            if span.phase == ROUND:
                last[span.detail] = max(last.get(span.detail, (0, 0)), (span.begin, events.rank))
    for events in merged:
        for i, span in enumerate(events.spans):
            if span.phase == ROUND and last[span.detail][1] != events.rank:
                events.spans[i] = span._replace(ranks=last[span.detail][1:])
    return merged


def save_trace(ranks: Iterable[Events], path: str | PathLike[str], metadata: Mapping[str, str]) -> None:
    """Writes events in the Trace Event Format. Each rank is a process, and each of its threads a track. ``metadata``: facts about
    the whole operation, by name."""
    described = [event for events in ranks for event in _describe(events)]
    content = {"traceEvents": described, "displayTimeUnit": "ms", "otherData": dict(metadata)}
    Path(path).write_text(json.dumps(content, allow_nan=False))


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
