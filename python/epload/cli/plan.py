"""``epload plan``: what a load would do, without its ranks. The plans and the schedule are those of real loads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import click

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.cli.hypothetical import Factory, Sizes, as_seen_by, find_factory, first_rank, parse_mesh
from epload.cli.output import facts, json_option, print_json, show, size, table, variant_option
from epload.errors import ModelMismatch
from epload.loading.hints import check_match
from epload.mapping.mapping import Mapping, ignored_keys
from epload.mapping.resolve import resolve_mapping, with_quantization_of
from epload.model.targets import Targets, collect
from epload.observe.render import count, list_keys
from epload.planning.choose import choose_readers
from epload.planning.plan import LoadPlan, make_plan
from epload.planning.schedule import READERS, WAVE_BYTES, buckets_per_wave, wave_limit
from epload.planning.traffic import traffic
from epload.planning.waves import wave_bytes

Nodes = Sequence[Sequence[int]]
"""The ranks of each node."""


@click.command()
@click.argument("checkpoint")
@click.option("--model", help="Folder with config.json, Hub id, or package.module:function. Default: CHECKPOINT.")
@click.option(
    "--mesh", default="fsdp=1", show_default=True, help="Axes and sizes: replicate, fsdp, tp; or your function's."
)
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Nodes, with equally many ranks.")
@click.option("--ranks", type=click.IntRange(1), default=8, show_default=True, help="Plan at most so many ranks.")
@variant_option
@json_option
def plan(checkpoint: str, model: str | None, mesh: str, nodes: int, ranks: int, variant: str, as_json: bool) -> int:
    """Show what a load would do: no ranks or accelerators needed.

    Key fit, bytes per rank, for each choice of readers buckets, staging memory, and bytes read and over links; and what "auto"
    chooses. CHECKPOINT is as for inspect; only headers are read. The model is built on the meta device and parallelized by FSDP2
    over each layer (axes replicate and fsdp) and by the tensor-parallel plan that a transformers model declares (tp). A function
    that takes an argument gets the mesh, and returns the model already parallelized. Exits with 1 if the load would fail.
    """
    sizes = parse_mesh(mesh)
    world = prod(sizes.values())
    if world % nodes:
        raise click.UsageError(f"expected as many ranks on each of {nodes} nodes, got a mesh of {world}")
    per_node = world // nodes
    opened = Checkpoint.open(checkpoint, variant=variant)
    opened.close()
    planned = sorted({i * (world - 1) // max(min(ranks, world) - 1, 1) for i in range(min(ranks, world))})
    on_nodes = [range(first, first + per_node) for first in range(0, world, per_node)]
    job = plan_job(opened.manifest, find_factory(model or checkpoint), sizes, on_nodes, planned)
    if as_json:
        print_json({"world": world, "nodes": nodes, **job})
    else:
        _print(job, f"mesh {mesh}: {count(world, 'rank')} on {count(nodes, 'node')}", len(planned) < world)
    return 1 if job["fit"]["error"] else 0


# ---- planning ----


def plan_job(manifest: Manifest, factory: Factory, sizes: Sizes, nodes: Nodes, ranks: Sequence[int]) -> dict[str, Any]:
    """Plans a load by all ranks of a job into the model that a factory makes. Returns what is printed as JSON.

    Args:
        ranks: those to plan, in ascending order, with rank 0. Others are taken to keep as much as the one before them.

    Raises:
        ModelMismatch: the checkpoint does not fit the model, by other than missing, unexpected or mismatched keys.
    """
    with first_rank(sizes) as mesh:
        model = factory(mesh)
        targets = collect(model)
        mapping = resolve_mapping("auto", model, targets.index, manifest.names)
        manifest = with_quantization_of(model, manifest)
        others = {rank: as_seen_by(targets, sizes, rank) for rank in ranks[1:]}
    make = partial(_plan, manifest, mapping, nodes)
    first = make(targets, "every")[0]
    plans = {0: first} | {rank: make(of_rank, "every")[0] for rank, of_rank in others.items()}
    objects = manifest.in_object_storage
    read_by = {rank: plan.spanned if objects else plan.owned for rank, plan in plans.items()}
    by_node = [[read_by[max(rank for rank in ranks if rank <= member)] for member in node] for node in nodes]
    payload = first.payload
    read = {"one": payload, "per_node": len(nodes) * payload, "partitioned": payload, "every": sum(map(sum, by_node))}
    all_read = manifest.locations is not None or sum(map(len, nodes)) == 1
    choice, reason = choose_readers(payload, by_node, all_read=all_read, objects=objects, src=0)
    return {
        "fit": _fit(manifest, first, mapping, sorted(targets.unsaved_meta)),
        "nbytes": payload,
        "tensors": first.tensor_count,
        "owned": {rank: plan.owned for rank, plan in plans.items()},  # bytes of the local shards
        "modes": [_mode(readers, *make(targets, readers), nodes, read[readers]) for readers in READERS],
        "choice": choice,  # the readers of "auto", if every rank sees the checkpoint
        "reason": reason,
    }


def _plan(manifest: Manifest, mapping: Mapping, nodes: Nodes, targets: Targets, readers: str) -> tuple[LoadPlan, int]:
    """Returns the plan for a model on CPU, and the number of buckets in a wave."""
    wave = wave_limit(manifest.nbytes, WAVE_BYTES)
    per_wave = buckets_per_wave(nodes, readers, wave)
    return make_plan(manifest, targets, mapping, wave // per_wave), per_wave


def _mode(readers: str, plan: LoadPlan, per_wave: int, nodes: Nodes, read: int) -> dict[str, Any]:
    """Describes one choice of readers. Sizes are in bytes."""
    moved = traffic(plan.sizes, per_wave, nodes, readers)
    return {
        "readers": readers,
        "buckets": len(plan.buckets),
        "bucket_bytes": plan.largest,
        "staging": 0 if readers == "every" else 2 * wave_bytes(plan, per_wave),  # of a node
        "read": read,  # by all ranks together
        "received": moved.received,  # by each node from other nodes
        "sent": moved.sent,
    }


def _fit(manifest: Manifest, plan: LoadPlan, mapping: Mapping, initialized: list[str]) -> dict[str, Any]:
    """Describes how the keys of the checkpoint and the model fit.

    Args:
        initialized: buffers on meta that no checkpoint has. Unless the model's class fills them, as those of transformers do, a
            load needs ``init_missing=``; this does not try it.
    """
    ignored = set(ignored_keys(mapping, manifest.names, plan.missing, plan.unexpected))
    error = ""  # that a load with strict=True would raise
    try:
        check_match(manifest, plan, mapping, strict=True, ignore_mismatched_shapes=False)
    except ModelMismatch as mismatch:
        error = str(mismatch)
    return {
        "matched": plan.tensor_count,
        "missing": [name for name in plan.missing if name not in ignored],
        "unexpected": [name for name in plan.unexpected if name not in ignored],
        "mismatched": plan.mismatched,
        "tied": len(plan.tied),
        "ignored": len(ignored),
        "casts": plan.casts,
        "initialized": initialized,
        "error": error,
    }


# ---- printing ----


def _print(plan: dict[str, Any], job: str, some: bool) -> None:
    """``some``: True if only some of the ranks were planned."""
    owned, fit = plan["owned"].values(), plan["fit"]
    per_rank = " to ".join(dict.fromkeys((size(min(owned)), size(max(owned)))))
    titles = (
        ("job", job),
        ("loads", f"{count(plan['tensors'], 'tensor')}, {size(plan['nbytes'])}"),
        ("per rank", per_rank + (f" (of the {len(owned)} ranks planned)" if some else "")),
        ("matched", f"{fit['matched']:,}" + (f", {fit['casts']:,} converted to another dtype" if fit["casts"] else "")),
        ("missing", list_keys(fit["missing"])),
        ("unexpected", list_keys(fit["unexpected"])),
        ("other shape", list_keys(list(fit["mismatched"]))),
        ("to be initialized", list_keys(fit["initialized"])),
        ("tied", f"{fit['tied']:,}" if fit["tied"] else ""),
        ("ignored", f"{fit['ignored']:,}" if fit["ignored"] else ""),
    )
    show(facts(*titles))
    show()
    lines = [
        [
            mode["readers"] + " *" * (mode["readers"] == plan["choice"]), f"{mode['buckets']:,}",
            *map(size, (mode["bucket_bytes"], mode["staging"], mode["read"], max(mode["received"]), max(mode["sent"]))),
        ]
        for mode in plan["modes"]
    ]  # fmt: skip
    show(table(("readers", "buckets", "largest", "staging", "read", "link in", "link out"), lines, right=range(1, 7)))
    show()
    show(plan["reason"])
    if fit["error"]:
        show(f"This load would fail: {fit['error']}")
