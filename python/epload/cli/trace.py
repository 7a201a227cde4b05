"""``epload trace FILE``: what took time in a traced load, in the terminal."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from epload.cli.output import json_option, print_json, show, table
from epload.observe.plot import plot as draw
from epload.observe.render import bytes_and_rate, count
from epload.observe.summary import summarize
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
        print_json(asdict(summary))
        return
    off = f", clocks within {1e3 * summary.accuracy:.1f} ms" if summary.accuracy else ""
    show(f"{count(summary.ranks, 'rank')}, {summary.seconds:.3f} s{off}")
    rows = [
        [
            phase.name, str(phase.ranks), f"{phase.mean_seconds:.3f}", f"{phase.max_seconds:.3f}", str(phase.slowest),
            *bytes_and_rate(phase.name, phase.nbytes, phase.seconds),
        ]
        for phase in summary.phases
    ]  # fmt: skip
    show(table(("phase", "ranks", "mean s", "max s", "on rank", "bytes", "rate"), rows, right=range(1, 7)))
    if summary.waited_for:
        listed = ", ".join(f"rank {rank} {seconds:.3f} s" for rank, seconds in summary.waited_for[:_SHOWN])
        show(f"waited for, summed over the ranks that waited: {listed}")
