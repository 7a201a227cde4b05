"""What a load would do on a job that does not run: the plan of its ranks, bytes over links, seconds of each mode. The plans, the
schedule, the cost functions and the choice are those of real loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epload.checkpoint.manifest import Manifest
from epload.errors import ModelMismatch
from epload.forecast.hypothetical import Factory, Sizes, as_seen_by, first_rank
from epload.loading.hints import check_match
from epload.mapping.mapping import Mapping, ignored_keys
from epload.mapping.resolve import resolve_mapping, with_quantization_of
from epload.model.targets import Targets, collect
from epload.planning.choose import LoadProfile, WaveMeasurement, choose_readers
from epload.planning.plan import LoadPlan, make_plan
from epload.planning.schedule import READERS
from epload.planning.simulator import Cluster, predict, traffic, waves
from epload.planning.waves import wave_bytes


@dataclass(frozen=True)
class Fit:
    """How a checkpoint's keys fit a model."""

    matched: int
    """Checkpoint tensors that are loaded."""
    missing: list[str]
    unexpected: list[str]
    mismatched: dict[str, str]
    tied: int
    """Checkpoint tensors left out because another name of the same parameter is in it."""
    ignored: int
    """Missing and unexpected keys that the mapping says to ignore."""
    casts: int
    """Checkpoint tensors whose dtype is converted."""
    initialized: list[str]
    """Buffers on meta that no checkpoint has. Unless the model's class fills them, as those of transformers do, a load needs
    ``init_missing=``; this does not try it."""
    error: str
    """What a load with ``strict=True`` would raise; empty if nothing."""


@dataclass(frozen=True)
class Mode:
    """One choice of readers."""

    readers: str
    seconds: float
    buckets: int
    bucket_bytes: int
    """Of the largest."""
    staging: int
    """Bytes of a node's staging buffers."""
    received: list[int]
    """For each node, bytes over its link from other nodes."""
    sent: list[int]


@dataclass(frozen=True)
class Forecast:
    """Of a load."""

    fit: Fit
    nbytes: int
    """That are loaded."""
    tensors: int
    owned: dict[int, int]
    """Bytes of the local shards, by rank, of the ranks that were planned."""
    modes: list[Mode]
    choice: str
    reason: str


def forecast(
    manifest: Manifest, factory: Factory, sizes: Sizes, cluster: Cluster, readers: Sequence[str], ranks: Sequence[int]
) -> Forecast:
    """
    Args:
        readers: those to compare.
        ranks: those to plan, in ascending order, with rank 0. Others are taken to keep as much as the one before them.

    Raises:
        ModelMismatch: the checkpoint does not fit the model, by other than missing, unexpected or mismatched keys.
    """
    with first_rank(sizes) as mesh:
        model = factory(mesh)
        targets = collect(model)
        mapping = resolve_mapping("auto", model, targets.index, manifest.names)
        manifest = with_quantization_of(model, manifest)
        as_rank = {rank: as_seen_by(targets, sizes, rank) for rank in ranks}
    owned = {rank: _plan(manifest, each, mapping, cluster, "auto").owned for rank, each in as_rank.items()}
    first = _plan(manifest, targets, mapping, cluster, "auto")
    fit = _fit(manifest, first, mapping, sorted(targets.unsaved_meta))
    plans = {each: _plan(manifest, targets, mapping, cluster, each) for each in readers}
    everyones = [owned[max(rank for rank in ranks if rank <= each)] for each in range(cluster.world)]
    per_wave = {each: _per_wave(manifest, cluster, each)[1] for each in ("auto", *readers)}
    modes = [_mode(each, plan, per_wave[each], cluster, everyones) for each, plan in plans.items()]
    choice, reason = _choose(first, per_wave["auto"], cluster, everyones)
    return Forecast(fit, first.slots.payload, first.slots.tensor_count, owned, modes, choice, reason)


def _nodes(cluster: Cluster) -> list[range]:
    return [range(first, first + cluster.ranks) for first in range(0, cluster.world, cluster.ranks)]


def _per_wave(manifest: Manifest, cluster: Cluster, readers: str) -> tuple[int, int]:
    """Bytes of a wave, and buckets in it."""
    return waves(manifest.nbytes, _nodes(cluster), readers, cluster.on_device, cluster.wave)


def _plan(manifest: Manifest, targets: Targets, mapping: Mapping, cluster: Cluster, readers: str) -> LoadPlan:
    size, per_wave = _per_wave(manifest, cluster, readers)
    return make_plan(manifest, targets, mapping, size // per_wave)


def _fit(manifest: Manifest, plan: LoadPlan, mapping: Mapping, initialized: list[str]) -> Fit:
    ignored = set(ignored_keys(mapping, manifest.names, plan.missing, plan.unexpected))
    error = ""
    try:
        check_match(manifest, plan, mapping, strict=True, ignore_mismatched_shapes=False)
    except ModelMismatch as mismatch:
        error = str(mismatch)
    return Fit(
        matched=plan.slots.tensor_count,
        missing=[name for name in plan.missing if name not in ignored],
        unexpected=[name for name in plan.unexpected if name not in ignored],
        mismatched=plan.mismatched,
        tied=len(plan.tied),
        ignored=len(ignored),
        casts=plan.casts,
        initialized=initialized,
        error=error,
    )


def _mode(readers: str, plan: LoadPlan, per_wave: int, cluster: Cluster, owned: Sequence[int]) -> Mode:
    moved = traffic([bucket.nbytes for bucket in plan.buckets], per_wave, _nodes(cluster), readers, "two_level")
    return Mode(
        readers=readers,
        seconds=predict(f"{readers}/two_level", plan.slots.payload, plan.slots.tensor_count, cluster, owned),
        buckets=len(plan.buckets),
        bucket_bytes=plan.largest,
        staging=0 if readers == "every" else 2 * wave_bytes(plan, per_wave),
        received=moved.received,
        sent=moved.sent,
    )


def _choose(plan: LoadPlan, per_wave: int, cluster: Cluster, owned: Sequence[int]) -> tuple[str, str]:
    """What ``readers="auto"`` chooses if its first waves show the cluster's rates."""
    node_rate = min(cluster.storage, cluster.storage_all / cluster.nodes, cluster.reader * cluster.ranks)
    wave = plan.largest * per_wave

    def trial(readers: str) -> list[WaveMeasurement]:
        part = max(wave // cluster.world, 1)
        crossing = 0 if readers == "every" else wave * (cluster.nodes - 1) // cluster.nodes
        seconds = part / (node_rate / cluster.ranks)
        return [WaveMeasurement(part, seconds, crossing, crossing / cluster.link)] * cluster.world

    profile = LoadProfile(
        total=plan.nbytes,
        owned=owned,
        node_of=[rank // cluster.ranks for rank in range(cluster.world)],
        reader=0,
        waves=-(-len(plan.buckets) // per_wave),
        wave_bytes=wave,
        candidates=READERS,
    )
    return choose_readers(profile, trial, "at the assumed rates")
