"""Draws what bench_net.py measured: load time against nodes and against bytes.

python benchmarks/plot_net.py benchmarks/results/net.json docs/net.png
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def main() -> None:
    source, target = map(Path, sys.argv[1:3])
    results = json.loads(source.read_text())
    rows = results["rows"]
    sizes = sorted({row["nbytes"] for row in rows})
    ways = list(dict.fromkeys(row["way"] for row in rows))
    figure, (by_nodes, by_bytes) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for way in ways:
        largest = sorted(
            (_nodes(row), _median(row)) for row in rows if row["way"] == way and row["nbytes"] == sizes[-1]
        )
        by_nodes.plot(*zip(*largest, strict=True), marker="o", label=way)
        widest = max(_nodes(row) for row in rows)
        per_size = sorted(
            (row["nbytes"] / 1e6, _median(row)) for row in rows if row["way"] == way and _nodes(row) == widest
        )
        by_bytes.plot(*zip(*per_size, strict=True), marker="o", label=way)
    bound = {row["nbytes"]: row["bound"] for row in rows}
    by_nodes.axhline(bound[sizes[-1]], color="grey", linestyle="--", label="S/B")
    by_bytes.plot(
        [size / 1e6 for size in sizes], [bound[size] for size in sizes], color="grey", linestyle="--", label="S/B"
    )
    by_nodes.set(xlabel="nodes", ylabel="seconds, median", title=f"{sizes[-1] / 1e6:.0f} MB", ylim=(0, None))
    by_bytes.set(xlabel="MB", title=f"{max(_nodes(row) for row in rows)} nodes", xlim=(0, None), ylim=(0, None))
    by_nodes.set_xticks(sorted({_nodes(row) for row in rows}))
    by_nodes.legend(fontsize=7)
    figure.suptitle(
        f"Reload over links of {results['mbit']} Mbit/s, one namespace a node, {results['cores']} cores, {results['date']}"
    )
    figure.savefig(target, dpi=110)


def _nodes(row: dict[str, Any]) -> int:
    return int(row["shape"].split("x")[0])


def _median(row: dict[str, Any]) -> float:
    return statistics.median(row["seconds"])


if __name__ == "__main__":
    main()
