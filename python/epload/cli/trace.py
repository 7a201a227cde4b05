"""``epload trace FILE``: what took time in a traced load, in the terminal."""

from __future__ import annotations

import json
import math
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from epload.observe.plot import plot as draw
from epload.observe.summary import TraceSummary, summarize
from epload.observe.trace import Trace
from epload.report import UNRATED, count, show_bytes, show_rate

_SHOWN = 5
"""Ranks that others waited for."""


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--plot", "image", type=click.Path(dir_okay=False, path_type=Path), help="Also draw it, e.g. load.png.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def trace(file: Path, image: Path | None, as_json: bool) -> None:
    """Summarize FILE, the trace of a load that EPLOAD_TRACE or report.trace() has written.

    To look at every wave, open the file with https://ui.perfetto.dev.
    """
    try:
        loaded = Trace.load(file)
        if image is not None:
            draw(loaded, image)
    except (ValueError, ImportError, OSError) as error:
        raise click.ClickException(str(error)) from error
    summary = summarize(loaded)
    if as_json:
        known = {**summary.to_dict(), "accuracy": summary.accuracy if summary.accuracy < math.inf else None}
        click.echo(json.dumps(known, indent=2))
        return
    _show(summary, Console())


def _show(summary: TraceSummary, console: Console) -> None:
    off = f", clocks within {1e3 * summary.accuracy:.1f} ms" if summary.accuracy else ""
    console.print(f"{count(summary.ranks, 'rank')}, {summary.seconds:.3f} s{off}", highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("phase")
    for title in ("ranks", "mean s", "max s", "on rank", "bytes", "rate"):
        table.add_column(title, justify="right")
    for phase in summary.phases:
        moved = show_bytes(phase.nbytes) if phase.nbytes else ""
        rate = show_rate(phase.nbytes / phase.seconds) if moved and phase.seconds and phase.name != UNRATED else ""
        table.add_row(
            phase.name, str(phase.ranks), f"{phase.mean_seconds:.3f}", f"{phase.max_seconds:.3f}", str(phase.slowest), moved,
            rate,
        )  # fmt: skip
    console.print(table)
    if summary.waited_for:
        listed = ", ".join(f"rank {rank} {seconds:.3f} s" for rank, seconds in summary.waited_for[:_SHOWN])
        console.print(f"waited for, summed over the ranks that waited: {listed}", highlight=False, soft_wrap=True)
