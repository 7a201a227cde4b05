"""Plots of the results."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib import ticker

from summary import Row, by_case

OURS, OTHERS = "tab:blue", "tab:grey"


def load(results: Row, target: Path) -> None:
    """One bar per loader and case, on a logarithmic scale."""
    heads = {"reload": "reload", "meta": "from meta", "library": "transformers model, from scratch"}
    found = {case: [row for row in by_case(results["rows"], case) if "median" in row] for case in heads}
    found = {case: rows for case, rows in found.items() if rows}
    if not found:
        return
    ratios = [len(rows) + 1 for rows in found.values()]
    figure, axes = plt.subplots(
        len(found), 1, figsize=(9, 0.27 * sum(ratios) + 1.2), layout="constrained", height_ratios=ratios, sharex=True,
        squeeze=False,
    )  # fmt: skip
    for axis, (case, rows) in zip(axes[:, 0], found.items(), strict=True):
        rows = rows[::-1]
        at = range(len(rows))
        medians = [row["median"] for row in rows]
        spread = [[row["median"] - row["min"] for row in rows], [row["max"] - row["median"] for row in rows]]
        colors = [OURS if row["ours"] else OTHERS for row in rows]
        axis.barh(at, medians, xerr=spread, color=colors, error_kw={"linewidth": 0.8})
        axis.set_yticks(at, [row["title"] for row in rows], fontsize=7)
        axis.set_xscale("log")
        axis.set_title(heads[case], fontsize=9)
        for i, value in enumerate(medians):
            axis.text(rows[i]["max"], i, f" {value:.2f}", va="center", fontsize=6)
    axes[-1, 0].set_xlabel("seconds: median, min and max")
    figure.suptitle(
        f"{results['tensors']:,} tensors, {results['nbytes'] / 1e6:.0f} MB, {results['nodes']} nodes x {results['ranks']} "
        f"gloo ranks on one machine, {results['date']}",
        fontsize=9,
    )
    figure.savefig(target, dpi=110)
    plt.close(figure)


def control(runs: list[Row], target: Path) -> None:
    """Store operations of a rank and load, and seconds of a round and of the server's CPU, against the number of ranks."""
    runs = [run for run in runs if run["ranks"] >= 8]
    ranks = [run["ranks"] for run in runs]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for key, name in (("nobody_late", "all together"), ("one_late", "one rank late")):
        left.plot(ranks, [run[key]["operations_per_rank"] for run in runs], marker="o", label=f"mean, {name}")
        left.plot(ranks, [run[key]["operations_most"] for run in runs], marker="x", label=f"busiest rank, {name}")
    left.set_ylabel("store operations of a rank and load")
    right.plot(ranks, [run["round"]["median_s"] for run in runs], marker="o", label="a round, median")
    right.plot(ranks, [run["round"]["last_s"] for run in runs], marker="o", label="the last round of a load, median")
    right.plot(ranks, [run["nobody_late"]["server_cpu_s"] for run in runs], marker="x", label="server CPU of a load")
    right.set_ylabel("seconds")
    right.set_yscale("log")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks, [str(count) for count in ranks])
        axis.set_xlabel("ranks, in nodes of 8")
        axis.set_ylim(bottom=0 if axis is left else None)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def net(results: Row, target: Path) -> None:
    """Seconds of each mode against the number of nodes and against bytes, and bytes over the busiest link."""
    sizes = sorted({run["nbytes"] for run in results["runs"]})
    runs = sorted((run for run in results["runs"] if run["nbytes"] == sizes[-1]), key=lambda run: run["nodes"])
    shape = runs[len(runs) // 2]["shape"]
    of_shape = sorted((run for run in results["runs"] if run["shape"] == shape), key=lambda run: run["nbytes"])
    own = [row for run in runs for row in by_case(run["rows"], "reload") if row["entry"].startswith("epload_modes")]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    for mode in sorted({row["title"] for row in own}):
        nodes, seen = _found(runs, mode, "nodes")
        left.plot(nodes, [row["median"] for row in seen], marker="o", label=mode)
        right.plot(nodes, [max(row["in"], row["out"]) for row in seen], marker="o")
        nbytes, seen = _found(of_shape, mode, "nbytes")
        middle.plot([n / 1e6 for n in nbytes], [row["median"] for row in seen], marker="o")
    left.axhline(runs[0]["bound"], color="grey", linestyle="--", label="S/B")
    bounds = [(0.0, 0.0), *((run["nbytes"] / 1e6, run["bound"]) for run in of_shape)]
    middle.plot(*zip(*bounds, strict=True), color="grey", linestyle="--")
    left.set(xlabel="nodes", ylabel="seconds, median", title=f"reload of {sizes[-1] / 1e6:.0f} MB", ylim=(0, None))
    middle.set(xlabel="MB", ylabel="seconds, median", title=f"reload, {shape}", xlim=(0, None), ylim=(0, None))
    right.set(xlabel="nodes", ylabel="bytes / S", title="max over one node's link, either direction", ylim=(0, None))
    for axis in (left, right):
        axis.set_xticks([run["nodes"] for run in runs], [run["shape"] for run in runs])
    figure.legend(loc="outside right center", fontsize=8)
    figure.suptitle(f"links of {results['mbit']} Mbit/s, one namespace per node, one machine, {results['date']}", fontsize=9)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def _found(runs: list[Row], mode: str, along: str) -> tuple[list[int], list[Row]]:
    """The ``along`` value and the row of each run that measured a mode."""
    seen = [(run[along], row) for run in runs for row in run["rows"] if row["title"] == mode and "median" in row]
    return [at for at, _ in seen], [row for _, row in seen]


def check(checked: list[Row], target: Path) -> None:
    """Simulated against measured seconds, one point per mode and shape, with a band of 20 %."""
    figure, axis = plt.subplots(figsize=(5.5, 5), layout="constrained")
    for shape in dict.fromkeys(row["shape"] for row in checked):
        rows = [row for row in checked if row["shape"] == shape]
        axis.scatter([row["measured"] for row in rows], [row["predicted"] for row in rows], label=shape, s=22)
    values = [value for row in checked for value in (row["measured"], row["predicted"])] or [0.1, 1.0]
    ends = [min(values) / 1.5, max(values) * 1.5]
    axis.plot(ends, ends, color="grey", linewidth=0.8)
    axis.fill_between(ends, [0.8 * e for e in ends], [1.2 * e for e in ends], color="grey", alpha=0.2, label="20 %")
    axis.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="simulated, s", xlim=ends, ylim=ends)
    axis.legend(fontsize=8)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def scale(results: list[Row], node: str, target: Path) -> None:
    """Simulated seconds against the number of accelerators: a column per model, a row per storage and number of NICs."""
    mine = [row for row in results if row["node"] == node]
    models = list(dict.fromkeys(row["model"] for row in mine))
    cases = list(dict.fromkeys((row["storage"], row["nics"]) for row in mine))
    modes = list(mine[0]["seconds"])
    figure, axes = plt.subplots(len(cases), len(models), figsize=(15, 17), layout="constrained", sharex=True)
    for line, (storage, nics) in enumerate(cases):
        for column, model in enumerate(models):
            axis = axes[line][column]
            rows = [r for r in mine if (r["model"], r["storage"], r["nics"]) == (model, storage, nics)]
            for number, mode in enumerate(modes):
                if mode not in rows[0]["seconds"]:
                    continue
                style = "--" if mode.startswith("flat ring") else "-"
                values = [row["seconds"][mode] for row in rows]
                axis.plot([r["accelerators"] for r in rows], values, style, color=f"C{number}", label=mode, linewidth=1.3)
            axis.set(xscale="log", yscale="log")
            axis.set_xticks([8, 64, 512, 4096, 16384], ["8", "64", "512", "4k", "16k"])
            axis.grid(alpha=0.3)
            where = storage if storage.endswith("memory") else f"{storage} storage"
            axis.set_title(f"{model}, {where}, {nics} NIC{'s' * (nics > 1)} per node", fontsize=8)
            for set_formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
                set_formatter(ticker.LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
    for axis in axes[-1]:
        axis.set_xlabel("accelerators")
    for axis in axes[:, 0]:
        axis.set_ylabel("seconds, simulated")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle(f"SIMULATED, not measured: {node} nodes of 8 accelerators")
    figure.savefig(target, dpi=80)
    plt.close(figure)
