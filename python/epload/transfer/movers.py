"""Movers: how a wave's buckets go from rank to rank. A relay passes chunks on through host memory; a collective broadcasts.

A new one is a class with a method ``move`` and a row in :data:`MOVERS`; see tests/support/example_mover.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

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
Ring = HostRing | DeviceRing


class Channel(NamedTuple):
    """Describes what a mover moves buckets between, and over what."""

    ring: Ring
    """Buffers of this rank, or of its node."""
    routes: Mapping[int, Route]
    """Groups of ranks, for each rank that fills buckets for this one."""
    chunk_bytes: int = 0
    """Bytes of a message; 0 for a whole bucket."""
    seconds: float = 0.0
    """Seconds that a message may take; 0 for the timeout of its group."""


class Mover(Protocol):
    """Made for one transfer, of a context and a channel. Used by one thread."""

    def move(self, wave: Wave) -> None:
        """Sends and receives this rank's part of a wave. Raises LoadError if a message did not arrive."""
        ...


class Relay:
    """Passes a wave on through host memory, chunk by chunk: in a ring of nodes, then a chain inside a node that shares none."""

    def __init__(self, context: TransferContext, channel: Channel) -> None:
        assert isinstance(channel.ring, HostRing)
        self._context = context
        self._channel = channel
        self._ring = channel.ring
        route = next(iter(channel.routes.values()))
        self._groups = route.inter_group, route.intra_group
        self._phase = "inter_node" if context.flow.crosses and route.inter_group else "intra_node"

    def move(self, wave: Wave) -> None:
        context, channel, numbers = self._context, self._channel, wave.numbers
        rows = context.flow.steps(list(zip(numbers, wave.begins, wave.ends, strict=True)))
        if not rows:
            return
        steps = torch.tensor(rows, dtype=torch.int64)
        senders, receivers = (sorted({*ranks.flatten().tolist()} - {-1}) for ranks in (steps[:, 2:4], steps[:, 4:]))
        doing = f"passes on buckets {numbers[0]} to {numbers[-1]}, from ranks {senders} to ranks {receivers}"
        counters = self._ring.memory.counters.words  # on which a failure ends the wait for a message
        with context.moving(self._phase, doing, numbers[0]) as span:
            context.report.transport_steps += ops.relay(
                self._ring.bucket(wave), steps, *self._groups, channel.chunk_bytes, counters, channel.seconds
            )
            span.nbytes = int((steps[:, 1] - steps[:, 0]).sum())


class Collective:
    """Broadcasts each bucket from the rank that reads it, on a device's stream."""

    def __init__(self, context: TransferContext, channel: Channel) -> None:
        assert isinstance(channel.ring, DeviceRing)
        assert isinstance(context.flow, Flow)
        self._context = context
        self._flow = context.flow
        self._ring = channel.ring
        self._routes = channel.routes
        self._phase = "inter_node" if context.flow.crosses else "intra_node"

    def move(self, wave: Wave) -> None:
        context, flow = self._context, self._flow
        for i, number in enumerate(wave.numbers):
            reader, bucket = flow.reader(number), self._ring.bucket(wave, i, flow.stripes_multiple)
            route = self._routes[reader]
            with context.moving(self._phase, f"broadcasts bucket {number} from rank {reader}", number) as span:
                broadcast(bucket, route, flow.algorithm, self._ring.staging.stream)
                span.nbytes = wave.ends[i] - wave.begins[i]
            context.report.transport_steps += bool(route.inter_group) + bool(route.intra_group)


MOVERS: dict[str, Callable[[TransferContext, Channel], Mover]] = {"host": Relay, "device": Collective}
"""The mover of each kind of memory."""


def broadcast(flat: Tensor, route: Route, algorithm: str, stream: torch.Stream | None) -> None:
    """Sends contiguous bytes in place, from ``route.src``, as one bucket."""
    nbytes = max(_C.OP_ALIGNMENT, flat.nbytes)
    ops.coalesced_bcast(
        [flat], route.src, route.inter_group, route.intra_group, nbytes, algorithm, stream, leader=route.leader
    )
