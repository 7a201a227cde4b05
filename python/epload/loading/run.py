"""Carries out one agreed load: allocates tensors, moves buckets, fills what the checkpoint lacks, and proves the result."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from epload.cluster.topology import Topology
from epload.core.attempt import attempt
from epload.core.log import logger
from epload.loading.agreed import AgreedLoad
from epload.loading.buffers import share
from epload.loading.missing import fill_missing
from epload.loading.request import Options, Request
from epload.loading.resources import Resources
from epload.loading.routes import RoutePlan, Router
from epload.mapping import scales as fp8_scales
from epload.model.devices import CPU
from epload.model.materialize import materialize
from epload.observe.events import Events
from epload.observe.progress import Progress
from epload.observe.slow import describe_slow, pace, slow_readers
from epload.observe.trace import Trace
from epload.planning.waves import group_buckets, make_waves, wave_bytes
from epload.report import LoadReport
from epload.staging.affinity import read_threads
from epload.staging.device_ring import DeviceRing
from epload.staging.host_ring import HostRing
from epload.staging.shared_memory import NodeMemory
from epload.transport import direct_read
from epload.transport.context import TransferContext
from epload.transport.device_plan import DevicePlan
from epload.transport.engine import Engine
from epload.transport.framing import Framing
from epload.transport.local import Local
from epload.transport.movers import Collective, Mover, Relay
from epload.transport.sinks import DeviceSink, HostSink
from epload.transport.sources import CheckpointSource
from epload.transport.transfers import run_transfer, through_memory


class LoadRun:
    """Runs one load. Collective; single use: make it, run it."""

    def __init__(
        self,
        topology: Topology,
        options: Options,
        router: Router,
        resources: Resources,
        request: Request,
        load: AgreedLoad,
        report: LoadReport,
    ) -> None:
        self._topology = topology
        self._control = topology.control
        self._options = options
        self._router = router
        self._resources = resources
        self._request = request
        self._load = load
        self._report = report
        self._plan = load.plan

    def run(self, show_progress: bool) -> None:
        """Raises LoadError; tensors may have been materialized and partly written."""
        load, plan, resources = self._load, self._plan, self._resources
        self._memory: NodeMemory | None = None
        on_host = self._router.stages_on_host(load.device, load.readers)
        if not on_host:
            resources.end_sharing()
        sharing = resources.sharing
        if sharing is not None:  # all ranks have agreed on the plan, and replace their memory
            resources.memory = None
        elif on_host:
            self._memory = resources.reserve_memory(wave_bytes(plan, load.per_wave))
        fine = sharing is not None and sharing.accept(load.offers)
        local, failure = attempt(lambda: self._materialize(fine or self._shared))
        if not load.prepared:
            all_fine = self._control.settle("materializing the model", failure, fine, lambda views: all(views.values()))
        elif failure is not None:
            raise failure
        if sharing is not None:
            self._memory = resources.finish_sharing(all_fine)
            if fine and not all_fine and load.device != CPU:
                self._report.peak_staging = resources.reserve_staging(load, shared=False).footprint
        if self._memory is not None:
            self._report.peak_staging += sum(buffer.nbytes for buffer in self._memory.buffers)
        assert local is not None
        self._local = local
        if load.missing.holders:
            self._control.doing = "sharing buffers"
            stream = self._resources.device.stream(load.device) if load.device != CPU else None
            with self._control.watch.guards(self._topology.groups):
                steps = share(self._request.model, load.missing.holders, self._topology, stream)
            self._report.transport_steps += steps
        names = partial(plan.describe, load.manifest)
        self._framing = Framing(plan.identity, names, self._topology.rank, self._control)
        with Progress(plan.nbytes, show_progress) as bar:
            route, report = self._router.resolve(load.device, load.readers, self._shared), self._report
            report.readers, report.algorithm = load.readers, route.flow.algorithm if route.sends else ""
            report.reason = "; ".join(filter(None, (load.reason, route.note)))
            if self._topology.rank == self._topology.ranks[0]:
                logger.info("readers=%s%s", load.readers, f" ({report.reason})" if report.reason else "")
            self._move(route, bar)

    # ---- before data moves ----

    @property
    def _shared(self) -> bool:
        """True if the ranks of a node share memory."""
        return self._memory is not None and self._memory.shared

    def _materialize(self, shared: bool) -> Local:
        load, report, resources = self._load, self._report, self._resources
        model, inputs = self._request.model, self._load.inputs
        targets = inputs.targets
        with report.timed("materialize"):
            if inputs.devices.has_meta or targets.unsaved_meta:
                materialize(model, targets, inputs.devices.materialize_on, modules=inputs.modules)
            if load.device != CPU:
                report.peak_staging += resources.reserve_staging(load, shared).footprint
                report.stream = resources.device.describe_stream(load.device)
            scales = fp8_scales.scale_tensors(self._plan.targets, len(targets.names), load.device)
            tensors = targets.local() + scales
            return Local(self._plan, tensors)

    # ---- moving ----

    def _move(self, route: RoutePlan, bar: Progress) -> None:
        """Moves all buckets and does all that comes after the data, then ends in a round where all ranks hear of a failure."""
        report, flow = self._report, route.flow
        run_transfer(self._make_transfer(route), self._control, self._topology.groups, bar)
        self._finish(flow.turns)
        self._gather_events()
        # The last thing before all ranks agree that the load has ended well.
        _, failure = attempt(lambda: self._load.inputs.check_unchanged("; the model may be partly overwritten"))
        read = report.phases["read"]
        slow = self._control.settle(
            "the transfer", failure, pace(read.nbytes, read.seconds),
            lambda views: list(slow_readers(views).items()), patience=2, last=True,
        )  # fmt: skip
        if slow and self._topology.rank == self._topology.ranks[0]:
            logger.warning("%s", describe_slow(dict(slow)))

    def _make_transfer(self, route: RoutePlan) -> Engine | direct_read.DirectRead:
        load, flow, report = self._load, route.flow, self._report
        checkpoint = load.inputs.checkpoint if flow.reads else None
        if checkpoint is not None:
            # A proof reads all bytes once more.
            again = self._options.verify or (flow.readers == "every" and self._reads_repeat())
            readers = len({*flow.turns} & {*self._topology.node})
            threads = None if load.device == CPU else read_threads(readers)
            checkpoint.configure_reads(self._options.direct_io and not again, threads)
        staging = self._resources.device.staging
        pipe = staging.pipe.native if staging is not None and staging.pipe is not None else None
        source = CheckpointSource(self._plan, checkpoint, pipe) if checkpoint is not None else None
        context = TransferContext(self._plan, flow, source, self._framing, self._control, report)
        if flow.readers == "every":
            assert checkpoint is not None
            on_host = load.device == CPU
            limit = direct_read.READ_BYTES if on_host else direct_read.DEVICE_READ_BYTES
            sink = HostSink(self._local, report) if on_host else self._device_sink()
            kept = self._plan.owned_by_bucket
            groups = group_buckets(range(len(kept)), kept, limit)
            return direct_read.DirectRead(context, checkpoint, groups, sink)
        if route.on_host:
            return self._through_memory(context, route)
        assert staging is not None
        ring = DeviceRing(staging, flow, report, "inter_node" if flow.crosses else "intra_node")
        mover = Collective(context, flow, ring, route.routes, staging.stream) if route.routes else None
        return Engine(context, make_waves(self._plan), ring, mover, self._device_sink())

    def _reads_repeat(self) -> bool:
        """Returns True if ranks of this node read the same bytes, so that the page cache saves disk work."""
        kept = dict(zip(self._topology.ranks, self._load.kept, strict=True))
        return sum(kept[rank] for rank in self._topology.node) > 1.25 * self._plan.nbytes

    def _through_memory(self, context: TransferContext, route: RoutePlan) -> Engine:
        """A transfer through the node's memory, and from there to the device if the model is on one."""
        assert self._memory is not None
        plan, flow, load = self._plan, route.flow, self._load
        words = self._memory.board.words

        def connect(ring: HostRing, seconds: float) -> Mover:
            chunk = flow.chunk_bytes(plan.nbytes, plan.largest, load.per_wave)
            return Relay(context, ring, next(iter(route.routes.values())), chunk, words, seconds)

        sink = HostSink(self._local, self._report) if load.device == CPU else self._device_sink()
        return through_memory(context, self._memory, make_waves(plan, load.per_wave), sink, connect)

    def _device_sink(self) -> DeviceSink:
        resources = self._resources
        assert resources.device.staging is not None
        plan = DevicePlan.of(self._plan, self._local.tensors, resources.device_plan)
        resources.device_plan = plan
        return DeviceSink(plan, self._local, resources.device.staging, self._report)

    # ---- after the data ----

    def _finish(self, readers: tuple[int, ...]) -> None:
        """``readers``: the ranks that have read."""
        if self._options.verify:
            self._prove(readers)
        self._control.doing = "initializes what the checkpoint lacks"
        scalings = self._plan.scalings
        with self._resources.device.entered() if scalings and self._load.device != CPU else nullcontext():
            fp8_scales.multiply(scalings, self._plan.targets, self._local.tensors)
        fill_missing(self._request, self._load.inputs, self._load.missing, self._topology.rank, self._report)

    def _gather_events(self) -> None:
        """The first rank gets the events of all, if the load is traced."""
        report, control, first = self._report, self._control, self._topology.ranks[0]
        if report.events is None:
            return
        control.settle("comparing clocks", None, patience=2)  # of which every rank has recorded when it came and left
        received = control.exchange("the trace", {first: report.events.encode()})
        if control.place is not None:
            control.place.messages.keep_sent()
        if self._topology.rank == first:
            report.merged = Trace.merge(map(Events.decode, received.values()))

    def _prove(self, readers: tuple[int, ...]) -> None:
        """Before the tensors are scaled or initialized, as the checkpoint knows nothing of that."""
        load, control = self._load, self._control
        with self._report.timed("verify"):
            proof = self._resources.proof(load, self._topology.ranks if load.all_read else readers)
            messages = control.exchange("the digests", proof.claims(self._local))

            def check() -> None:
                if messages:
                    assert load.inputs.checkpoint is not None
                    for nbytes in proof.check(self._topology.rank, messages, load.inputs.checkpoint, load.manifest):
                        control.progress += nbytes

            # Whoever proves reads what is at the paths now. A file that has changed is why shards differ from it, so that
            # all ranks hear of that first, whichever rank saw it.
            _, changed = attempt(lambda: load.inputs.reopen() if messages else None)
            failure = None
            if changed is None:
                _, failure = attempt(check)
                _, changed = attempt(lambda: load.inputs.check_unchanged("; the model may be partly overwritten"))
            control.settle("verification", changed, patience=2)
            control.settle("verification", failure, patience=2)
            control.delete_messages()
