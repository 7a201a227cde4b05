"""Sends the source's manifest to all ranks, the way the data will go."""

from __future__ import annotations

import torch
from torch import Tensor

from epload import ops
from epload.device_transfer import broadcast, steps_of
from epload.flow import Flow
from epload.topology import Route


def share(compact: bytes, nbytes: int, flow: Flow, route: Route, stream: torch.Stream | None) -> tuple[bytes, int]:
    """Gives every rank the bytes that the source has, and the number of messages or broadcasts this took.

    Args:
        compact: on the source ``nbytes`` bytes, else empty.
        stream: for a load on a device, on which even a job without a backend for CPU tensors can send; None goes through host
            memory.
    """
    flat = torch.empty(nbytes, dtype=torch.uint8)
    if compact:
        flat.copy_(torch.frombuffer(bytearray(compact), dtype=torch.uint8))
    if stream is not None:
        return _on_stream(flat, flow, route, stream)
    if flow.algorithm == "flat":
        ops.coalesced_bcast([flat], route.src, route.inter_group, "", nbytes, "flat")
        return bytes(flat.tolist()), 1
    one = Flow(flow.nodes, flow.rank, flow.src, "one", "two_level", shared=False)
    table = torch.tensor(one.steps([(0, 0, nbytes)]), dtype=torch.int64)
    steps = ops.relay(flat, table, route.inter_group, route.intra_group, one.chunk_bytes(nbytes))
    return bytes(flat.tolist()), steps


def _on_stream(flat: Tensor, flow: Flow, route: Route, stream: torch.Stream) -> tuple[bytes, int]:
    with stream:
        there = flat.to(stream.device)
        broadcast(there, route, flow.algorithm, stream)
        return bytes(there.tolist()), steps_of(route, flow, flat.nbytes)
