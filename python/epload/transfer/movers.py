"""Movers: how a wave's buckets go from rank to rank. A relay passes chunks on through host memory; a collective broadcasts.

A new one is a class with a method ``move`` and a row in :data:`MOVERS`; see tests/support/example_mover.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from epload.errors import LoadError, RemoteFailure, WaitTimeout, message_of
from epload.native import ops
from epload.native.extension import _C
from epload.planning.schedule import Flow, Step
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
        self._route = next(iter(channel.routes.values()))
        self._phase = "inter_node" if context.flow.crosses and self._route.inter_group else "intra_node"

    def move(self, wave: Wave) -> None:
        steps = self._context.flow.steps(list(zip(wave.numbers, wave.begins, wave.ends, strict=True)))
        if not steps:
            return
        numbers, report = wave.numbers, self._context.report
        groups = self._route.inter_group, self._route.intra_group
        board = self._ring.memory.board.words  # on which a failure ends the wait for a message
        doing = f"passes on buckets {numbers[0]} to {numbers[-1]}, {_peers(steps)}"
        with self._context.activity.doing(doing), report.timed(self._phase, doing) as span:
            try:
                rows = torch.tensor(steps, dtype=torch.int64)
                report.transport_steps += ops.relay(
                    self._ring.bucket(wave), rows, *groups, self._channel.chunk_bytes, board, self._channel.seconds
                )
            except RuntimeError as error:
                raise explain(self._context, error, numbers[0]) from error
            span.nbytes = sum(end - begin for begin, end, *_ in steps)


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
        flow, report = self._flow, self._context.report
        for i, number in enumerate(wave.numbers):
            reader, bucket = flow.reader(number), self._ring.bucket(wave, i, flow.stripes_multiple)
            route = self._routes[reader]
            doing = f"broadcasts bucket {number} from rank {reader}"
            with self._context.activity.doing(doing):
                try:
                    with report.timed(self._phase, doing) as span:
                        broadcast(bucket, route, flow.algorithm, self._ring.staging.stream)
                        span.nbytes = wave.ends[i] - wave.begins[i]
                except RuntimeError as error:
                    raise explain(self._context, error, number) from error
            report.transport_steps += bool(route.inter_group) + bool(route.intra_group)


MOVERS: dict[str, Callable[[TransferContext, Channel], Mover]] = {"host": Relay, "device": Collective}
"""The mover of each kind of memory."""


def broadcast(flat: Tensor, route: Route, algorithm: str, stream: torch.Stream | None) -> None:
    """Sends contiguous bytes in place, from ``route.src``, as one bucket."""
    nbytes = max(_C.OP_ALIGNMENT, flat.nbytes)
    ops.coalesced_bcast(
        [flat], route.src, route.inter_group, route.intra_group, nbytes, algorithm, stream, leader=route.leader
    )


def explain(context: TransferContext, error: RuntimeError, number: int) -> LoadError:
    """Returns the error for a message that did not arrive."""
    text = message_of(error)
    if "given up" in text:
        return RemoteFailure(text)
    late = "Timed out" in text or "timeout" in text
    kind = WaitTimeout if late else LoadError
    names = context.framing.names([number])
    return kind(f"rank {context.flow.rank} could not pass on bucket {number} ({names}): {text}")


def _peers(steps: list[Step]) -> str:
    """Describes which ranks this rank receives bytes from and sends them to."""
    sources = sorted({rank for step in steps for rank in step[2:4] if rank >= 0})
    sinks = sorted({rank for step in steps for rank in step[4:6] if rank >= 0})
    return f"from ranks {sources} to ranks {sinks}"
