"""A picture of a traced load: what each rank did over time."""

from __future__ import annotations

from os import PathLike

from epload.observe.trace import Trace

_COLORS = {
    "plan": "#9c9c9c", "materialize": "#bcbd22", "read": "#1f77b4", "inter_node": "#d62728",
    "intra_node": "#ff7f0e", "unpack": "#2ca02c", "verify": "#9467bd", "wait": "#e5e5e5",
}  # fmt: skip


def plot(trace: Trace, path: str | PathLike[str]) -> None:
    """Writes an image in the format that the name of the file says, such as ``.png`` or ``.svg``."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "a plot needs matplotlib: run `pip install matplotlib`, or `pip install epload[plot]`"
        ) from error
    figure = Figure(figsize=(11, 1 + 0.5 * len(trace.ranks)), layout="constrained")
    axes = figure.subplots()
    for row, events in enumerate(trace.ranks):
        lanes = sorted({span.lane for span in events.spans})
        height = 0.8 / max(len(lanes), 1)
        for phase, color in _COLORS.items():
            for number, lane in enumerate(lanes):
                spans = [span for span in events.spans if (span.phase, span.lane) == (phase, lane)]
                bars = [(span.begin / 1e9, (span.end - span.begin) / 1e9) for span in spans]
                axes.broken_barh(bars, (row - 0.4 + number * height, height), facecolors=color)
    axes.set_yticks(range(len(trace.ranks)), [f"rank {events.rank}" for events in trace.ranks])
    axes.invert_yaxis()
    axes.set(xlabel="seconds", xlim=(0, max(trace.end / 1e9, 1e-9)))
    patches = [Patch(color=color, label=phase) for phase, color in _COLORS.items()]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path)
