"""``epload trace FILE``: how long each phase of a traced load took, on which rank most, and which ranks others waited for."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from epload.cli.output import json_option, print_json, show, table
from epload.observe.events import ROUND
from epload.observe.plot import plot as draw
from epload.observe.render import bytes_and_rate, count
from epload.observe.trace import Trace

_SHOWN = 5
"""Ranks that others waited for."""


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--plot", "image", type=click.Path(dir_okay=False, path_type=Path), help="Also draw it, e.g. load.png.")
@json_option
def trace(file: Path, image: Path | None, as_json: bool) -> None:
    """Summarize FILE, the trace of a load that EPLOAD_TRACE or report.trace() has written.

    To look at every wave, open the file with https://ui.perfetto.dev.
    """
    loaded = Trace.load(file)
    if image is not None:
        draw(loaded, image)
    summary = summarize(loaded)
    if as_json:
        print_json(summary)
        return
    off = f", clocks within {1e3 * summary['accuracy']:.1f} ms" if summary["accuracy"] else ""
    show(f"{count(summary['ranks'], 'rank')}, {summary['seconds']:.3f} s{off}")
    rows = [
        [
            phase["name"], str(phase["ranks"]), f"{phase['mean_seconds']:.3f}", f"{phase['max_seconds']:.3f}",
            str(phase["slowest"]), *bytes_and_rate(phase["name"], phase["nbytes"], phase["seconds"]),
        ]
        for phase in summary["phases"]
    ]  # fmt: skip
    show(table(("phase", "ranks", "mean s", "max s", "on rank", "bytes", "rate"), rows, right=range(1, 7)))
    if summary["waited_for"]:
        listed = ", ".join(f"rank {rank} {seconds:.3f} s" for rank, seconds in summary["waited_for"][:_SHOWN])
        show(f"waited for, summed over the ranks that waited: {listed}")


def summarize(trace: Trace) -> dict[str, Any]:
    """Returns what is printed as JSON. Seconds of a rank in a phase are those of its spans, on all threads together."""
    waited: dict[int, float] = defaultdict(float)
    seconds: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    covered, until, nbytes = (defaultdict[str, int](int) for _ in range(3))
    spans = [(events.rank, span) for events in trace.ranks for span in events.spans]
    for of, span in sorted(spans, key=lambda each: each[1].begin):
        phase, length = "agreement" if span.phase == ROUND else span.phase, (span.end - span.begin) / 1e9
        seconds[phase][of] += length
        covered[phase] += max(0, span.end - max(span.begin, until[phase]))
        until[phase] = max(until[phase], span.end)
        nbytes[phase] += span.nbytes
        for rank in span.ranks:  # a wait for several ranks counts for each of them
            waited[rank] += length
    return {
        "seconds": (trace.end - trace.begin) / 1e9,
        "ranks": len(trace.ranks),
        "accuracy": max(trace.accuracy.values(), default=0.0),  # by which clocks may differ
        "phases": [
            {
                "name": phase,
                "ranks": len(of_phase),
                "mean_seconds": fmean(of_phase.values()),
                "max_seconds": max(of_phase.values()),
                "slowest": max(sorted(of_phase), key=of_phase.__getitem__),
                "nbytes": nbytes[phase],
                "seconds": covered[phase] / 1e9,  # in which any rank was in the phase
            }
            for phase, of_phase in seconds.items()
        ],
        "waited_for": sorted(waited.items(), key=lambda each: -each[1]),
    }
