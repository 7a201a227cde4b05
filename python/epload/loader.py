"""HierarchicalLoader: plans a load, agrees on it, and runs the plan. Owns the staging buffers."""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from epload import materialise as mat
from epload.broadcast import DEFAULT_BUCKET_BYTES
from epload.checkpoint import Checkpoint, Manifest
from epload.control import DEFAULT_DEADLINE, HEADER_BYTES
from epload.device_staging import DeviceStaging
from epload.device_transfer import DeviceTransfer, staging_bytes
from epload.devices import CPU, check_backend, check_stream, devices_of
from epload.errors import LoadError, ManifestMismatch, ModelMismatch, text_of
from epload.flow import ALGORITHMS, READERS, Flow, buckets_per_wave
from epload.mapping import Mapping
from epload.mapping import resolve as resolve_mapping
from epload.node_memory import NodeMemory
from epload.plan import LoadPlan, describe, explain_difference, make_plan
from epload.report import LoadReport
from epload.sharing import share
from epload.snapshot import Snapshot
from epload.targets import Targets, collect
from epload.topology import Route, Topology
from epload.transfer import Transfer, wave_bytes

T = TypeVar("T")


def load(model: nn.Module, checkpoint: Any, **options: Any) -> LoadReport:
    """Loads a checkpoint into a sharded model: the one-line use. Collective over the whole job.

    ``options`` are those of :class:`HierarchicalLoader` and of its :meth:`~HierarchicalLoader.load`.
    """
    of_load = {name: options.pop(name) for name in ("mapping", "strict", "dtype", "init_missing") if name in options}
    return HierarchicalLoader(**options).load(model, checkpoint, **of_load)


