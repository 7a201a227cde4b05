"""A trace in numbers: how long each phase took, on which rank most, and which ranks others waited for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean

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


def summarize(trace: Trace) -> TraceSummary:
    waited: dict[int, float] = defaultdict(float)
    seconds: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    times: dict[str, list[tuple[int, int]]] = defaultdict(list)
    nbytes: dict[str, int] = defaultdict(int)
    spans = [(events.rank, span) for events in trace.ranks for span in events.spans]
    for of, span in sorted(spans, key=lambda each: each[1].begin):
        phase, length = "agreement" if span.phase == ROUND else span.phase, (span.end - span.begin) / 1e9
        seconds[phase][of] += length
        times[phase].append((span.begin, span.end))
        nbytes[phase] += span.nbytes
        for rank in span.ranks:
            waited[rank] += length
    phases = []
    for phase, by_rank in seconds.items():
        slowest = max(sorted(by_rank), key=by_rank.__getitem__)
        values = by_rank.values()
        union = _covered(times[phase]) / 1e9
        phases.append(PhaseSummary(phase, len(values), fmean(values), max(values), slowest, nbytes[phase], union))
    accuracy = max(trace.accuracy.values(), default=0.0)
    ordered = sorted(waited.items(), key=lambda each: -each[1])
    return TraceSummary((trace.end - trace.begin) / 1e9, len(trace.ranks), accuracy, phases, ordered)


def _covered(times: list[tuple[int, int]]) -> int:
    """Returns the length of the union of spans of time, which are sorted by their beginnings."""
    total, until = 0, 0
    for begin, end in times:
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total
