"""Carries out one agreed load: allocates tensors, moves buckets, fills what the checkpoint lacks, and proves the result."""

from __future__ import annotations

from contextlib import nullcontext

from epload.core.attempt import attempt
from epload.core.log import logger
from epload.loading.agreed import AgreedLoad
from epload.loading.buffers import share
from epload.loading.engines import make_engine
from epload.loading.missing import fill_missing
from epload.loading.recorder import gather_events
from epload.loading.request import Options, Request
from epload.loading.resources import Resources
from epload.loading.routes import RoutePlan, Router
from epload.mapping import scales as fp8_scales
from epload.model.devices import CPU
from epload.model.materialize import materialize
from epload.observe.progress import Progress
from epload.observe.slow import describe_slow, pace, slow_readers
from epload.ranks.topology import Topology
from epload.report import LoadReport
from epload.transfer.local import Local
from epload.transfer.transfers import run_transfer
from epload.verify.digests import digest_shards, verify_digests


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
        load, plan, report, resources = self._load, self._plan, self._report, self._resources
        shared = False
        if self._router.stages_on_host(load.device, load.readers):
            memory = resources.reserve_memory(load.wave_bytes)
            report.peak_staging = sum(buffer.nbytes for buffer in memory.buffers)
            shared = memory.shared
        route = self._router.resolve(load.device, load.readers, shared)
        if load.meta:  # if a rank cannot make its groups, no model has left meta
            self._control.settle("making groups", None)
        local, failure = attempt(lambda: self._materialize(shared))
        self._control.settle("materializing the model", failure)
        assert local is not None
        self._local = local
        if load.missing.holders:
            self._control.doing = "sharing buffers"
            stream = resources.device.stream(load.device) if load.device != CPU else None
            with self._control.stopping(self._topology.groups):
                steps = share(self._request.model, load.missing.holders, self._topology, stream)
            report.transport_steps += steps
        with Progress(plan.nbytes, show_progress) as bar:
            report.readers, report.algorithm = load.readers, route.flow.algorithm if route.sends else ""
            report.reason = "; ".join(filter(None, (load.reason, route.note)))
            if self._topology.rank == self._topology.ranks[0]:
                logger.info("readers=%s%s", load.readers, f" ({report.reason})" if report.reason else "")
            self._move(route, bar)

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
            return Local(self._plan, targets.local() + scales, resources.device.staging if load.device != CPU else None)

    def _move(self, route: RoutePlan, bar: Progress) -> None:
        """Moves all buckets and does all that comes after the data, then ends in a round where all ranks hear of a failure."""
        report, resources = self._report, self._resources
        transfer = make_engine(self._load, route, self._local, self._topology, self._options, resources, report)
        run_transfer(transfer, self._control, self._topology.groups, bar)
        self._finish(route.flow.turns)
        gather_events(self._topology, report)
        # The last thing before all ranks agree that the load has ended well.
        _, failure = attempt(lambda: self._load.inputs.check_unchanged("; the model may be partly overwritten"))
        read = report.phases["read"]
        slow = self._control.settle(
            "the transfer", failure, pace(read.nbytes, read.seconds),
            lambda views: list(slow_readers(views).items()), patience=2, last=True,
        )  # fmt: skip
        if slow and self._topology.rank == self._topology.ranks[0]:
            logger.warning("%s", describe_slow(dict(slow)))

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

    def _prove(self, readers: tuple[int, ...]) -> None:
        """Before the tensors are scaled or initialized, as the checkpoint knows nothing of that."""
        load, control = self._load, self._control
        with self._report.timed("verify"):
            verifiers = self._topology.ranks if load.all_read else readers
            messages = control.exchange("the digests", digest_shards(load.plan, verifiers, self._local.tensors))

            def check() -> None:
                if messages:
                    assert load.inputs.checkpoint is not None
                    checkpoint = load.inputs.checkpoint
                    for nbytes in verify_digests(load.plan, control.rank, messages, checkpoint, load.manifest):
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
