"""Sends the source's manifest to all ranks, the way the data will go. Both give each rank the source's bytes, and the number of
messages or broadcasts that this took."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from epload.cluster.topology import Route
from epload.native import ops
from epload.planning.schedule import Flow
from epload.staging.board import Board
from epload.staging.device import wait_for
from epload.transport.movers import broadcast, broadcast_steps


def through_host(compact: bytes, flow: Flow, route: Route, board: Board, limit: float) -> tuple[bytes, int]:
    """
    Args:
        compact: of one length on all ranks; what other ranks than the source have in it is not looked at.
        board: a failure posted on it ends the wait for a message.
        limit: seconds that a message may take.
    """
    flat = _tensor(compact)
    table = torch.tensor(flow.steps([(0, 0, flat.nbytes)]), dtype=torch.int64)
    steps = ops.relay(
        flat, table, route.inter_group, route.intra_group, flow.chunk_bytes(flat.nbytes), board.words, limit
    )
    return bytes(flat.tolist()), steps


def on_stream(
    compact: bytes, flow: Flow, route: Route, stream: torch.Stream, check: Callable[[], None]
) -> tuple[bytes, int]:
    """The same over the device's backend, as a job may have no other. ``check``: as for ``staging.device.wait_for``."""
    with stream:
        there = _tensor(compact).to(stream.device)
        broadcast(there, route, flow.algorithm, stream)
        arrived = torch.Event(stream.device)
        arrived.record(stream)
        wait_for(arrived, check)
        return bytes(there.tolist()), broadcast_steps(route, flow, there.nbytes)


def _tensor(compact: bytes) -> Tensor:
    return torch.frombuffer(bytearray(compact), dtype=torch.uint8)
