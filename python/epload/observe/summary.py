"""A trace in numbers: how long each phase took, on which rank most, and whom ranks waited for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from epload.observe.events import ROUND
from epload.observe.trace import Trace


@dataclass(frozen=True)
class PhaseSummary:
    """One phase over all ranks that had it. Seconds of one rank are those of its spans, on all threads together."""

    name: str
    ranks: int
    mean_seconds: float
    max_seconds: float
    slowest: int
    """The rank with the most seconds."""
    nbytes: int
    """Number of bytes of all ranks together."""
    seconds: float
    """Seconds in which any rank was in the phase."""


@dataclass(frozen=True)
class TraceSummary:
    seconds: float
    ranks: int
    accuracy: float
    """Seconds by which clocks may differ."""
    phases: list[PhaseSummary]
    """Phases in the order in which they began."""
    waited_for: list[tuple[int, float]]
    """Ranks, and the seconds that others waited for them, summed over these; the most first. A wait for several ranks counts for
    each of them."""

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "phases": [vars(phase) for phase in self.phases]}


def summarize(trace: Trace) -> TraceSummary:
    spans = [(events.rank, span) for events in trace.ranks for span in events.spans]
    waited: dict[int, int] = defaultdict(int)
    for _, span in spans:
        for rank in span.ranks:
            waited[rank] += span.end - span.begin
    phases = list(dict.fromkeys(span.phase for _, span in sorted(spans, key=lambda each: each[1].begin)))
    return TraceSummary(
        (trace.end - trace.begin) / 1e9,
        len(trace.ranks),
        max(trace.accuracy.values(), default=0.0),
        [_summarize_phase(phase, trace) for phase in phases],
        sorted(((rank, length / 1e9) for rank, length in waited.items()), key=lambda each: -each[1]),
    )


def _summarize_phase(phase: str, trace: Trace) -> PhaseSummary:
    seconds: dict[int, float] = defaultdict(float)
    times: list[tuple[int, int]] = []
    nbytes = 0
    for events in trace.ranks:
        for span in events.spans:
            if span.phase == phase:
                seconds[events.rank] += (span.end - span.begin) / 1e9
                times.append((span.begin, span.end))
                nbytes += span.nbytes
    slowest = max(seconds, key=lambda rank: seconds[rank])
    return PhaseSummary(
        "agreement" if phase == ROUND else phase, len(seconds), fmean(seconds.values()), seconds[slowest], slowest, nbytes,
        _covered(times) / 1e9,
    )  # fmt: skip


def _covered(times: list[tuple[int, int]]) -> int:
    """Length of the union of spans of time."""
    total, until = 0, 0
    for begin, end in sorted(times):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total
