"""HierarchicalLoader: plans a load, agrees on it, and runs the plan. Owns the staging buffers."""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import reduce
from operator import or_
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from epload import log, quantised, sharing
from epload import materialise as mat
from epload.auto import Job, Measured, choose
from epload.broadcast import DEFAULT_BUCKET_BYTES
from epload.buffers import check_lost, find_holders, share
from epload.checkpoint import Checkpoint
from epload.control import DEFAULT_DEADLINE, HEADER_BYTES
from epload.device_side import DeviceSide
from epload.device_staging import DeviceStaging
from epload.device_transfer import DeviceTransfer, staging_bytes
from epload.devices import CPU, check_backend, check_stream, devices_of
from epload.errors import CheckpointError, LoadError, ManifestMismatch, ModelMismatch, text_of
from epload.flow import ALGORITHMS, READERS, Flow, buckets_per_wave, wave_limit
from epload.framing import Framing
from epload.manifest import Manifest
from epload.mapping import Mapping, spell_misfits
from epload.mapping import resolve as resolve_mapping
from epload.node_memory import Board, NodeMemory
from epload.parts import LocalModules, OuterShard, Parts
from epload.plan import LoadPlan, describe, explain_difference, make_plan
from epload.proof import VERIFY, Proof
from epload.report import LoadReport, progress_bar
from epload.snapshot import Snapshot
from epload.targets import DTypes, Targets, collect
from epload.topology import Route, Topology
from epload.transfer import SLOWEST, Transfer, wave_bytes
from epload.upload import upload_bytes
from epload.watch import Watch

T = TypeVar("T")
Strict = bool | Literal["shapes"]


def load(model: nn.Module, checkpoint: Any, **options: Any) -> LoadReport:
    """Loads a checkpoint into a sharded model: the one-line use. Collective over the whole job.

    ``options`` are those of :class:`HierarchicalLoader` and of its :meth:`~HierarchicalLoader.load`.
    """
    names = ("mapping", "strict", "dtype", "init_missing", "outer_shards", "local_modules")
    of_load = {name: options.pop(name) for name in names if name in options}
    return HierarchicalLoader(**options).load(model, checkpoint, **of_load)


class _Announced(NamedTuple):
    """What the source rank says of its manifest before it sends it."""

    nbytes: int
    """Of its compact form; 0 if every rank has it, from the load before."""
    identity: str
    about: list[Any]


@dataclass
class _Work:
    """One rank's side of one load."""

    targets: Targets
    device: torch.device
    home: torch.device
    """Of tensors on meta, see ``devices.Devices``."""
    checkpoint: Checkpoint | None
    local_modules: bool
    """Whether ranks may hold different modules."""
    manifest: _Announced = field(default_factory=lambda: _Announced(0, "", []))
    holders: dict[str, int] = field(default_factory=dict)
    """Buffers that no checkpoint holds and some rank lacks, each with a rank that has it."""


@dataclass(frozen=True)
class _Agreed:
    """What all ranks have found to be the same before data moves."""

    manifest: Manifest
    plan: LoadPlan
    route: Route
    per_wave: int
    all_read: bool
    """Whether every rank has opened the checkpoint."""
    owned: list[int]
    """Bytes that each rank copies into its shards, in the order of the ranks."""


