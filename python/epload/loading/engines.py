"""Makes the engine of one load: each rank reads for itself, or buckets pass through the node's memory or through a device's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from epload.loading.agreed import AgreedLoad
from epload.loading.resources import Resources
from epload.model.devices import CPU
from epload.planning.schedule import Flow
from epload.planning.waves import make_waves
from epload.ranks.topology import Route
from epload.report import LoadReport
from epload.transfer.affinity import read_threads
from epload.transfer.context import TransferContext
from epload.transfer.device_ring import DeviceRing
from epload.transfer.direct_read import DirectRead
from epload.transfer.engine import Engine, filler, message_timeout, through_memory
from epload.transfer.local import Local
from epload.transfer.movers import collective
from epload.transfer.received import ReceivedCheckpoint, Receiving


def make_engine(
    load: AgreedLoad,
    flow: Flow,
    routes: Mapping[int, Route],
    local: Local,
    resources: Resources,
    report: LoadReport,
) -> Engine | DirectRead | Receiving:
    """Returns what fills this rank's tensors, and passes on what other ranks need.

    Args:
        flow, routes: as :meth:`~epload.loading.routes.Router.resolve` returns them.
    """
    plan, staging, device = load.plan, resources.staging, load.inputs.device
    topology, options = resources.topology, resources.options
    checkpoint = load.inputs.checkpoint if flow.reads else None
    fill = None
    if checkpoint is not None:
        of_rank = dict(zip(topology.ranks, load.owned, strict=True))
        # The page cache saves disk work where bytes are read again: to verify, or by other ranks of this node.
        repeats = flow.readers == "every" and sum(of_rank[rank] for rank in topology.node) > 1.25 * plan.nbytes
        readers = len({*flow.turns} & {*topology.node})
        direct = options.direct_io and not (options.verify or repeats)
        checkpoint.configure_reads(direct, None if device == CPU else read_threads(readers))
        fill = filler(plan, checkpoint, staging)
    context = TransferContext(plan, flow, fill, partial(plan.describe, load.manifest), topology.control, report)
    if isinstance(checkpoint, ReceivedCheckpoint):
        return Receiving(checkpoint, plan, local, topology, report)
    if flow.readers == "every":
        assert checkpoint is not None
        return DirectRead(context, checkpoint, plan.owned_by_bucket, local)
    if device == CPU or flow.shared:
        assert resources.memory is not None
        waves, chunk = make_waves(plan.sizes, load.per_wave), flow.chunk_bytes(plan.nbytes, plan.largest, load.per_wave)
        return through_memory(context, resources.memory, waves, local, routes, chunk)
    assert staging is not None
    phase, moves = "inter_node" if flow.crosses else "intra_node", bool(routes)
    waves = make_waves(plan.sizes)
    seconds = message_timeout(topology.control, waves).total_seconds()
    ring = DeviceRing(staging, context, phase, seconds, moves=moves)
    mover = collective(context, flow, ring, routes) if moves else None
    return Engine(context, waves, ring, mover, local)
