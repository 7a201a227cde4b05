"""Movers: how a wave's buckets go from rank to rank. A relay passes chunks on through host memory; a collective broadcasts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from epload.native import ops
from epload.native.extension import _C
from epload.planning.schedule import Flow
from epload.planning.waves import Wave
from epload.ranks.topology import Route
from epload.transfer.context import TransferContext
from epload.transfer.device_ring import DeviceRing
from epload.transfer.host_ring import HostRing

SLOWEST = 10e6
"""Bytes a second; a step that moves bytes has the timeout and what they take at this rate."""
Mover = Callable[[Wave], None]
"""Sends and receives this rank's part of a wave. Made for one transfer, and used by one thread. Raises LoadError if a message did
not arrive."""
Routes = Mapping[int, Route]
"""Groups of ranks, for each rank that fills buckets for this one."""


def relay(context: TransferContext, ring: HostRing, routes: Routes, chunk_bytes: int, seconds: float) -> Mover:
    """Returns a mover that passes waves on through host memory, chunk by chunk: in a ring of nodes, then a chain inside a node
    that shares none.

    Args:
        chunk_bytes: of a message.
        seconds: that a message may take.
    """
    route = next(iter(routes.values()))
    phase = "inter_node" if context.flow.crosses and route.inter_group else "intra_node"
    counters = ring.memory.counters  # on which a failure ends the wait for a message

    def move(wave: Wave) -> None:
        numbers = wave.numbers
        rows = context.flow.steps(list(zip(numbers, wave.begins, wave.ends, strict=True)))
        if not rows:
            return
        steps = torch.tensor(rows, dtype=torch.int64)
        senders, receivers = (sorted({*ranks.flatten().tolist()} - {-1}) for ranks in (steps[:, 2:4], steps[:, 4:]))
        doing = f"passes on buckets {numbers[0]} to {numbers[-1]}, from ranks {senders} to ranks {receivers}"
        with context.moving(phase, doing, numbers[0]) as span:
            context.report.transport_steps += ops.relay(
                ring.bucket(wave), steps, route.inter_group, route.intra_group, chunk_bytes, counters, seconds
            )
            span.nbytes = int((steps[:, 1] - steps[:, 0]).sum())

    return move


def collective(context: TransferContext, flow: Flow, ring: DeviceRing, routes: Routes) -> Mover:
    """Returns a mover that broadcasts each bucket from the rank that reads it, on a device's stream."""
    phase = "inter_node" if flow.crosses else "intra_node"

    def move(wave: Wave) -> None:
        for i, number in enumerate(wave.numbers):
            reader, bucket = flow.reader(number), ring.bucket(wave, i, flow.stripes_multiple)
            route = routes[reader]
            with context.moving(phase, f"broadcasts bucket {number} from rank {reader}", number) as span:
                broadcast(bucket, route, flow.algorithm, ring.staging.stream)
                span.nbytes = wave.ends[i] - wave.begins[i]
            context.report.transport_steps += bool(route.inter_group) + bool(route.intra_group)

    return move


def broadcast(flat: Tensor, route: Route, algorithm: str, stream: torch.Stream | None) -> None:
    """Sends contiguous bytes in place, from ``route.src``, as one bucket."""
    nbytes = max(_C.OP_ALIGNMENT, flat.nbytes)
    ops.coalesced_bcast([flat], route.src, route.inter_group, route.intra_group, nbytes, algorithm, stream, leader=route.leader)