@dataclass
class _Work:
    """One rank's side of one load."""

    targets: Targets
    device: torch.device
    home: torch.device
    """Of tensors on meta, see ``devices.Devices``."""
    checkpoint: Checkpoint | None


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
            readers: ``"one"`` rank ``src`` reads; ``"per_node"`` each node's leader reads, and nothing crosses nodes.
                ``"auto"`` is ``"one"``.
            algorithm: ``"two_level"`` or ``"flat"`` (one group, for comparison). ``"auto"`` is ``"two_level"``.
            bucket_bytes: size of a bucket; each rank has two, and for a model on a device two more in pinned host memory if
                it reads.
            verify: only ``"off"`` in this version.
            deadline: seconds (or timedelta) that ranks wait for one another; 30 minutes if None.
            stream: of the models' device: all device work but the copies from host memory is on it, between a wait for the
                caller's current stream and one of that stream for it. None makes one, kept; for models on CPU only None.
            progress: a bar on rank ``src`` when standard error is a terminal.

        Raises:
            ValueError: an argument is out of range.
        """
        self.readers = _one_of("readers", "one" if readers == "auto" else readers, READERS)
        self.algorithm = _one_of("algorithm", "two_level" if algorithm == "auto" else algorithm, ALGORITHMS)
        _one_of("verify", verify, ("off",))
        if self.readers == "per_node" and self.algorithm == "flat":
            raise ValueError("readers='per_node' has no step between nodes, so it does not go with algorithm='flat'")
        check_stream(stream)
        if bucket_bytes < HEADER_BYTES + 16:
            raise ValueError(f"expected bucket_bytes of at least {HEADER_BYTES + 16}, got {bucket_bytes}")
        self.topology = topology if topology is not None else Topology.default()
        self.topology.check_source(src)
        self.src = src
        self.stream = stream
        self._staging_bytes = bucket_bytes
        self._per_wave = buckets_per_wave(self.topology.nodes, readers, bucket_bytes)
        self.bucket_bytes = bucket_bytes // self._per_wave // 64 * 64 if self._per_wave > 1 else bucket_bytes
        self.progress = progress
        self._control = self.topology.control
        if deadline is None:
            deadline = DEFAULT_DEADLINE
        self._deadline = deadline if isinstance(deadline, timedelta) else timedelta(seconds=deadline)
        self._memory: NodeMemory | None = None
        self._staging: DeviceStaging | None = None
        self._own_streams: dict[torch.device, torch.Stream] = {}
        self._snapshot: Snapshot | None = None
        self._last: tuple[tuple[bytes, Mapping, str], Targets, LoadPlan] | None = None

    def load(
        self,
        model: nn.Module,
        checkpoint: Any,
        *,
        mapping: Mapping | str = "auto",
        strict: bool = True,
        dtype: torch.dtype | None = None,
        init_missing: mat.InitMissing | None = None,
    ) -> LoadReport:
        """Fills the model's parameters and persistent buffers, in place. Collective over the topology's ranks.

        For a model on a device, returns when the work is queued; what the caller queues next on its current stream comes
        after it.

        Args:
            model: any mix of DTensors and plain tensors; on meta, materialised or already used.
            checkpoint: a path, a dict of full tensors or an ``epload.Checkpoint`` on reading ranks; not looked at elsewhere.
            mapping: how checkpoint names become regions of the model's tensors. ``"auto"``: what a transformers model
                declares, else names as they are.
            strict: missing or unexpected keys are an error; else they are listed in the report.
            dtype: for floating-point parameters that are on meta; by default the model's.
            init_missing: called as ``hook(module, path, names)`` after the data for each module with tensors that the
                checkpoint does not fill. By default a transformers model computes its non-persistent buffers itself;
                nothing else is initialised.

        Returns:
            What happened, on every rank; keys are the same on all.

        Raises:
            LoadError: the run failed, the same on every rank. ModelMismatch, ManifestMismatch, and CheckpointError for a
                header: nothing has been changed. Any other: tensors may be materialised and partly written.
            ValueError, TypeError: a caller's mistake, the same on every rank; nothing has been changed.
        """
        self._control.deadline = self._deadline
        report = LoadReport(readers=self.readers, algorithm=self.algorithm, topology=repr(self.topology))
        began = perf_counter()
        with report.timed("plan"), _collector_paused():
            work = self._open(model, checkpoint, dtype, init_missing)
            route, manifest = self._connect(work, checkpoint, report)
            plan = self._agree_on_plan(model, work, manifest, mapping, strict)
        try:
            self._transfer(model, work, plan, route, init_missing, report)
        finally:
            if work.checkpoint is not None and work.checkpoint is not checkpoint:
                work.checkpoint.close()
        report.missing_keys, report.unexpected_keys = list(plan.missing), list(plan.unexpected)
        report.tied_keys, report.casts, report.tensors = list(plan.tied), plan.casts, len(set(plan.slots.tensor))
        report.nbytes = sum(plan.slots.nbytes)
        report.buckets = len(plan.buckets)
        report.seconds = perf_counter() - began
        return report

    # ---- before data moves: every step ends in a round where all ranks hear of a failure ----

    def _reads(self, device: torch.device) -> bool:
        return self.topology.rank in self._flow(device).turns

    def _flow(self, device: torch.device, shared: bool = True) -> Flow:
        """``shared``: whether a node's ranks share their buffers; on a device they never do, but still go in stripes."""
        algorithm = self.algorithm
        stripes = shared if device == CPU else self.readers in ("one", "partitioned")
        if algorithm == "striped" and not (stripes and self.topology.even):
            algorithm = "two_level"
        shared = shared and device == CPU
        return Flow(self.topology.nodes, self.topology.rank, self.src, self.readers, algorithm, shared)

    def _route(self, device: torch.device, src: int) -> Route:
        """That of the manifest, and of the data unless that is striped through shared memory."""
        algorithm = self._flow(device).algorithm
        if algorithm == "flat":
            return self.topology.flat_route(src)
        return (self.topology.striped_route if algorithm == "striped" and device != CPU else self.topology.route)(src)

    def _stream_on(self, device: torch.device) -> torch.Stream | None:
        """The one given, or the loader's own; None for the CPU."""
        if device == CPU or self.stream is not None:
            return self.stream
        if device not in self._own_streams:
            self._own_streams[device] = torch.Stream(device)
        return self._own_streams[device]

    def _open(
        self, model: nn.Module, checkpoint: Any, dtype: torch.dtype | None, init_missing: mat.InitMissing | None
    ) -> _Work:
        work, failure = _attempt(lambda: self._inspect(model, checkpoint, dtype, init_missing))
        self._control.settle("opening the checkpoint", failure, self._options(work.device if work else CPU), _all_equal)
        assert work is not None
        return work

    def _bucket_bytes(self, device: torch.device) -> int:
        """On CPU several buckets may share a staging buffer."""
        return self.bucket_bytes if device == CPU else self._staging_bytes

    def _options(self, device: torch.device) -> str:
        """What ranks must agree on before they can so much as share the manifest."""
        return (
            f"readers={self.readers} algorithm={self.algorithm} src={self.src} "
            f"bucket_bytes={self._bucket_bytes(device)} device={device.type}"
        )

    def _inspect(
        self, model: nn.Module, checkpoint: Any, dtype: torch.dtype | None, init_missing: mat.InitMissing | None
    ) -> _Work:
        targets = self._snapshot.read(model, dtype) if self._snapshot is not None else None
        if targets is None:
            targets = collect(model, dtype)
            if self._last is not None:  # one load pays for nothing that only the next one gains from
                self._snapshot = Snapshot(model, targets, dtype)
        if targets.lost and init_missing is None and mat.default_init(model) is None:
            raise ModelMismatch(
                f"buffers {', '.join(sorted(targets.lost)[:5])} are on meta and no checkpoint holds them "
                "(they are not persistent); pass init_missing=hook(module, path, names) to compute them"
            )
        device, home = devices_of(targets, mat.offloaded(model), self.stream)
        check_backend(self.topology.group, device)
        source = None
        if self._reads(device) and (self.topology.rank == self.src or not isinstance(checkpoint, str | os.PathLike)):
            source = Checkpoint.open(checkpoint)
        return _Work(targets, device, home, source)

    def _connect(self, work: _Work, checkpoint: Any, report: LoadReport) -> tuple[Route, Manifest]:
        """The route of the data, and over it the manifest."""

        def connect() -> tuple[Route, Manifest]:
            try:
                route = self._route(work.device, self.src)
                manifest = self._share_manifest(work, route, report)
                if self._reads(work.device) and work.checkpoint is None:
                    work.checkpoint = Checkpoint.join(checkpoint, manifest)
                return route, work.checkpoint.manifest if work.checkpoint is not None else manifest
            except LoadError:
                raise
            except Exception as error:
                raise LoadError(f"sharing the manifest: {text_of(error)}") from error

        made, failure = _attempt(connect)
        try:
            self._control.settle("sharing the manifest", failure, patience=2)
        except Exception:
            self.topology.retire()
            raise
        assert made is not None
        return made

    def _share_manifest(self, work: _Work, route: Route, report: LoadReport) -> Manifest:
        """The source's manifest, on every rank."""
        known = work.checkpoint.manifest if work.checkpoint is not None and self.topology.rank == self.src else None
        if len(self.topology.ranks) == 1:
            assert known is not None
            return known
        compact = known.compact if known is not None else b""
        nbytes = self._control.settle("sharing the manifest", None, len(compact), lambda views: views[self.src])
        flow = self._flow(work.device)
        received, steps = share(compact, nbytes, flow, route, self._stream_on(work.device))
        report.transport_steps += steps
        return known if known is not None else Manifest.from_compact(received)

    def _agree_on_plan(
        self, model: nn.Module, work: _Work, manifest: Manifest, mapping: Mapping | str, strict: bool
    ) -> LoadPlan:
        rules, failure = _attempt(lambda: resolve_mapping(mapping, model))
        self._control.settle("planning", failure)
        assert rules is not None
        bucket_bytes = self._bucket_bytes(work.device)
        options = f"{self._options(work.device)} strict={strict} mapping={rules}"

        def make() -> LoadPlan:
            plan = self._plan(manifest, work.targets, rules, bucket_bytes, options)
            if strict and (plan.missing or plan.unexpected):
                raise ModelMismatch(_spell_keys(manifest, plan))
            return plan

        plan, failure = _attempt(make)
        fingerprint = plan.fingerprint.hex() if plan is not None else ""
        fingerprints = self._control.settle("planning", None, fingerprint, _distinct)
        if "" in fingerprints or len(fingerprints) > 1:
            self._disagree(describe(manifest, work.targets, bucket_bytes, options))
            self._control.settle("planning", failure)
            raise ManifestMismatch("the ranks made different plans of the same checkpoint and model, nothing was moved")
        assert plan is not None
        return plan

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
        self, manifest: Manifest, targets: Targets, mapping: Mapping, bucket_bytes: int, options: str
    ) -> LoadPlan:
        """A plan depends on nothing but its inputs, so that of the last load is kept for a load of the same kind."""
        inputs = (manifest.digest, mapping, options)
        if self._last is None or self._last[0] != inputs or not targets.same_as(self._last[1]):
            plan = make_plan(manifest, targets, mapping, bucket_bytes, options)
            self._last = (inputs, replace(targets, tensors=[]), plan)
        return self._last[2]

    # ---- data ----

    def _transfer(
        self,
        model: nn.Module,
        work: _Work,
        plan: LoadPlan,
        route: Route,
        init_missing: mat.InitMissing | None,
        report: LoadReport,
    ) -> None:
        memory = self._reserve(wave_bytes(plan, self._per_wave)) if work.device == CPU else None

        def prepare() -> list[Tensor]:
            with report.timed("materialise"):
                mat.materialise(model, work.targets, work.home)
                if memory is not None:
                    memory.board.clear()
                else:
                    self._reserve_on(work.device, staging_bytes(plan, self.readers))
                return work.targets.local()

        local, failure = _attempt(prepare)
        self._control.settle("materialising the model", failure)
        assert local is not None
        transfer: Transfer | DeviceTransfer
        if memory is not None:
            transfer = self._by_memory(work, plan, route, memory, local, report)
        else:
            transfer = self._by_stream(work, plan, local, report)
        report.algorithm = transfer.flow.algorithm

        def move() -> None:
            try:
                transfer.run(shown=self.progress and self.topology.rank == self.src)
                self._initialise(model, work, plan, init_missing, report)
            except LoadError:
                raise
            except Exception as error:
                raise LoadError(f"rank {self.topology.rank}: {text_of(error)}") from error

        _, failure = _attempt(move)
        if transfer.broken:
            transfer.memory.abandon()
        try:
            self._control.settle("the transfer", failure, patience=2)
        except LoadError:
            self._memory = self._staging = None
            self.topology.retire()
            raise

    def _by_memory(
        self, work: _Work, plan: LoadPlan, route: Route, memory: NodeMemory, local: list[Tensor], report: LoadReport
    ) -> Transfer:
        report.peak_staging = sum(buffer.nbytes for buffer in memory.buffers)
        flow = self._flow(work.device, memory.shared)
        if flow.algorithm == "striped":
            route = self.topology.striped_route(self.src)
        return Transfer(plan, self._per_wave, flow, route, memory, local, work.checkpoint, report, self._deadline)

    def _by_stream(self, work: _Work, plan: LoadPlan, local: list[Tensor], report: LoadReport) -> DeviceTransfer:
        staging, flow = self._staging, self._flow(work.device)
        assert staging is not None
        report.peak_staging = staging.footprint
        stream = staging.stream
        report.stream = f"{stream.device} {stream.stream_id}, {'the loader' if self.stream is None else 'the caller'}'s"
        if self.readers == "every" or len(self.topology.ranks) == 1:
            routes = {}
        elif self.readers == "per_node":
            route = self._route(work.device, self.src)
            routes = {route.leader: replace(route, src=route.leader, inter_group="")}
        else:
            routes = {reader: self._route(work.device, reader) for reader in flow.turns}
        return DeviceTransfer(plan, flow, routes, staging, local, work.checkpoint, report)

    def _reserve_on(self, device: torch.device, nbytes: int) -> None:
        """Staging for a device, kept for the next load."""
        stream, reads = self._stream_on(device), self._reads(device)
        assert stream is not None
        if self._staging is None or not self._staging.serves(device, nbytes, reads):
            self._staging = None
            self._staging = DeviceStaging(device, stream, nbytes, reads)

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
        lost = work.targets.lost
        names = lost if init_missing is None else {*lost, *plan.missing}
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


def _spell_keys(manifest: Manifest, plan: LoadPlan) -> str:
    said = [f"{manifest.source} does not fit the model"]
    for title, keys in (("missing from it", plan.missing), ("unexpected in it", plan.unexpected)):
        if keys:
            said.append(f"{len(keys)} {title}: {', '.join(keys[:10])}{', ...' if len(keys) > 10 else ''}")
    return "; ".join(said) + ". Pass mapping= if names or layouts differ, strict=False to load what fits"
