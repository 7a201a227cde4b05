"""Records what one rank did, and when: spans of time by thread. Only a load that is traced records them."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic_ns, time_ns
from typing import NamedTuple

ROUND = "round"
"""The phase of an agreement round. The detail of such an event is the number of the round, equal on all ranks."""


class Event(NamedTuple):
    """One span of time. Of one thread they nest: a wait may be part of a phase."""

    thread: str
    """Name of the thread."""
    phase: str
    """One of ``epload.report.PHASES``, or ``ROUND``."""
    begin: int
    """Nanoseconds of the rank's monotonic clock, or in a :class:`~epload.observe.trace.Trace` since its beginning."""
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

    def add(
        self, phase: str, begin: int, nbytes: int = 0, detail: str = "", ranks: tuple[int, ...] = (), name: str = ""
    ) -> None:
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
