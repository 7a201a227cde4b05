"""Movers: how a wave's buckets go from rank to rank. A relay passes chunks on through host memory; a collective broadcasts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

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


class Mover(Protocol):
    def move(self, wave: Wave) -> None:
        """Sends and receives this rank's part of a wave. Raises LoadError if a message did not arrive."""
        ...


class Relay:
    """Passes a wave on through host memory, chunk by chunk: in a ring of nodes, then a chain inside a node that shares none."""

    def __init__(
        self, context: TransferContext, ring: HostRing, route: Route, chunk_bytes: int, board: Tensor, seconds: float
    ) -> None:
        """
        Args:
            board: a failure posted on it ends the wait for a message.
            seconds: that a message may take.
        """
        self._context = context
        self._ring = ring
        self._route = route
        self._chunk_bytes = chunk_bytes
        self._board = board
        self._seconds = seconds
        crosses = context.flow.crosses and bool(route.inter_group)
        self._phase = "inter_node" if crosses else "intra_node"

    def move(self, wave: Wave) -> None:
        steps = self._context.flow.steps(list(zip(wave.numbers, wave.begins, wave.ends, strict=True)))
        if not steps:
            return
        numbers, report = wave.numbers, self._context.report
        doing = f"passes on buckets {numbers[0]} to {numbers[-1]}, {_peers(steps)}"
        with self._context.activity.doing(doing), report.timed(self._phase, doing) as span:
            try:
                messages = ops.relay(
                    self._ring.buffer(wave), torch.tensor(steps, dtype=torch.int64), self._route.inter_group,
                    self._route.intra_group, self._chunk_bytes, self._board, self._seconds,
                )  # fmt: skip
            except RuntimeError as error:
                raise explain(self._context, error, numbers[0]) from error
            span.nbytes = sum(end - begin for begin, end, *_ in steps)
        report.transport_steps += messages


class Collective:
    """Broadcasts each bucket from the rank that reads it, on a device's stream."""

    def __init__(
        self,
        context: TransferContext,
        flow: Flow,
        ring: DeviceRing,
        routes: Mapping[int, Route],
        stream: torch.Stream,
    ) -> None:
        """
        Args:
            routes: for each rank that reads for this one.
            stream: where the broadcasts are.
        """
        self._context = context
        self._flow = flow
        self._ring = ring
        self._routes = routes
        self._stream = stream
        self._phase = "inter_node" if flow.crosses else "intra_node"

    def move(self, wave: Wave) -> None:
        flow, report = self._flow, self._context.report
        for i, number in enumerate(wave.numbers):
            reader, bucket = flow.reader(number), self._ring.sent(wave)
            doing = f"broadcasts bucket {number} from rank {reader}"
            with self._context.activity.doing(doing):
                try:
                    with report.timed(self._phase, doing) as span:
                        broadcast(bucket, self._routes[reader], flow.algorithm, self._stream)
                        span.nbytes = wave.ends[i] - wave.begins[i]
                except RuntimeError as error:
                    raise explain(self._context, error, number) from error
            report.transport_steps += bool(self._routes[reader].inter_group) + bool(self._routes[reader].intra_group)


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
