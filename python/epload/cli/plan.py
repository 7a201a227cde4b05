"""``epload plan``: what a load would do, without its ranks."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import prod
from pathlib import Path

import click

from epload.checkpoint.base import Checkpoint
from epload.cli.output import count, facts, json_option, print_json, show, size, table, variant_option
from epload.forecast.cluster_file import ClusterFile
from epload.forecast.forecast import Fit, Forecast, forecast
from epload.forecast.hypothetical import find_factory, parse_mesh
from epload.planning.schedule import READERS
from epload.planning.simulator import Cluster

_LISTED = 5
"""Keys that are shown of each kind."""


@click.command()
@click.argument("checkpoint")
@click.option("--model", help="Folder with config.json, Hub id, or package.module:function. Default: CHECKPOINT.")
@click.option(
    "--mesh", default="fsdp=1", show_default=True, help="Axes and sizes: replicate, fsdp, tp; or your function's."
)
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Nodes, with equally many ranks.")
@click.option("--readers", type=click.Choice(READERS), multiple=True, help="Compare only these; may be repeated.")
@click.option(
    "--link", type=float, default=1.25, show_default=True, help="GB/s of a node's link, each way; an assumption."
)
@click.option("--storage", type=float, default=2.0, show_default=True, help="GB/s that a node reads; an assumption.")
@click.option("--cluster", type=click.Path(path_type=Path, dir_okay=False), help="Rates from this TOML file instead.")
@click.option("--ranks", type=click.IntRange(1), default=8, show_default=True, help="Plan at most so many ranks.")
@variant_option
@json_option
def plan(
    checkpoint: str, model: str | None, mesh: str, nodes: int, readers: tuple[str, ...], link: float, storage: float,
    cluster: Path | None, ranks: int, variant: str, as_json: bool,
) -> int:  # fmt: skip
    """Show what a load would do: no ranks or accelerators needed.

    Key fit, bytes per rank and link, buckets, predicted seconds of each mode and what "auto" would choose. CHECKPOINT is as for
    inspect; only headers are read. The model is built on the meta device and parallelized by FSDP2 over each layer (axes
    replicate and fsdp) and by the tensor-parallel plan that a transformers model declares (tp). A function that takes an
    argument gets the mesh, and returns the model already parallelized. Exits with 1 if the load would fail.
    """
    sizes = parse_mesh(mesh)
    world = prod(sizes.values())
    if world % nodes:
        raise click.UsageError(f"expected as many ranks on each of {nodes} nodes, got a mesh of {world}")
    if min(link, storage) <= 0:
        raise click.UsageError(f"expected rates above 0, got --link {link:g} --storage {storage:g}")
    assumed = Cluster(nodes, world // nodes, link=link * 1e9, storage=storage * 1e9)
    if cluster is not None:
        assumed = replace(ClusterFile.read(cluster).cluster, nodes=nodes, ranks=world // nodes)
    opened = Checkpoint.open(checkpoint, variant=variant)
    opened.close()
    chosen = sorted({i * (world - 1) // max(min(ranks, world) - 1, 1) for i in range(min(ranks, world))})
    found = forecast(opened.manifest, find_factory(model or checkpoint), sizes, assumed, readers or READERS, chosen)
    if as_json:
        print_json({"world": world, "nodes": nodes, "cluster": asdict(assumed), **asdict(found)})
    else:
        _print(found, mesh, assumed)
    return 1 if found.fit.error else 0


def _print(found: Forecast, mesh: str, cluster: Cluster) -> None:
    owned, some = found.owned.values(), len(found.owned) < cluster.world
    each = " to ".join(dict.fromkeys((size(min(owned)), size(max(owned)))))
    rows = [
        ("job", f"mesh {mesh}: {count(cluster.world, 'rank')} on {count(cluster.nodes, 'node')}"),
        ("loads", f"{count(found.tensors, 'tensor')}, {size(found.nbytes)}"),
        ("per rank", each + (f" (of the {len(found.owned)} ranks planned)" if some else "")),
        *_fit_rows(found.fit),
        ("assumed", f"a node's link {size(cluster.link)}/s, a node reads {size(cluster.storage)}/s"),
    ]
    show(facts(rows))
    show()
    lines = [
        [
            mode.readers + (" *" if mode.readers == found.choice else ""), f"{mode.seconds:.3g}", f"{mode.buckets:,}",
            size(mode.bucket_bytes), size(mode.staging), size(max(mode.received)), size(max(mode.sent)),
        ]
        for mode in found.modes
    ]  # fmt: skip
    columns = ("readers", "seconds", "buckets", "largest", "staging", "link in", "link out")
    show(table(columns, lines, right=range(1, 7)))
    show()
    show(found.reason)
    if found.fit.error:
        show(f"This load would fail: {found.fit.error}")


def _fit_rows(fit: Fit) -> list[tuple[str, str]]:
    rows = [("matched", f"{fit.matched:,}" + (f", {fit.casts:,} converted to another dtype" if fit.casts else ""))]
    for title, names in (
        ("missing", fit.missing),
        ("unexpected", fit.unexpected),
        ("other shape", list(fit.mismatched)),
        ("to be initialized", fit.initialized),
    ):
        if names:
            more = f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
            rows.append((title, f"{len(names):,}: {', '.join(names[:_LISTED])}{more}"))
    for title, number in (("tied", fit.tied), ("ignored", fit.ignored)):
        if number:
            rows.append((title, f"{number:,}"))
    return rows
