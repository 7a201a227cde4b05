"""``epload plan``: what a load would do, without its ranks. The plans and the schedule are those of real loads."""

from __future__ import annotations

from math import prod
from typing import Any

import click

from epload.cli.output import facts, json_option, prefix_option, print_json, show, table, variant_option
from epload.observe.render import count, list_keys, show_bytes


@click.command()
@click.argument("checkpoint")
@click.option(
    "--model",
    help="Load into this model: a folder with config.json, a model on the Hub, or package.module:function. The default is "
    "CHECKPOINT.",
)
@click.option(
    "--mesh",
    default="fsdp=1",
    show_default=True,
    help="Shard over these axes, with their sizes: replicate, fsdp and tp, or those that the function of --model takes.",
)
@click.option(
    "--nodes",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Divide the ranks evenly among this many nodes.",
)
@click.option("--mapping", metavar="PACKAGE.MODULE:NAME", help="Use this epload.Mapping. The default is what the model declares.")
@click.option(
    "--init-missing",
    type=click.Choice(["reset_parameters"]),
    help="Initialize what the checkpoint lacks by this method of its modules, as the argument of epload.load does.",
)
@prefix_option
@variant_option
@json_option
def plan(
    checkpoint: str, model: str | None, mesh: str, nodes: int, mapping: str | None, init_missing: str | None,
    prefix: str, variant: str, as_json: bool,
) -> int:  # fmt: skip
    """Show what a load would do, without its ranks.

    Prints which names match, the bytes of each rank, and for each choice of readers the buckets, the staging memory and the bytes
    that are read and sent; and which readers "auto" chooses. No accelerator is needed, and only headers are read. CHECKPOINT is
    as for inspect.

    The model is built on the meta device, and parallelized by FSDP2 over each layer (the axes replicate and fsdp) and by the
    tensor-parallel plan that a transformers model declares (tp). A function that takes an argument gets the mesh, and returns
    the model already parallelized.

    Exits with 1 if the load would fail.
    """
    from epload.checkpoint.base import Checkpoint
    from epload.cli.hypothetical import find_factory, find_mapping, parse_mesh, plan_job

    sizes, rules = parse_mesh(mesh), find_mapping(mapping)
    world = prod(sizes.values())
    if world % nodes:
        raise click.UsageError(f"expected as many ranks on each of {nodes} nodes, got a mesh of {world}")
    opened = Checkpoint.open(checkpoint, prefix=prefix, variant=variant)
    opened.close()
    on_nodes = [range(first, first + world // nodes) for first in range(0, world, world // nodes)]
    job = plan_job(opened.manifest, find_factory(model or checkpoint), sizes, on_nodes, rules, init_missing is not None)
    if as_json:
        print_json({"world": world, "nodes": nodes, **job})
    else:
        _print(job, f"mesh {mesh}: {count(world, 'rank')} on {count(nodes, 'node')}")
    return int(bool(job["fit"]["error"]))


def _print(job: dict[str, Any], title: str) -> None:
    owned, fit = job["owned"].values(), job["fit"]
    per_rank = " to ".join(dict.fromkeys(map(show_bytes, (min(owned), max(owned)))))
    show(
        facts(
            ("job", title),
            ("loads", f"{count(job['tensors'], 'tensor')}, {show_bytes(job['nbytes'])}"),
            ("per rank", f"{per_rank} ({count(len(owned), 'rank')} planned)"),
            ("matched", f"{fit['matched']:,}"),
            ("missing", list_keys(fit["missing"])),
            ("unexpected", list_keys(fit["unexpected"])),
            ("other shape", list_keys(list(fit["mismatched"]))),
            ("to be initialized", list_keys(fit["initialized"])),
        )
    )
    rows = [("readers", "buckets", "largest", "staging", "read", "link in", "link out")]
    for mode in job["modes"]:
        name = mode["readers"] + (" *" if mode["readers"] == job["choice"] else "")
        staged = (mode["bucket_bytes"], mode["staging"], mode["read"])
        rows.append((name, f"{mode['buckets']:,}", *map(show_bytes, (*staged, max(mode["received"]), max(mode["sent"])))))
    show(f"\n{table(rows, right=range(1, 7))}\n\n{job['reason']}")
    if fit["error"]:
        show(f"This load would fail: {fit['error']}")
