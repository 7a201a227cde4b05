"""Carries out one agreed load: allocates tensors, moves buckets, fills what the checkpoint lacks, and proves the result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from epload.core.attempt import Attempt
from epload.core.log import logger
from epload.loading.agreed import AgreedLoad
from epload.loading.buffers import share
from epload.loading.checked_files import check_files
from epload.loading.engines import make_engine
from epload.loading.missing import fill_missing, finishing, warn_of_attributes
from epload.loading.request import Request
from epload.loading.resources import Resources
from epload.model.copies import forget_casts, wait_for_copies
from epload.model.materialize import materialize
from epload.observe.progress import Progress
from epload.observe.slow import describe_slow, pace
from epload.observe.trace import Events, merge_events
from epload.planning.waves import wave_bytes
from epload.ranks.control import Control
from epload.ranks.topology import Topology
from epload.report import LoadReport
from epload.transfer.local import Local
from epload.verify.digests import digest_shards, verify_digests

_MOST_VERIFIERS = 64
"""Ranks that verify, to each of which each rank sends digests through the job's store."""


def run_load(resources: Resources, request: Request, load: AgreedLoad, report: LoadReport, show_progress: bool) -> None:
    """Carries out a load. Collective. Raises LoadError; tensors may have been materialized and partly written."""
    wait_for_copies(load.inputs.targets.tensors)
    with finishing(request.model, load.inputs.targets, load.missing):
        _run(resources, request, load, report, show_progress)
    # Autograd finds writes to a DTensor by its own version, not by that of its local tensor.
    written = load.inputs.targets.tensors
    torch.autograd.graph.increment_version([t for t in written if isinstance(t, DTensor) and not t.is_inference()])
    forget_casts(request.model)


def _run(resources: Resources, request: Request, load: AgreedLoad, report: LoadReport, show_progress: bool) -> None:
    topology, router, device = resources.topology, resources.router, load.inputs.device
    control, shared = topology.control, False
    if router.stages_on_host(device, load.readers):
        memory = resources.reserve_memory(wave_bytes(load.plan.sizes, load.per_wave))
        report.peak_staging = sum(buffer.nbytes for buffer in memory.buffers)
        shared = memory.shared
    flow, routes, note = router.resolve(device, load.readers, shared)
    check_files(request.checksums, load, topology, report)
    if load.meta:  # if a rank cannot make its groups, no model has left meta
        control.agree("making groups", None)
    materialized = Attempt(lambda: _materialize(resources, request, load, report, shared))
    control.agree("materializing the model", materialized.failure)
    local = materialized.value
    if load.missing.holders:
        control.doing = "sharing buffers"
        stream = resources.stream(device) if device.type != "cpu" else None
        with control.stopping(topology.groups.fail):
            report.transport_steps += share(request.model, load.missing.holders, topology, stream)
    with Progress(load.plan.nbytes, show_progress) as bar:
        # True if a rank sends buckets to another, rather than to leave them in memory that both share.
        sends = bool(routes) and (flow.crosses or any(len(node) > 1 for node in flow.nodes))
        report.readers, report.algorithm = load.readers, flow.algorithm if sends else ""
        report.reason = "; ".join(filter(None, (load.reason, note)))
        if topology.rank == topology.ranks[0]:
            logger.info("readers=%s%s", load.readers, f" ({report.reason})" if report.reason else "")
        engine = make_engine(load, flow, routes, local, resources, report)
        with control.stopping(engine.fail, topology.groups.fail):
            engine.run(bar)
        if resources.options.verify and not load.verified:
            with report.timed("verify"):
                _prove(control, load, topology.ranks if load.all_read else flow.turns, local)
            report.verified = True
        control.doing = "initializes what the checkpoint lacks"
        local.rescale()
        fill_missing(request, load.inputs, load.missing, topology.rank, report)
        if load.meta:
            warn_of_attributes(load.inputs, report)
        _finish(topology, load, report)


def _materialize(resources: Resources, request: Request, load: AgreedLoad, report: LoadReport, shared: bool) -> Local:
    inputs, plan, staging = load.inputs, load.plan, None
    targets, device = inputs.targets, inputs.device
    with report.timed("materialize"):
        materialize(request.model, targets, inputs.materialize_on, modules=inputs.modules)
        if device.type != "cpu":
            staging = resources.reserve_staging(device, load.readers, plan.largest, shared)
            report.peak_staging += staging.footprint
            report.stream = resources.describe_stream(device)
        counts = {scaling.scale: scaling.counts for scaling in plan.scalings}
        scales = [torch.empty(size, dtype=plan.targets.dtypes[i], device=device) for i, size in counts.items()]
        return Local(plan, targets.local() + scales, staging, keeps=resources.options.verify)


def _prove(control: Control, load: AgreedLoad, verifiers: Sequence[int], local: Local) -> None:
    """Runs before the tensors are scaled or initialized, as the checkpoint knows nothing of that.

    Args:
        verifiers: ranks that have the checkpoint.
    """
    verifiers = verifiers[:: -(-len(verifiers) // _MOST_VERIFIERS)]
    messages = control.exchange("the digests", digest_shards(load.plan, verifiers, local.tensors))
    inputs = load.inputs

    def verify() -> None:
        assert inputs.checkpoint is not None
        inputs.check_unchanged_after()
        inputs.checkpoint.reopen()  # to read what is at the paths now
        for nbytes in verify_digests(load.plan, control.rank, messages, inputs.checkpoint, load.manifest):
            control.progress += nbytes

    verified = Attempt(verify).failure if messages and inputs.checkpoint is not None else None
    # A file that has changed is why shards differ from it: all ranks hear of that first, whichever rank saw it.
    control.agree("verification", Attempt(inputs.check_unchanged_after).failure, patience=2)
    control.agree("verification", verified, patience=2)


def _finish(topology: Topology, load: AgreedLoad, report: LoadReport) -> None:
    """Ends in a round where all ranks hear of a failure, and of ranks that have read slowly; after one for a trace."""
    control, first = topology.control, topology.ranks[0]
    if report.events is not None:
        received = control.exchange("the trace", {first: report.events.encode()})
        if topology.rank == first:
            report.merged = merge_events(map(Events.decode, received.values()))
    # The last thing before all ranks agree that the load has ended well.
    failure = Attempt(load.inputs.check_unchanged_after).failure
    read = report.phases["read"]
    slow = control.agree("the transfer", failure, pace(read.nbytes, read.seconds), describe_slow, patience=2, last=True)
    if slow and topology.rank == first:
        logger.warning("%s", slow)
