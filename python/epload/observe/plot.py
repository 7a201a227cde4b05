"""A picture of a traced load: what each rank did over time."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from epload.observe.trace import Events


def plot(ranks: Sequence[Events], path: str | PathLike[str], phases: Sequence[str]) -> None:
    """Writes an image of some phases in the format that the name of the file says, such as ``.png`` or ``.svg``."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: run `pip install matplotlib`, or `pip install epload[plot]`") from error
    colors = {phase: f"C{number}" for number, phase in enumerate(phases)}
    figure = Figure(figsize=(11, 1 + 0.5 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    for row, events in enumerate(ranks):
        spans = [span for span in events.spans if span.phase in colors]
        threads = sorted({span.thread for span in spans})
        height = 0.8 / max(len(threads), 1)
        axes.barh(
            [row - 0.4 + height * threads.index(span.thread) for span in spans],
            [(span.end - span.begin) / 1e9 for span in spans], height, [span.begin / 1e9 for span in spans], align="edge",
            color=[colors[span.phase] for span in spans],
        )  # fmt: skip
    axes.set_yticks(range(len(ranks)), [f"rank {events.rank}" for events in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_xlim(left=0)
    patches = [Patch(color=color, label=phase) for phase, color in colors.items()]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path)
