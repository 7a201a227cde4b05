"""Makes the engine of one load: each rank reads for itself, or buckets pass through the node's memory or through a device's."""

from __future__ import annotations

from functools import partial

from epload.loading.agreed import AgreedLoad
from epload.loading.resources import Resources
from epload.loading.routes import RoutePlan
from epload.model.devices import CPU
from epload.planning.waves import group_buckets, make_waves
from epload.ranks.topology import Topology
from epload.report import LoadReport
from epload.transfer import direct_read
from epload.transfer.affinity import read_threads
from epload.transfer.context import TransferContext
from epload.transfer.device_ring import DeviceRing
from epload.transfer.engine import Engine, Transfer, through_memory
from epload.transfer.framing import Framing
from epload.transfer.local import Local
from epload.transfer.movers import MOVERS, Channel
from epload.transfer.sources import checkpoint_source


def make_engine(
    load: AgreedLoad,
    route: RoutePlan,
    local: Local,
    resources: Resources,
    report: LoadReport,
) -> Transfer:
    """Returns what fills this rank's tensors, and passes on what other ranks need."""
    plan, flow, staging = load.plan, route.flow, resources.device.staging
    topology, options = resources.topology, resources.options
    checkpoint = load.inputs.checkpoint if flow.reads else None
    fill = None
    if checkpoint is not None:
        # A proof reads all bytes once more.
        again = options.verify or (flow.readers == "every" and _reads_repeat(load, topology))
        readers = len({*flow.turns} & {*topology.node})
        threads = None if load.device == CPU else read_threads(readers)
        checkpoint.configure_reads(options.direct_io and not again, threads)
        pipe = staging.pipe.native if staging is not None and staging.pipe is not None else None
        fill = checkpoint_source(plan, checkpoint, pipe)
    framing = Framing(plan.identity, partial(plan.describe, load.manifest), topology.rank, topology.control)
    context = TransferContext(plan, flow, fill, framing, topology.control, report)
    if flow.readers == "every":
        assert checkpoint is not None
        limit = direct_read.READ_BYTES if load.device == CPU else direct_read.DEVICE_READ_BYTES
        groups = group_buckets(range(len(plan.buckets)), plan.owned_by_bucket, limit)
        return direct_read.DirectRead(context, checkpoint, groups, local)
    if not route.on_host:
        assert staging is not None
        phase, moves = "inter_node" if flow.crosses else "intra_node", bool(route.routes)
        ring = DeviceRing(staging, flow, report, phase, in_order=True, moves=moves)
        mover = MOVERS["device"](context, Channel(ring, route.routes)) if moves else None
        return Engine(context, make_waves(plan.sizes), ring, mover, local)
    memory = resources.memory
    assert memory is not None
    chunk = flow.chunk_bytes(plan.nbytes, plan.largest, load.per_wave)
    return through_memory(context, memory, make_waves(plan.sizes, load.per_wave), local, route.routes, chunk)


def _reads_repeat(load: AgreedLoad, topology: Topology) -> bool:
    """Returns True if ranks of this node read the same bytes, so that the page cache saves disk work."""
    nbytes = dict(zip(topology.ranks, load.owned, strict=True))
    return sum(nbytes[rank] for rank in topology.node) > 1.25 * load.plan.nbytes
