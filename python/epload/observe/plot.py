"""A picture of a traced load: what each rank did over time, and at what rate bytes were handled."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch

from epload.observe.trace import Trace

_COLORS = {
    "plan": "#9c9c9c", "materialize": "#bcbd22", "read": "#1f77b4", "inter_node": "#d62728",
    "intra_node": "#ff7f0e", "unpack": "#2ca02c", "verify": "#9467bd", "wait": "#e5e5e5",
}  # fmt: skip
_MOVING = ("read", "inter_node", "intra_node")
"""Phases that bytes take long in, and so whose rate is drawn."""
_BINS = 200


def plot(trace: Trace, path: str | PathLike[str]) -> None:
    """Writes an image in the format that the name of the file says, such as ``.png`` or ``.svg``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "a plot needs matplotlib: run `pip install matplotlib`, or `pip install epload[plot]`"
        ) from error
    ranks = trace.ranks
    figure = Figure(figsize=(11, 3.5 + 0.35 * len(ranks)), layout="constrained")
    rows, rates = figure.subplots(2, 1, sharex=True, height_ratios=[max(2.0, 0.5 * len(ranks)), 2.0])
    seen = _draw_ranks(rows, trace)
    rows.set_yticks(range(len(ranks)), [f"rank {events.rank}" for events in ranks])
    rows.invert_yaxis()
    rows.legend(handles=[Patch(color=_COLORS[phase], label=phase) for phase in seen], loc="upper left",
                bbox_to_anchor=(1.0, 1.0), frameon=False)  # fmt: skip
    seconds = max((trace.end - trace.begin) / 1e9, 1e-9)
    for phase in (phase for phase in seen if phase in _MOVING):
        values = rate_over_time(trace, phase, _BINS)
        if any(values):
            centers = [(i + 0.5) * seconds / _BINS for i in range(_BINS)]
            rates.plot(centers, [value / 1e9 for value in values], color=_COLORS[phase], label=phase)
    rates.set(xlabel="seconds", ylabel="GB/s, all ranks", xlim=(0, seconds), ylim=(0, None))
    figure.savefig(path)


def _draw_ranks(axes: Any, trace: Trace) -> list[str]:
    """Returns the phases that were drawn."""
    seen = set()
    for row, events in enumerate(trace.ranks):
        lanes = sorted({span.lane for span in events.spans})
        height = 0.8 / max(len(lanes), 1)
        for phase in _COLORS:
            for number, lane in enumerate(lanes):
                spans = [span for span in events.spans if (span.phase, span.lane) == (phase, lane)]
                if spans:
                    seen.add(phase)
                    bars = [((span.begin - trace.begin) / 1e9, (span.end - span.begin) / 1e9) for span in spans]
                    axes.broken_barh(bars, (row - 0.4 + number * height, height), facecolors=_COLORS[phase])
    return [phase for phase in _COLORS if phase in seen]


def rate_over_time(trace: Trace, phase: str, bins: int) -> list[float]:
    """Returns bytes a second of all ranks together, in equal parts of the load. A span's bytes are spread evenly over it."""
    spans = [span for events in trace.ranks for span in events.spans if span.phase == phase and span.nbytes]
    begin, end, nbytes = (
        torch.tensor([[s.begin - trace.begin, s.end - trace.begin, s.nbytes] for s in spans]).reshape(-1, 3).T
    )
    edges = torch.linspace(0, max(trace.end - trace.begin, 1), bins + 1, dtype=torch.float64)
    moved = ((edges[:, None] - begin) / (end - begin).clamp(min=1)).clamp(0, 1) @ nbytes.double()
    rates: list[float] = (moved.diff() / (edges[1] / 1e9)).tolist()
    return rates
