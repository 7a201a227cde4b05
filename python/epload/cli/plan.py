"""``epload plan``: what a load would do, without its ranks. The plans and the schedule are those of real loads."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import click
from torch import nn

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.cli.hypothetical import Factory, Sizes, as_seen_by, find_factory, find_mapping, first_rank, parse_mesh
from epload.cli.output import facts, json_option, print_json, show, table, variant_option
from epload.errors import ModelMismatch
from epload.loading.hints import check_match, unfilled_error
from epload.mapping.mapping import AnyMapping, Mapping, ignored_keys
from epload.mapping.resolve import resolve_mapping, with_quantization_of
from epload.model.initialization import compute_missing
from epload.model.targets import Targets, collect
from epload.observe.render import count, list_keys, show_bytes
from epload.planning.choose import choose_readers
from epload.planning.plan import LoadPlan, make_plan
from epload.planning.schedule import READERS, WAVE_BYTES, buckets_per_wave, wave_limit
from epload.planning.traffic import traffic
from epload.planning.waves import wave_bytes

_MAX_RANKS = 8
"""Largest number of ranks that are planned. They are spread evenly; others are taken to keep as much as the one before them."""


@click.command()
@click.argument("checkpoint")
@click.option("--model", help="Folder with config.json, Hub id, or package.module:function. Default: CHECKPOINT.")
@click.option(
    "--mesh", default="fsdp=1", show_default=True, help="Axes and sizes: replicate, fsdp, tp; or your function's."
)
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Nodes, with equally many ranks.")
@click.option("--mapping", help="package.module:name of an epload.Mapping. Default: what the model declares.")
@variant_option
@json_option
def plan(
    checkpoint: str, model: str | None, mesh: str, nodes: int, mapping: str | None, variant: str, as_json: bool
) -> int:
    """Show what a load would do: no ranks or accelerators needed.

    Key fit, bytes per rank, for each choice of readers buckets, staging memory, and bytes read and over links; and what "auto"
    chooses. CHECKPOINT is as for inspect; only headers are read. The model is built on the meta device and parallelized by FSDP2
    over each layer (axes replicate and fsdp) and by the tensor-parallel plan that a transformers model declares (tp). A function
    that takes an argument gets the mesh, and returns the model already parallelized. Exits with 1 if the load would fail.
    """
    sizes, rules = parse_mesh(mesh), find_mapping(mapping)
    world = prod(sizes.values())
    if world % nodes:
        raise click.UsageError(f"expected as many ranks on each of {nodes} nodes, got a mesh of {world}")
    opened = Checkpoint.open(checkpoint, variant=variant)
    opened.close()
    on_nodes = [range(first, first + world // nodes) for first in range(0, world, world // nodes)]
    job = plan_job(opened.manifest, find_factory(model or checkpoint), sizes, on_nodes, rules)
    if as_json:
        print_json({"world": world, "nodes": nodes, **job})
    else:
        _print(job, f"mesh {mesh}: {count(world, 'rank')} on {count(nodes, 'node')}")
    return int(bool(job["fit"]["error"]))


# ---- planning ----


def plan_job(
    manifest: Manifest, factory: Factory, sizes: Sizes, nodes: Sequence[range], rules: AnyMapping = "auto"
) -> dict[str, Any]:
    """Plans a load by all ranks of a job into the model that a factory makes. Returns what is printed as JSON.

    Args:
        nodes: the ranks of each.
        rules: the mapping.

    Raises:
        ModelMismatch: the checkpoint does not fit the model, by other than missing, unexpected or mismatched keys.
    """
    last = nodes[-1][-1]
    ranks = sorted({i * last // (_MAX_RANKS - 1) for i in range(_MAX_RANKS)})
    with first_rank(sizes) as mesh:
        model = factory(mesh)
        targets = collect(model)
        mapping = resolve_mapping(rules, model, targets.index, manifest.names)
        manifest = with_quantization_of(model, manifest)
        unfilled = _unfilled(model, targets)
        targets_of = {rank: as_seen_by(targets, sizes, rank) for rank in ranks}
    wave = wave_limit(manifest.nbytes, WAVE_BYTES)
    per_wave = {readers: buckets_per_wave(nodes, readers, wave) for readers in READERS}
    plans = {rank: make_plan(manifest, targets_of[rank], mapping, wave // per_wave["every"]) for rank in ranks}
    objects, payload = manifest.in_object_storage, plans[0].payload
    read_by = {rank: plan.spanned if objects else plan.owned for rank, plan in plans.items()}
    by_node = [[read_by[max(rank for rank in ranks if rank <= member)] for member in node] for node in nodes]
    read = {"per_node": len(nodes) * payload, "every": sum(map(sum, by_node))}
    modes = []
    for readers in READERS:
        of_mode = make_plan(manifest, targets, mapping, wave // per_wave[readers])
        received, sent = traffic(of_mode.sizes, per_wave[readers], nodes, readers)
        modes.append(
            {
                "readers": readers,
                "buckets": len(of_mode.buckets),
                "bucket_bytes": of_mode.largest,
                "staging": 0 if readers == "every" else 2 * wave_bytes(of_mode.sizes, per_wave[readers]),  # of a node
                "read": read.get(readers, payload),  # by all ranks together
                "received": received,  # by each node from other nodes
                "sent": sent,
            }
        )
    all_read = manifest.locations is not None or last == 0
    choice, reason = choose_readers(payload, by_node, all_read=all_read, objects=objects, src=0)
    fit = _fit(manifest, plans[0], mapping)
    return {
        "fit": fit | {"initialized": sorted(targets.unsaved_meta), "error": fit["error"] or unfilled},
        "nbytes": payload,
        "tensors": plans[0].tensor_count,
        "owned": {rank: plan.owned for rank, plan in plans.items()},  # bytes of the local shards
        "modes": modes,
        "choice": choice,  # the readers of "auto", if every rank sees the checkpoint
        "reason": reason,
    }


def _unfilled(model: nn.Module, targets: Targets) -> str:
    """Returns the error that a load would raise for tensors on meta that are in no checkpoint and that the model cannot compute;
    empty if there are none."""
    dtypes = {name: tensor.dtype for name, tensor in targets.unsaved_meta.items()}
    try:
        computed, _ = compute_missing(model, targets.unsaved_meta, dtypes, 0)
    except ModelMismatch as mismatch:
        return str(mismatch)
    unfilled = sorted(targets.unsaved_meta.keys() - computed.keys())
    return str(unfilled_error(unfilled, False)) if unfilled else ""


def _fit(manifest: Manifest, plan: LoadPlan, mapping: Mapping) -> dict[str, Any]:
    """Describes how the keys of the checkpoint and the model fit, and the error that a load with ``strict=True`` would raise."""
    ignored, error = set(ignored_keys(mapping, manifest.names, plan.missing, plan.unexpected)), ""
    try:
        check_match(manifest, plan, mapping, strict=True, ignore_mismatched_shapes=False)
    except ModelMismatch as mismatch:
        error = str(mismatch)
    return {
        "matched": plan.tensor_count,
        "missing": [name for name in plan.missing if name not in ignored],
        "unexpected": [name for name in plan.unexpected if name not in ignored],
        "mismatched": plan.mismatched,
        "error": error,
    }


# ---- printing ----


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
        rows.append(
            (name, f"{mode['buckets']:,}", *map(show_bytes, (*staged, max(mode["received"]), max(mode["sent"]))))
        )
    show(f"\n{table(rows, right=range(1, 7))}\n\n{job['reason']}")
    if fit["error"]:
        show(f"This load would fail: {fit['error']}")
