"""``epload simulate``: seconds of every mode on an assumed cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import click

from epload.checkpoint.base import Checkpoint
from epload.cli.output import count, facts, json_option, print_json, show, size, table
from epload.forecast.cluster_file import ClusterFile
from epload.forecast.hypothetical import find_factory, first_rank
from epload.mapping.transformers import checkpoint_form
from epload.mapping.wrappers import is_from_package
from epload.model.targets import collect
from epload.planning.simulator import Cluster, predict

MODES = {
    "every": "every/two_level", "per_node": "per_node/two_level", "partitioned": "partitioned/two_level",
    "partitioned, striped": "partitioned/striped", "one": "one/two_level", "one, striped": "one/striped",
}  # fmt: skip
FLAT = {True: ("flat ring", "ring"), False: ("flat tree", "tree")}
"""For comparison, one group of all ranks: NCCL's on devices, else gloo's."""


@dataclass(frozen=True)
class Size:
    """What is loaded."""

    name: str
    nbytes: int
    tensors: int


@click.command()
@click.argument("file", metavar="CLUSTER.toml", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--checkpoint", help="Take the size of this checkpoint; as for inspect.")
@click.option("--model", help="Take the size of this model; as for plan.")
@click.option("--nodes", type=click.IntRange(1), multiple=True, help="Instead of 1, 2, 4 ... up to the file's; repeat.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write a plot (.png, .svg); needs matplotlib."
)
@json_option
def simulate(
    file: Path, checkpoint: str | None, model: str | None, nodes: tuple[int, ...], plot: Path | None, as_json: bool
) -> None:
    """Predict the seconds of every mode on a cluster that is described in a file.

    The file has a table [cluster] with nodes, ranks (of a node) and link (bytes/s of one card), and optionally storage,
    storage_all, reader, links, intra, unpack, hop, message, fixed, on_device ...; and [checkpoint] with path, model, or bytes
    and tensors. The model is taken to be fully sharded. The schedule and the cost functions are those of real loads.
    """
    read = ClusterFile.read(file)
    what = _size_of(file, read.checkpoint, checkpoint, model)
    counts = sorted(set(nodes)) or _doubling(read.cluster.nodes)
    results = {number: _seconds(what, replace(read.cluster, nodes=number)) for number in counts}
    if plot is not None:
        _plot(what, read.cluster, results, plot)
    if as_json:
        seconds = [{"nodes": number, "seconds": modes} for number, modes in results.items()]
        print_json({"cluster": asdict(read.cluster), "checkpoint": asdict(what), "results": seconds})
        return
    _print(what, read.cluster, results)
    if plot is not None:
        show(f"plot: {plot}")


def _size_of(file: Path, given: dict[str, Any], checkpoint: str | None, model: str | None) -> Size:
    if checkpoint is not None and model is not None:
        raise click.UsageError("expected --checkpoint or --model, got both")
    if checkpoint is None and model is None:
        if set(given) == {"bytes", "tensors"} and all(type(value) is int and value > 0 for value in given.values()):
            return Size("checkpoint", given["bytes"], given["tensors"])
        if len(given) != 1 or "bytes" in given or "tensors" in given:
            raise ValueError(f"{file}: expected path, model, or bytes and tensors in [checkpoint], got {given}")
        checkpoint, model = given.get("path"), given.get("model")
    if checkpoint is not None:
        opened = Checkpoint.open(checkpoint)
        opened.close()
        return Size(str(checkpoint), opened.manifest.nbytes, len(opened.manifest.names))
    return _size_of_model(str(model))


def _size_of_model(model: str) -> Size:
    """Of the checkpoints that are saved of it."""
    with first_rank({"tp": 1}) as mesh:
        made = find_factory(model)(mesh)
        targets = collect(made)
    shapes = [targets.layouts[layout].shape for layout in targets.layout]
    nbytes = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, targets.dtypes, strict=True))
    names = targets.names
    if is_from_package(made, "transformers"):
        names, _ = checkpoint_form(made, dict(zip(names, zip(targets.dtypes, shapes, strict=True), strict=True)))
    return Size(model, nbytes, len(names))


def _doubling(most: int) -> list[int]:
    return sorted({most, *(1 << i for i in range(most.bit_length()))})


def _seconds(what: Size, cluster: Cluster) -> dict[str, float]:
    flat, of_flat = FLAT[cluster.on_device]
    return {name: predict(mode, what.nbytes, what.tensors, cluster) for name, mode in {**MODES, flat: of_flat}.items()}


def _print(what: Size, cluster: Cluster, results: dict[int, dict[str, float]]) -> None:
    where = "on devices" if cluster.on_device else "in host memory"
    rows = [
        ("loads", f"{what.name}: {count(what.tensors, 'tensor')}, {size(what.nbytes)}"),
        ("nodes", f"{count(cluster.ranks, 'rank')} each, {where}, {cluster.links} x {size(cluster.link)}/s"),
    ]
    show(facts(rows))
    show()
    lines = []
    for mode in next(iter(results.values())):
        cells = [
            f"{modes[mode]:.3g}{' *' if modes[mode] == min(modes.values()) else '  '}" for modes in results.values()
        ]
        lines.append([mode, *cells])
    show(table(("seconds, nodes:", *(f"{number:,}  " for number in results)), lines, right=range(1, len(results) + 1)))
    show()
    show("* the fastest")


def _plot(what: Size, cluster: Cluster, results: dict[int, dict[str, float]], path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    counts: Sequence[int] = list(results)
    for number, mode in enumerate(next(iter(results.values()))):
        style = "--" if "flat" in mode else "-"
        axes.plot(counts, [results[each][mode] for each in counts], style, marker="osv^Dx+"[number], label=mode)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [f"{each:,}" for each in counts])
    axes.set_xlabel(f"nodes of {count(cluster.ranks, 'rank')}")
    axes.set_ylabel("predicted seconds")
    axes.set_title(f"{what.name}, {size(what.nbytes)}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
