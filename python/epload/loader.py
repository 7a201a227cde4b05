"""HierarchicalLoader: one load after another, each agreed on before data moves. Owns the staging buffers."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from epload.broadcast import DEFAULT_BUCKET_BYTES
from epload.cluster.single_flight import Call, Refused, alone
from epload.cluster.topology import Topology, alone_under_a_launcher
from epload.control.control import DEFAULT_TIMEOUT
from epload.core import collector, log
from epload.errors import LoadError
from epload.loading.buffers import share
from epload.loading.preparation import Preparation, Prepared, Request, attempt
from epload.loading.routes import Options, Ways
from epload.mapping import dequantize
from epload.mapping.mapping import Mapping
from epload.model import materialize as mat
from epload.model import memory_pattern
from epload.model.devices import CPU, check_stream
from epload.model.dtensor import local_tensors
from epload.model.expert_parallel import LocalModules, OuterShard, Parts
from epload.model.initialization import InitMissing
from epload.model.state_entries import check_filled
from epload.model.targets import DTypes, owned, stage
from epload.planning.choose import Job, Measured, choose
from epload.planning.schedule import READERS, Flow
from epload.report import LoadReport, progress_bar
from epload.staging.device import DeviceStaging
from epload.staging.node_memory import NodeMemory
from epload.transport.device_side import DeviceSide
from epload.transport.device_transfer import DeviceTransfer, staging_bytes
from epload.transport.framing import Framing
from epload.transport.local import Bound, Local
from epload.transport.transfer import Transfer, wave_bytes
from epload.transport.upload import upload_bytes
from epload.verify.proof import Proof


def load(model: nn.Module, checkpoint: Any, **options: Any) -> LoadReport:
    """Loads a checkpoint into a sharded model: the one-line use. Collective over the whole job.

    ``options`` are those of :class:`HierarchicalLoader` and of its :meth:`~HierarchicalLoader.load`.
    """
    names = (
        "mapping", "strict", "ignore_mismatched_shapes", "dtype", "init_missing", "outer_shards", "local_modules",
    )  # fmt: skip
    of_load = {name: options.pop(name) for name in names if name in options}
    return HierarchicalLoader(**options).load(model, checkpoint, **of_load)


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
        timeout: timedelta | float | None = None,
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
            verify: ``"buckets"``: every bucket carries a checksum, which each node checks before it unpacks. ``"full"``: after
                the load, ranks prove their shards against the checkpoint, which is read once more, by all ranks that have it
                together; nothing is left for checksums to find. ``"sample"``: checksums, and a sixteenth is proven.
            timeout: seconds (or timedelta) without progress after which a load has failed; 30 minutes if None. A step that
                moves bytes has what they take at 10 MB/s on top.
            stream: of the models' device: all device work but the copies from host memory is on it, between a wait for the
                caller's current stream and one of that stream for it. None makes one, kept; for models on CPU only None.
            progress: a bar on rank ``src`` when standard error is a terminal.

        Raises:
            ValueError, TypeError: an argument is out of range, or of another type.
        """
        log.configure()
        if timeout is None:
            timeout = DEFAULT_TIMEOUT
        if not isinstance(timeout, int | float | timedelta):
            raise TypeError(f"expected timeout to be a number of seconds or a timedelta, got {timeout!r}")
        self._timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        sent = "two_level" if algorithm == "auto" else algorithm
        self.options = Options(readers, sent, src, bucket_bytes, verify)
        check_stream(stream)
        self.topology = topology if topology is not None else Topology.default(timeout=self._timeout)
        self.number = self.topology.number_loader()
        """Among the loaders of its topology, equal on all ranks."""
        self._made_by = threading.current_thread()
        self.topology.check_source(src)
        self.stream = stream
        self.progress = progress
        self._control = self.topology.control
        self._watch = self._control.watch
        self._memory: NodeMemory | None = None
        self._proof: Proof | None = None
        self._bound: Bound | None = None
        self._device = DeviceSide(self.topology, algorithm, src, stream)
        self._ways = Ways(self.topology, self.options, self._device)
        self._preparation = Preparation(self.topology, self.options, self._ways, self._device, self._watch, self.number)

    def load(
        self,
        model: nn.Module,
        checkpoint: Any,
        *,
        mapping: Mapping | str = "auto",
        strict: bool = True,
        ignore_mismatched_shapes: bool = False,
        dtype: DTypes = None,
        init_missing: InitMissing | None = None,
        outer_shards: Sequence[OuterShard] = (),
        local_modules: Sequence[LocalModules] = (),
    ) -> LoadReport:
        """Fills the model's parameters and persistent buffers, in place. Collective over the topology's ranks.

        For a model on a device, returns when the work is queued; what the caller queues next on its current stream comes
        after it.

        Args:
            model: any mix of DTensors and plain tensors; on meta, materialized or already used.
            checkpoint: a path, a dict of full tensors or an ``epload.Checkpoint`` on reading ranks; not looked at elsewhere.
            mapping: how checkpoint names become regions of the model's tensors. ``"auto"``:
                :func:`epload.mapping.from_model`, what a transformers model declares, else names as they are.
            strict: whether missing and unexpected keys are an error, as in ``nn.Module.load_state_dict``. If False, the report
                lists them, and missing parameters keep their values or are initialized.
            ignore_mismatched_shapes: whether to skip parameters that have another shape in the checkpoint. If True, the report
                lists them as ``mismatched_keys``, and they are treated as missing parameters are; if False, they are an error,
                whatever ``strict`` is.
            dtype: for floating-point parameters that are on meta, or a dict from regular expressions to dtypes; by default
                the model's.
            init_missing: called as ``hook(module, path, names)`` after the data for each module with tensors that neither
                the checkpoint fills nor the model itself initializes. A transformers model initializes what was on meta
                as ``from_pretrained`` does: non-persistent buffers, and parameters that ``strict=False`` leaves
                unfilled. What nobody fills is an error.
            outer_shards: tensors of the model that are this rank's part of larger ones, though they do not say so.
            local_modules: modules that hold what other ranks need not have.

        Returns:
            What happened, on every rank; keys are the same on all.

        Raises:
            LoadError: the run failed, the same on every rank. ModelMismatch, ManifestMismatch, and CheckpointError for a
                header: nothing has been changed. Any other, as CheckpointError for a file that was replaced or modified
                during the load: tensors may be materialized and partly written.
            ValueError, TypeError: a caller's mistake, the same on every rank; nothing has been changed.
        """
        try:
            with alone(Call("load()", self.topology, self, self._made_by), self._timeout):
                guard = self._control.guard()
                try:
                    with guard:
                        parts = (
                            Parts(tuple(outer_shards), tuple(local_modules)) if outer_shards or local_modules else None
                        )
                        request = Request(
                            model, checkpoint, mapping, strict, ignore_mismatched_shapes, dtype, parts, init_missing
                        )
                        return self._load(request)
                finally:
                    if guard.failure is not None and not guard.failure.clean:
                        self._memory = None
                        self._device.forget()
                        self.topology.retire()
        except Refused as refused:
            error = refused.failure.error()
        raise error

    def _load(self, request: Request) -> LoadReport:
        asked = self.options
        report = LoadReport(
            readers=asked.readers, algorithm=asked.algorithm, verify=asked.verify, topology=repr(self.topology)
        )
        if warning := alone_under_a_launcher():
            warnings.warn(warning, stacklevel=3)
            report.warnings.append(warning)
        began = perf_counter()
        try:
            with report.timed("plan"), collector.paused():
                work = self._preparation.run(request, self.stream, report)
            self._transfer(request, work, report)
        finally:
            self._preparation.close_checkpoint()
        plan = work.plan
        report.mismatched_keys = work.mismatched
        report.ignored_keys = [*work.ignored, *work.manifest.ignored]
        ignored = set(work.ignored)
        report.missing_keys, report.unexpected_keys = (
            [key for key in keys if key not in ignored] for keys in (work.missing, plan.unexpected)
        )
        report.tied_keys, report.casts, report.tensors = list(plan.tied), plan.casts, plan.slots.tensor_count
        report.nbytes = plan.slots.payload
        report.buckets = len(plan.buckets)
        report.seconds = perf_counter() - began
        return report

    def _transfer(self, request: Request, work: Prepared, report: LoadReport) -> None:
        model, plan = request.model, work.plan
        memory = self._reserve(wave_bytes(plan, work.per_wave)) if self._ways.share_buffers(work.device) else None
        shared = memory is not None and memory.shared

        def prepare() -> Local:
            with report.timed("materialize"):
                if work.devices.meta or work.targets.lost:
                    mat.materialize(model, work.targets, work.devices.home)
                if work.targets.staged:
                    stage(model, work.targets)
                if memory is not None:
                    memory.board.clear()
                    report.peak_staging = sum(buffer.nbytes for buffer in memory.buffers)
                if work.device != CPU:
                    staging = self._reserve_on(work, shared)
                    report.peak_staging += staging.footprint
                    report.stream = self._device.spelled(work.device)
                scales = dequantize.scale_tensors(plan.targets, len(work.targets.names), work.device)
                tensors = work.targets.local() + scales
                if work.device != CPU:
                    return Local(plan, tensors)
                on_cpu = Local.on_cpu(plan, tensors, self._bound)
                self._bound = on_cpu.bound
                return on_cpu

        local, failure = attempt(prepare)
        self._control.settle("materializing the model", failure)
        assert local is not None
        if work.holders:
            self._control.doing = "sharing buffers"
            stream = self._device.stream(work.device) if work.device != CPU else None
            report.transport_steps += share(model, work.holders, self.topology, stream)
        framing = Framing(plan, self.topology.rank, work.manifest, self._control, self.options.checksums)
        waves = 0

        def transfer_of(flow: Flow, buckets: range) -> Transfer | DeviceTransfer:
            nonlocal waves
            source = work.checkpoint if flow.reads else None
            if memory is None or (work.device != CPU and not flow.shared):
                return self._device.transfer(plan, buckets, flow, local, source, report, self._control, framing)
            target = local if work.device == CPU else self._device.uploader(local, report)
            route = self._ways.route_of(flow, work.route)
            transfer = Transfer(
                plan, buckets, work.per_wave, flow, route, memory, target, source, report, self._control, framing, waves,
            )  # fmt: skip
            waves += transfer.waves
            return transfer

        def move(readers: str, buckets: range, finish: Callable[[], None] | None = None) -> list[Measured]:
            """Moves some buckets, and ends in a round where all ranks hear of a failure; gives what each rank saw.

            ``finish`` comes after the last of the load.
            """
            flow = self._ways.flow(work.device, shared, readers)
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
                self._hand_over(work, local)
                if self.options.proves:
                    self._prove(work, flow, local, report)
                finish()
            # The last thing before all ranks agree that the load has ended well.
            _, failure = attempt(work.check_unchanged) if finish is not None else (None, None)
            reading, crossing = report.phases["read"], report.phases["inter_node"]
            seen = [
                reading.nbytes - before[0].nbytes, reading.seconds - before[0].seconds,
                crossing.nbytes - before[1].nbytes, crossing.seconds - before[1].seconds,
            ]  # fmt: skip
            views = self._control.settle(
                "the transfer", failure, seen, lambda views: [views[rank] for rank in self.topology.ranks],
                patience=2, last=finish is not None,
            )  # fmt: skip
            return [Measured(*view) for view in views]

        shown = self.progress and self.topology.rank == self.options.src
        with progress_bar(plan.nbytes, shown) as bar:
            readers, begin = self._choose_readers(work, shared, report, move)
            rest = range(begin, len(plan.buckets))

            def finish() -> None:
                self._control.doing = "initializes what the checkpoint lacks"
                with self._device.work(work.device) if plan.scalings else nullcontext():
                    dequantize.multiply(plan.scalings, plan.targets, local.tensors)
                self._initialize(request, work, report)

            move(readers, rest, finish)

    def _hand_over(self, work: Prepared, local: Local) -> None:
        """Fills the modules that are filled through their own load_state_dict."""
        targets = work.targets
        if not targets.staged:
            return
        self._control.doing = "calling load_state_dict of modules with state-dict hooks"
        staging = {name: local.tensors[targets.index[name]] for each in targets.staged for name in each.names}
        for each in targets.staged:
            each.hand_over(staging)
            if self.options.proves:
                each.read_back(staging)
        check_filled(local_tensors(list(targets.behind.values())), targets.staged)

    def _prove(self, work: Prepared, flow: Flow, local: Local, report: LoadReport) -> None:
        """Before the tensors are scaled or initialized, as the checkpoint knows nothing of that."""
        with report.timed("verify"):
            verifiers = self.topology.ranks if work.all_read else flow.turns
            if self._proof is None or not self._proof.fits(work.plan, verifiers):
                self._proof = Proof(work.plan, verifiers, self.options.verify == "sample")
            proof = self._proof
            letters = self._control.deal("the digests", proof.claims(local))

            def check() -> None:
                if letters:
                    assert work.checkpoint is not None
                    for nbytes in proof.check(self.topology.rank, letters, work.checkpoint, work.manifest):
                        self._control.progress += nbytes

            # Whoever proves reads what lies at the paths now. A file that has changed is why shards differ from it, so that
            # all ranks hear of that first, whichever rank saw it.
            _, changed = attempt(lambda: work.reopen() if letters else None)
            _, failure = attempt(check) if changed is None else (None, None)
            if changed is None:
                _, changed = attempt(work.check_unchanged)
            self._control.settle("verification", changed, patience=2)
            self._control.settle("verification", failure, patience=2)
            self._control.forget_letters()

    def _choose_readers(
        self,
        work: Prepared,
        shared: bool,
        report: LoadReport,
        move: Callable[[str, range], list[Measured]],
    ) -> tuple[str, int]:
        """How to read, and the first bucket that the trials have left."""
        said = []
        begin = 0
        readers = self.options.readers
        if readers == "auto" and not work.all_read:
            readers = "one"
            said.append(f"chose one: only rank {self.options.src} is known to have the checkpoint")
        elif readers == "auto":
            plan = work.plan

            def trial(way: str) -> list[Measured]:
                nonlocal begin
                buckets = range(begin, min(begin + work.per_wave, len(plan.buckets)))
                begin = buckets.stop
                return move(way, buckets)

            nodes = self.topology.nodes
            readers, why = choose(
                Job(
                    total=plan.nbytes,
                    owned=work.owned,
                    node_of=[next(i for i, node in enumerate(nodes) if rank in node) for rank in self.topology.ranks],
                    reader=self.topology.ranks.index(self.options.src),
                    waves=-(-len(plan.buckets) // work.per_wave),
                    wave_bytes=plan.largest * work.per_wave,
                    ways=[way for way in READERS if way != "per_node" or self.options.algorithm != "flat"],
                ),
                trial,
            )
            said.append(why)
        said.append(self._ways.fallback(work.device, shared, readers))
        report.chosen = "; ".join(filter(None, said))
        return readers, begin

    def _reserve_on(self, work: Prepared, shared: bool) -> DeviceStaging:
        """Staging for a device, kept for the next load. ``shared``: whether there is memory that a node's ranks share."""
        readers = self.options.readers
        if readers == "auto":
            readers = "every" if work.all_read else "one"
        flow = self._ways.flow(work.device, shared, readers)
        nbytes = upload_bytes(work.plan) if flow.shared else staging_bytes(work.plan, readers)
        return self._device.reserve(work.device, nbytes, reads=flow.shared or flow.reads)

    def _reserve(self, nbytes: int) -> NodeMemory:
        """Staging buffers of at least ``nbytes``, kept for the next load. Collective when there are none yet."""
        if self._memory is None or self._memory.nbytes < nbytes:
            self._memory = None
            alone = self.options.algorithm == "flat" or self.options.readers == "every" or len(self.topology.ranks) == 1
            if alone:
                self._memory = NodeMemory.private(self.topology.rank, nbytes)
            else:
                self._memory = NodeMemory.for_node(self._control, self.topology.nodes, nbytes)
        return self._memory

    def _initialize(self, request: Request, work: Prepared, report: LoadReport) -> None:
        """Fills what the checkpoint does not: with what the model has computed, then by the caller's hook."""
        targets = work.targets
        if not work.initialization.values and not work.unfilled:
            return
        tensors = dict(zip(targets.names, targets.tensors, strict=True))
        tensors |= {name: owned(request.model, name) for name in targets.lost}

        def local(names: Collection[str]) -> dict[str, Tensor]:
            return dict(zip(names, local_tensors([tensors[name] for name in names]), strict=True))

        work.initialization.apply(local(work.initialization.values))
        report.initialized += sorted(work.initialization.values)
        if request.init_missing is None:
            return
        for tensor in local(work.garbage).values():
            memory_pattern.mark(tensor)
        for module, path, leaves in (
            (u.module, u.path, u.names) for u in mat.unfilled(request.model, set(work.unfilled))
        ):
            request.init_missing(module, path, leaves)
            report.initialized += [f"{path}.{leaf}" if path else leaf for leaf in leaves]
        tensors |= {name: owned(request.model, name) for name in targets.lost}  # a hook may replace a tensor
        present = {id(tensor) for tensor in chain(request.model.parameters(), request.model.buffers())}
        kept = [name for name in work.garbage if id(tensors[name]) in present]
        left = [name for name, t in local(kept).items() if not t.is_meta and memory_pattern.is_marked(t)]
        if left:
            raise LoadError(
                f"rank {self.topology.rank}: init_missing left {', '.join(sorted(left)[:10])} unfilled; it is called as "
                "hook(module, path, names) and must write to each of these names of the module, in place"
            )
