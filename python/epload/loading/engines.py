"""Makes the engine of one load: each rank reads for itself, or buckets pass through the node's memory or through a device's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.core.copy_table import CopyTable
from epload.loading.agreed import AgreedLoad
from epload.loading.resources import Resources
from epload.model.devices import CPU
from epload.native import ops
from epload.planning.buckets import HEADER_BYTES
from epload.planning.plan import LoadPlan
from epload.planning.schedule import Flow
from epload.planning.waves import group_buckets, make_waves
from epload.ranks.topology import Route
from epload.report import LoadReport
from epload.transfer import direct_read
from epload.transfer.affinity import read_threads
from epload.transfer.context import Fill, TransferContext
from epload.transfer.device import DeviceStaging
from epload.transfer.device_ring import DeviceRing
from epload.transfer.engine import Engine, Transfer, through_memory
from epload.transfer.local import Local
from epload.transfer.movers import collective


def make_engine(
    load: AgreedLoad,
    flow: Flow,
    routes: Mapping[int, Route],
    local: Local,
    resources: Resources,
    report: LoadReport,
) -> Transfer:
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
        fill = _filler(plan, checkpoint, staging)
    context = TransferContext(plan, flow, fill, partial(plan.describe, load.manifest), topology.control, report)
    if flow.readers == "every":
        assert checkpoint is not None
        limit = direct_read.READ_BYTES if device == CPU else direct_read.DEVICE_READ_BYTES
        return direct_read.DirectRead(context, checkpoint, group_buckets(plan.owned_by_bucket, limit), local)
    if device == CPU or flow.shared:
        assert resources.memory is not None
        waves, chunk = make_waves(plan.sizes, load.per_wave), flow.chunk_bytes(plan.nbytes, plan.largest, load.per_wave)
        return through_memory(context, resources.memory, waves, local, routes, chunk)
    assert staging is not None
    phase, moves = "inter_node" if flow.crosses else "intra_node", bool(routes)
    ring = DeviceRing(staging, context, phase, in_order=True, moves=moves)
    mover = collective(context, flow, ring, routes) if moves else None
    return Engine(context, make_waves(plan.sizes), ring, mover, local)


def _filler(plan: LoadPlan, checkpoint: Checkpoint, staging: DeviceStaging | None) -> Fill:
    """Returns a function that fills buckets of a checkpoint that this rank has opened, on CPU or on the staging's device."""

    @cache
    def host_buffer() -> Tensor:
        return torch.empty(plan.largest, dtype=torch.uint8, device="cpu")

    def fill(number: int, buffer: Tensor) -> None:
        pieces = plan.buckets[number].pieces
        if buffer.is_cpu:
            checkpoint.fill(buffer, pieces)
            return
        assert staging is not None
        assert staging.pipe is not None
        if not checkpoint.fill_on_device(buffer, pieces, staging.pipe.native):
            bucket = host_buffer()[: buffer.nbytes]
            checkpoint.fill(bucket, pieces)
            begin = torch.zeros(1, dtype=torch.int64, device="cpu")
            copies = CopyTable.of_bytes(begin, begin + buffer.nbytes - HEADER_BYTES)
            body, pipe = buffer[HEADER_BYTES:], staging.pipe.native
            ops.upload([bucket[HEADER_BYTES:]], copies.in_bucket(), [body], copies.rows, pipe)

    return fill