class HierarchicalLoader:
    """Loads checkpoints into models whose parameters are sharded over the ranks of a topology.

    Keeps its staging buffers and process groups between loads, so that a second load pays for neither.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        *,
        src: int = 0,
        readers: str = "auto",
        algorithm: str = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        verify: str = "off",
        deadline: timedelta | float | None = None,
        stream: torch.Stream | None = None,
        progress: bool = True,
    ) -> None:
        """Collective over the topology's ranks; arguments equal on all of them.

        Args:
            topology: discovered over the whole job if None.
            src: global rank that reads (``readers="one"``) and on whose rail the leaders are.
            readers: ``"one"`` rank ``src`` reads; ``"per_node"`` each node's leader reads, and nothing crosses nodes;
                ``"partitioned"`` readers take turns, and each byte is read once; ``"every"`` each rank reads what it keeps.
                ``"auto"`` chooses by what the first waves of the load show.
            algorithm: ``"two_level"``, ``"striped"`` or ``"flat"`` (one group, for comparison). ``"auto"`` is ``"two_level"``;
                for a model on a device, buckets that do not cross nodes then go through memory that a node's ranks share,
                out of which each copies what it keeps.
            bucket_bytes: size of a bucket; each rank has two, and for a model on a device two more in pinned host memory if
                it reads.
            verify: ``"buckets"``: every bucket carries a checksum, which each node checks before it unpacks. ``"sample"`` and
                ``"full"``: also, after the load, ranks prove a sixteenth or all of their shards against the checkpoint, which
                is read once more, by all ranks that have it together.
            deadline: seconds (or timedelta) without progress after which a load has failed; 30 minutes if None. A step that
                moves bytes has what they take at 10 MB/s on top.
            stream: of the models' device: all device work but the copies from host memory is on it, between a wait for the
                caller's current stream and one of that stream for it. None makes one, kept; for models on CPU only None.
            progress: a bar on rank ``src`` when standard error is a terminal.

        Raises:
            ValueError: an argument is out of range.
        """
        log.configure()
        self.readers = _one_of("readers", readers, ("auto", *READERS))
        self.algorithm = _one_of("algorithm", "two_level" if algorithm == "auto" else algorithm, ALGORITHMS)
        self.verify = _one_of("verify", verify, VERIFY)
        if self.readers == "per_node" and self.algorithm == "flat":
            raise ValueError("readers='per_node' has no step between nodes, so it does not go with algorithm='flat'")
        check_stream(stream)
        if bucket_bytes < HEADER_BYTES + 16:
            raise ValueError(f"expected bucket_bytes of at least {HEADER_BYTES + 16}, got {bucket_bytes}")
        self.topology = topology if topology is not None else Topology.default()
        self.topology.check_source(src)
        self.src = src
        self.stream = stream
        self.bucket_bytes = bucket_bytes
        self.progress = progress
        self._control = self.topology.control
        self._watch = Watch(self._control, self.topology.node)
        if deadline is None:
            deadline = DEFAULT_DEADLINE
        self._deadline = deadline if isinstance(deadline, timedelta) else timedelta(seconds=deadline)
        self._memory: NodeMemory | None = None
        self._device = DeviceSide(self.topology, algorithm, src, stream)
        self._snapshot: Snapshot | None = None
        self._manifest: Manifest | None = None
        """That of the load before."""
        self._last: tuple[tuple[bytes, Mapping, str, frozenset[int]], Targets, LoadPlan] | None = None

    def load(
        self,
        model: nn.Module,
        checkpoint: Any,
        *,
        mapping: Mapping | str = "auto",
        strict: Strict = True,
        dtype: DTypes = None,
        init_missing: mat.InitMissing | None = None,
        outer_shards: Sequence[OuterShard] = (),
        local_modules: Sequence[LocalModules] = (),
    ) -> LoadReport:
        """Fills the model's parameters and persistent buffers, in place. Collective over the topology's ranks.

        For a model on a device, returns when the work is queued; what the caller queues next on its current stream comes
        after it.

        Args:
            model: any mix of DTensors and plain tensors; on meta, materialised or already used.
            checkpoint: a path, a dict of full tensors or an ``epload.Checkpoint`` on reading ranks; not looked at elsewhere.
            mapping: how checkpoint names become regions of the model's tensors. ``"auto"``: what a transformers model
                declares, else names as they are.
            strict: keys that are missing, unexpected or of another shape are an error. With False they are listed in the
                report and left alone; with ``"shapes"`` only another shape is an error, as in torch's own loading.
            dtype: for floating-point parameters that are on meta, or a dict from regular expressions to dtypes; by default
                the model's.
            init_missing: called as ``hook(module, path, names)`` after the data for each module with tensors that the
                checkpoint does not fill. By default a transformers model computes its non-persistent buffers itself;
                nothing else is initialised.
            outer_shards: tensors of the model that are this rank's part of larger ones, though they do not say so.
            local_modules: modules that hold what other ranks need not have.

        Returns:
            What happened, on every rank; keys are the same on all.

        Raises:
            LoadError: the run failed, the same on every rank. ModelMismatch, ManifestMismatch, and CheckpointError for a
                header: nothing has been changed. Any other: tensors may be materialised and partly written.
            ValueError, TypeError: a caller's mistake, the same on every rank; nothing has been changed.
        """
        self._control.begin(self._deadline)
        with self._watch:
            try:
                return self._load(model, checkpoint, mapping, strict, dtype, init_missing, outer_shards, local_modules)
            except BaseException as error:
                failure = self._control.conclude(error)
                if failure is None or not failure.clean:
                    self._memory = None
                    self._device.forget()
                    self.topology.retire()
                if failure is None or not isinstance(error, Exception):
                    raise
                raised = failure.error()
                if (type(raised), str(raised)) == (type(error), str(error)):
                    raise
                raise raised from error

    def _load(
        self,
        model: nn.Module,
        checkpoint: Any,
        mapping: Mapping | str,
        strict: Strict,
        dtype: DTypes,
        init_missing: mat.InitMissing | None,
        outer_shards: Sequence[OuterShard],
        local_modules: Sequence[LocalModules],
    ) -> LoadReport:
        report = LoadReport(
            readers=self.readers, algorithm=self.algorithm, verify=self.verify, topology=repr(self.topology)
        )
        began = perf_counter()
        with report.timed("plan"), _collector_paused():
            parts = Parts(tuple(outer_shards), tuple(local_modules)) if outer_shards or local_modules else None
            work = self._open(model, checkpoint, dtype, parts)
            computed = init_missing is not None or mat.default_init(model) is not None
            route, manifest = self._connect(work, report)
            agreed = self._agree_on_plan(model, checkpoint, work, route, manifest, mapping, strict, computed)
            plan = agreed.plan
            unfilled = self._unfilled_anywhere(work, plan)
        try:
            self._transfer(model, work, agreed, init_missing, report)
        finally:
            if work.checkpoint is not None and work.checkpoint is not checkpoint:
                work.checkpoint.close()
        report.missing_keys, report.mismatched_keys = unfilled
        report.unexpected_keys = list(plan.unexpected)
        report.tied_keys, report.casts, report.tensors = list(plan.tied), plan.casts, len(set(plan.slots.tensor))
        report.nbytes = sum(plan.slots.nbytes)
        report.buckets = len(plan.buckets)
        report.seconds = perf_counter() - began
        return report

    # ---- before data moves: every step ends in a round where all ranks hear of a failure ----

    def _reads(self, device: torch.device) -> bool:
        """Whether this rank may be asked to read. With "auto" whoever can."""
        readers = "every" if self.readers == "auto" else self.readers
        return self.topology.rank in self._flow(device, True, readers).turns

    def _flow(self, device: torch.device, shared: bool, readers: str) -> Flow:
        """``shared``: whether a node's ranks share their staging buffers in host memory."""
        if device != CPU:
            return self._device.flow(readers, shared)
        algorithm = self.algorithm
        if algorithm == "striped" and self._why_not_striped(device, shared, readers):
            algorithm = "two_level"
        return Flow(self.topology.nodes, self.topology.rank, self.src, readers, algorithm, shared)

    def _why_not_striped(self, device: torch.device, shared: bool, readers: str) -> str:
        """Empty if nothing speaks against it. Where no bucket moves between ranks, nothing does."""
        if device != CPU:
            return self._device.why_not_striped(readers)
        if readers == "every" or len(self.topology.ranks) == 1:
            return ""
        if not self.topology.even:
            return "node sizes differ"
        return "" if shared else "the ranks of a node share no memory"

    def _route(self, device: torch.device) -> Route:
        """That of the manifest, and of the data unless it is striped."""
        if device != CPU:
            return self._device.route(self._device.flow("one"), self.src)
        topology = self.topology
        return topology.flat_route(self.src) if self.algorithm == "flat" else topology.route(self.src)

    def _open(self, model: nn.Module, checkpoint: Any, dtype: DTypes, parts: Parts | None) -> _Work:
        work, failure = _attempt(lambda: self._inspect(model, checkpoint, dtype, parts))
        said = self._options(work.device if work is not None else CPU)
        options = f"{said} local_modules={parts is not None and bool(parts.local_modules)}"
        view: dict[str, Any] = {
            "options": options,
            "lost": work is not None and bool(work.targets.lost),
            "known": self._manifest and self._manifest.identity,
        }
        if work is not None and self.topology.rank == self.src and len(self.topology.ranks) > 1:
            assert work.checkpoint is not None
            ours = work.checkpoint.manifest
            view["manifest"] = len(ours.compact), ours.identity, ours.about

        def decide(views: dict[int, dict[str, Any]]) -> list[Any]:
            _all_equal({rank: view["options"] for rank, view in views.items()})
            announced = None
            if len(views) > 1:
                announced = _Announced(*views[self.src]["manifest"])
                if all(view["known"] == announced.identity for rank, view in views.items() if rank != self.src):
                    announced = announced._replace(nbytes=0)
            return [announced, len({view["lost"] for view in views.values()}) > 1]

        announced, uneven = self._control.settle("opening the checkpoint", failure, view, decide)
        assert work is not None
        if announced is not None:
            work.manifest = _Announced(*announced)
        if uneven:  # some ranks have buffers that others lack
            work.holders.update(find_holders(self._control, model, work.targets))
        return work

    def _options(self, device: torch.device) -> str:
        """What ranks must agree on before they can so much as share the manifest."""
        by_node = " by node" if device != CPU and self._share_buffers(device) else ""
        return (
            f"readers={self.readers} algorithm={self.algorithm}{by_node} src={self.src} bucket_bytes={self.bucket_bytes} "
            f"device={device.type} verify={self.verify}"
        )

    def _inspect(self, model: nn.Module, checkpoint: Any, dtype: DTypes, parts: Parts | None) -> _Work:
        asked = (dtype, parts)
        targets = self._snapshot.read(model, asked) if self._snapshot is not None else None
        if targets is None:
            targets = collect(model, dtype, parts)
            if self._last is not None:  # one load pays for nothing that only the next one gains from
                self._snapshot = Snapshot(model, targets, asked)
        device, home = devices_of(targets, mat.offloaded(model), self.stream)
        check_backend(self.topology.group, device)
        source = None
        path = isinstance(checkpoint, str | os.PathLike)
        if self.topology.rank == self.src or (self._reads(device) and not path and self.readers != "auto"):
            source = Checkpoint.open(checkpoint, self._manifest)
            if source.once and self._proves:
                raise ValueError(
                    f"verify={self.verify!r} reads the checkpoint again after the load, but this one can be read only once: "
                    "leave out consume=True, or pass verify='buckets'"
                )
        return _Work(targets, device, home, source, parts is not None and bool(parts.local_modules))

    def _connect(self, work: _Work, report: LoadReport) -> tuple[Route, Manifest]:
        """The route of the data, and over it the manifest."""
        self._control.doing = "sharing the manifest"
        try:
            route = self._route(work.device)
            return route, self._share_manifest(work, route, report)
        except LoadError:
            raise
        except RuntimeError as error:
            raise LoadError(f"sharing the manifest: {text_of(error)}") from error

    def _join(self, work: _Work, checkpoint: Any, manifest: Manifest) -> Manifest:
        """Opens the checkpoint on the other ranks that read, by the source's manifest."""
        if self.readers == "auto" and manifest.places is None:
            return manifest
        if self._reads(work.device) and work.checkpoint is None:
            try:
                work.checkpoint = Checkpoint.join(checkpoint, manifest)
            except (CheckpointError, TypeError):
                if self.readers != "auto":
                    raise
        return work.checkpoint.manifest if work.checkpoint is not None else manifest

    def _share_manifest(self, work: _Work, route: Route, report: LoadReport) -> Manifest:
        """The source's manifest, on every rank."""
        nbytes, _, about = work.manifest
        reads = self.topology.rank == self.src
        if reads:
            assert work.checkpoint is not None
            known = work.checkpoint.manifest
        elif nbytes == 0:
            assert self._manifest is not None
            known = self._manifest.seen_as(about)
        if nbytes == 0:
            return known
        compact, flow = known.compact if reads else bytes(nbytes), self._flow(work.device, False, "one")
        if work.device == CPU:
            board, limit = Board.alone(), self._control.deadline.total_seconds() + nbytes / SLOWEST
            with self._watch.guards(board):
                received, steps = sharing.through_host(compact, flow, route, board, limit)
        else:
            received, steps = sharing.on_stream(compact, flow, route, self._device.stream(work.device))
        report.transport_steps += steps
        return known if reads else Manifest.from_compact(received, about)

    def _agree_on_plan(
        self,
        model: nn.Module,
        checkpoint: Any,
        work: _Work,
        route: Route,
        known: Manifest,
        mapping: Mapping | str,
        strict: Strict,
        computed: bool,
    ) -> _Agreed:
        """``computed``: whether somebody computes the buffers that no checkpoint holds."""

        def prepare() -> tuple[Manifest, Mapping]:
            manifest = self._join(work, checkpoint, known)
            if not computed:
                check_lost(work.targets, work.holders)
            if strict not in (True, False, "shapes"):
                raise ValueError(f"expected strict to be True, False or 'shapes', got {strict!r}")
            return manifest, resolve_mapping(mapping, model, work.targets.index)

        prepared, unprepared = _attempt(prepare)
        plan, failure, options = None, None, ""
        per_wave = 0
        if prepared is not None:
            manifest, rules = prepared
            self._manifest = manifest
            wave = wave_limit(manifest.nbytes, self.bucket_bytes)
            per_wave = self._per_wave(work.device, wave)
            options = f"{self._options(work.device)} strict={strict} mapping={rules}"

            def make(wanted: frozenset[int] = frozenset()) -> LoadPlan:
                size = wave // per_wave if self._share_buffers(work.device) else wave
                return self._plan(manifest, work.targets, rules, size, options, wanted)

            wanted = self._wanted_by_any(manifest, make) if work.local_modules else frozenset()

            def check() -> LoadPlan:
                plan = make(wanted)
                if (strict and plan.mismatched) or (strict is True and (plan.missing or plan.unexpected)):
                    raise ModelMismatch(_spell_keys(manifest, plan, strict))
                return plan

            plan, failure = _attempt(check)
        view = [plan.fingerprint.hex() if plan else "", work.checkpoint is not None, plan.owned if plan else 0]

        def decide(views: dict[int, list[Any]]) -> list[Any]:
            ordered = [views[rank] for rank in self.topology.ranks]
            return [
                _distinct({rank: v[0] for rank, v in views.items()}),
                all(v[1] for v in ordered),
                [v[2] for v in ordered],
            ]

        fingerprints, all_read, owned = self._control.settle("planning", unprepared, view, decide, patience=2)
        if "" in fingerprints or len(fingerprints) > 1:
            self._disagree(describe(manifest, work.targets, self.bucket_bytes, options))
            self._control.settle("planning", failure)
            raise ManifestMismatch("the ranks made different plans of the same checkpoint and model, nothing was moved")
        assert plan is not None
        return _Agreed(manifest, plan, route, per_wave, all_read, owned)

    def _share_buffers(self, device: torch.device) -> bool:
        """Whether several buckets may be in one staging buffer."""
        return device == CPU or self._device.needs_memory(self.readers)

    def _per_wave(self, device: torch.device, wave: int) -> int:
        """Buckets that make a wave: those that share a staging buffer, or on a device one for each leader that reads."""
        if self._share_buffers(device):
            return buckets_per_wave(self.topology.nodes, self.readers, wave)
        return len(self.topology.nodes) if self.readers in ("partitioned", "auto") else 1

    def _wanted_by_any(self, manifest: Manifest, make: Callable[[], LoadPlan]) -> frozenset[int]:
        """Checkpoint tensors that some rank has a place for, by number. A rank that cannot plan ends the load here; one that
        could not even prepare has its say in this same round."""
        plan, failure = _attempt(make)
        left = {*plan.unexpected, *plan.tied} if plan is not None else set()
        # What has another shape here is sent too: harmless, and it may fit elsewhere.
        view = f"{sum(1 << i for i, name in enumerate(manifest.names) if name not in left):x}"

        def either(views: dict[int, str]) -> str:
            return f"{reduce(or_, (int(text, 16) for text in views.values())):x}"

        bits = int(self._control.settle("planning", failure, view, either, patience=2), 16)
        return frozenset(i for i in range(len(manifest.names)) if bits >> i & 1)

    def _unfilled_anywhere(self, work: _Work, plan: LoadPlan) -> list[list[str]]:
        """Missing and mismatched names of the model, on whichever rank."""
        kinds = [list(plan.missing), list(plan.mismatched)]
        if not work.local_modules:
            return kinds
        known = {work.targets.names[i]: name for name, i in reversed(work.targets.index.items())}

        def all_of(views: dict[int, list[list[str]]]) -> list[list[str]]:
            return [list(dict.fromkeys(name for view in views.values() for name in view[kind])) for kind in (0, 1)]

        mine = [[known[name] for name in names] for names in kinds]
        unfilled: list[list[str]] = self._control.settle("the report", None, mine, all_of)
        return unfilled

    def _disagree(self, view: list[str]) -> None:
        """Raises ManifestMismatch on every rank if what the ranks want to load into what differs."""
        digest = hashlib.blake2b("\n".join(view).encode(errors="backslashreplace"), digest_size=16).hexdigest()
        speakers = list(self._control.settle("planning", None, digest, _distinct).values())
        if len(speakers) == 1:
            return

        def differ(views: dict[int, list[str] | None]) -> None:
            raise explain_difference({r: v for r, v in sorted(views.items()) if v is not None}, min(speakers))

        self._control.settle("planning", None, view if self.topology.rank in speakers else None, differ)

    def _plan(
        self,
        manifest: Manifest,
        targets: Targets,
        mapping: Mapping,
        bucket_bytes: int,
        options: str,
        wanted: frozenset[int],
    ) -> LoadPlan:
        """A plan depends on nothing but its inputs, so that of the last load is kept for a load of the same kind."""
        inputs = (manifest.digest, mapping, f"{bucket_bytes} {options}", wanted)
        if self._last is None or self._last[0] != inputs or not targets.same_as(self._last[1]):
            plan = make_plan(manifest, targets, mapping, bucket_bytes, options, wanted)
            self._last = (inputs, replace(targets, tensors=[]), plan)
        return self._last[2]

    # ---- data ----

    def _transfer(
        self,
        model: nn.Module,
        work: _Work,
        agreed: _Agreed,
        init_missing: mat.InitMissing | None,
        report: LoadReport,
    ) -> None:
        plan = agreed.plan
        memory = self._reserve(wave_bytes(plan, agreed.per_wave)) if self._share_buffers(work.device) else None
        shared = memory is not None and memory.shared

        def prepare() -> list[Tensor]:
            with report.timed("materialise"):
                mat.materialise(model, work.targets, work.home)
                if memory is not None:
                    memory.board.clear()
                    report.peak_staging = sum(buffer.nbytes for buffer in memory.buffers)
                if work.device != CPU:
                    staging = self._reserve_on(work.device, agreed, shared)
                    report.peak_staging += staging.footprint
                    report.stream = self._device.spelled(work.device)
                return work.targets.local() + quantised.side_tensors(plan.targets, len(work.targets.names), work.device)

        local, failure = _attempt(prepare)
        self._control.settle("materialising the model", failure)
        assert local is not None
        if work.holders:
            self._control.doing = "sharing buffers"
            stream = self._device.stream(work.device) if work.device != CPU else None
            report.transport_steps += share(model, work.holders, self.topology, stream)
        framing = Framing(plan, self.topology.rank, agreed.manifest, self._control, self.verify != "off")
        waves = 0

        def transfer_of(flow: Flow, buckets: range) -> Transfer | DeviceTransfer:
            nonlocal waves
            route = agreed.route
            source = work.checkpoint if flow.reads else None
            if memory is None or (work.device != CPU and not flow.shared):
                return self._device.transfer(plan, buckets, flow, local, source, report, self._control, framing)
            uploader = self._device.uploader(report) if work.device != CPU else None
            if flow.algorithm == "striped" and flow.crosses:
                route = self.topology.striped_route(self.src)
            transfer = Transfer(
                plan, buckets, agreed.per_wave, flow, route, memory, local, source, report, self._control, framing, waves,
                uploader,
            )  # fmt: skip
            waves += transfer.waves
            return transfer

        def move(readers: str, buckets: range, finish: Callable[[], None] | None = None) -> list[Measured]:
            """Moves some buckets, and ends in a round where all ranks hear of a failure; gives what each rank saw.

            ``finish`` comes after the last of the load.
            """
            flow = self._flow(work.device, shared, readers)
            report.readers, report.algorithm = flow.readers, flow.algorithm
            transfer = transfer_of(flow, buckets)
            before = replace(report.phases["read"]), replace(report.phases["inter_node"])
            try:
                with self._watch.guards(memory.board) if memory is not None else nullcontext():
                    transfer.run(bar)
            except BaseException:
                if transfer.broken:
                    transfer.abandon()
                raise
            if finish is not None:
                if self._proves:
                    self._prove(work, agreed, flow, local, report)
                finish()
            reading, crossing = report.phases["read"], report.phases["inter_node"]
            seen = [
                reading.nbytes - before[0].nbytes, reading.seconds - before[0].seconds,
                crossing.nbytes - before[1].nbytes, crossing.seconds - before[1].seconds,
            ]  # fmt: skip
            views = self._control.settle(
                "the transfer", None, seen, lambda views: [views[rank] for rank in self.topology.ranks],
                patience=2, last=finish is not None,
            )  # fmt: skip
            return [Measured(*view) for view in views]

        shown = self.progress and self.topology.rank == self.src
        with progress_bar(plan.nbytes, shown) as bar:
            readers, begin = self._choose_readers(agreed, work.device, shared, report, move)
            rest = range(begin, len(plan.buckets))

            def finish() -> None:
                self._control.doing = "initialises what the checkpoint lacks"
                with self._device.work(work.device) if plan.scalings else nullcontext():
                    quantised.multiply(plan.scalings, plan.targets, local)
                self._initialise(model, work, plan, init_missing, report)

            move(readers, rest, finish)

    @property
    def _proves(self) -> bool:
        return self.verify in ("sample", "full")

    def _prove(self, work: _Work, agreed: _Agreed, flow: Flow, local: list[Tensor], report: LoadReport) -> None:
        """Before the tensors are scaled or initialised, as the checkpoint knows nothing of that."""
        with report.timed("verify"):
            verifiers = self.topology.ranks if agreed.all_read else flow.turns
            proof = Proof(agreed.plan, verifiers, self.verify == "sample")
            letters = self._control.deal("the digests", proof.claims(local))

            def check() -> None:
                if letters:
                    assert work.checkpoint is not None
                    for nbytes in proof.check(self.topology.rank, letters, work.checkpoint, agreed.manifest):
                        self._control.progress += nbytes

            _, failure = _attempt(check)
            self._control.settle("verification", failure, patience=2)
            self._control.forget_letters()

    def _choose_readers(
        self,
        agreed: _Agreed,
        device: torch.device,
        shared: bool,
        report: LoadReport,
        move: Callable[[str, range], list[Measured]],
    ) -> tuple[str, int]:
        """How to read, and the first bucket that the trials have left."""
        said = []
        begin = 0
        readers = self.readers
        if readers == "auto" and not agreed.all_read:
            readers = "one"
            said.append(f"chose one: only rank {self.src} is known to have the checkpoint")
        elif readers == "auto":
            plan = agreed.plan

            def trial(way: str) -> list[Measured]:
                nonlocal begin
                buckets = range(begin, min(begin + agreed.per_wave, len(plan.buckets)))
                begin = buckets.stop
                return move(way, buckets)

            nodes = self.topology.nodes
            readers, why = choose(
                Job(
                    total=plan.nbytes,
                    owned=agreed.owned,
                    node_of=[next(i for i, node in enumerate(nodes) if rank in node) for rank in self.topology.ranks],
                    reader=self.topology.ranks.index(self.src),
                    waves=-(-len(plan.buckets) // agreed.per_wave),
                    wave_bytes=plan.largest * agreed.per_wave,
                    ways=[way for way in READERS if way != "per_node" or self.algorithm != "flat"],
                ),
                trial,
            )
            said.append(why)
        if self.algorithm == "striped" and (why := self._why_not_striped(device, shared, readers)):
            said.append(f"two_level in place of striped, as {why}")
        report.chosen = "; ".join(said)
        return readers, begin

    def _reserve_on(self, device: torch.device, agreed: _Agreed, shared: bool) -> DeviceStaging:
        """Staging for a device, kept for the next load. ``shared``: whether there is memory that a node's ranks share."""
        readers = self.readers if self.readers != "auto" else "every" if agreed.all_read else "one"
        by_node = self._flow(device, shared, readers).shared
        nbytes = upload_bytes(agreed.plan) if by_node else staging_bytes(agreed.plan, readers)
        reads = by_node or self._flow(device, shared, readers).reads
        return self._device.reserve(device, nbytes, reads)

    def _reserve(self, nbytes: int) -> NodeMemory:
        """Staging buffers of at least ``nbytes``, kept for the next load. Collective when there are none yet."""
        if self._memory is None or self._memory.nbytes < nbytes:
            self._memory = None
            alone = self.algorithm == "flat" or self.readers == "every" or len(self.topology.ranks) == 1
            if alone:
                self._memory = NodeMemory.private(self.topology.rank, nbytes)
            else:
                self._memory = NodeMemory.for_node(self._control, self.topology.nodes, nbytes)
        return self._memory

    def _initialise(
        self, model: nn.Module, work: _Work, plan: LoadPlan, init_missing: mat.InitMissing | None, report: LoadReport
    ) -> None:
        lost = work.targets.lost - set(work.holders)
        names = lost if init_missing is None else {*lost, *plan.missing, *plan.mismatched}
        hook = init_missing if init_missing is not None else mat.default_init(model)
        for module, path, leaves in ((u.module, u.path, u.names) for u in mat.unfilled(model, names)):
            assert hook is not None
            hook(module, path, leaves)
            report.initialised += [f"{path}.{leaf}" if path else leaf for leaf in leaves]


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"expected {name} to be one of {', '.join(allowed)}, got {value!r}")
    return value


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Planning makes many small objects; collecting in the middle walks all of the model's modules, several times."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _attempt(step: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return step(), None
    except Exception as error:
        return None, error


def _distinct(views: dict[int, str]) -> dict[str, int]:
    """Each distinct view with the first rank that has it."""
    return {view: rank for rank, view in reversed(views.items())}


def _all_equal(options: dict[int, str]) -> None:
    by_text: dict[str, list[int]] = {}
    for rank, text in options.items():
        by_text.setdefault(text, []).append(rank)
    if len(by_text) > 1:
        said = "; ".join(f"ranks {ranks} have {text}" for text, ranks in by_text.items())
        raise ManifestMismatch(f"the ranks' loaders have different options, nothing was moved: {said}")


def _spell_keys(manifest: Manifest, plan: LoadPlan, strict: Strict) -> str:
    said = [f"{manifest.source} does not fit the model"]
    for title, keys in (("missing from it", plan.missing), ("unexpected in it", plan.unexpected)):
        if keys and strict is True:
            said.append(f"{len(keys)} {title}: {', '.join(keys[:10])}{', ...' if len(keys) > 10 else ''}")
    if plan.mismatched:
        said.append(f"{len(plan.mismatched)} of another shape: {spell_misfits(list(plan.mismatched.values()))}")
    return "; ".join(said) + ". Pass mapping= if names or layouts differ, strict=False to load what fits"
