"""Non-persistent buffers, which no checkpoint has: ranks that lack their values get them from a rank that has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from epload.broadcast import coalesced_bcast
from epload.errors import ManifestMismatch
from epload.model.targets import Targets
from epload.ranks.control import Control
from epload.ranks.topology import Topology


def find_holders(control: Control, model: nn.Module, targets: Targets) -> dict[str, int]:
    """Returns, for each buffer that some rank lacks, the lowest rank that has it. Collective: one agreement round.

    Raises:
        ManifestMismatch: a rank that lacks a buffer has it in another dtype or shape.
    """
    unsaved = {*targets.unsaved_meta, *targets.unsaved_buffers}
    view = {
        name: [str(buffer.dtype), list(buffer.shape), name in targets.unsaved_buffers]
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if name in unsaved and not isinstance(buffer, DTensor)
    }
    holders: dict[str, int] = control.agree("comparing buffers", None, view, _lowest_holders)
    return holders


def _lowest_holders(views: dict[int, dict[str, Any]]) -> dict[str, int]:
    """``views``: for each rank and buffer, the dtype, the shape and whether the rank has the values."""
    holders: dict[str, int] = {}
    for name in sorted({name for view in views.values() for name in view}):
        of_rank = {rank: view[name] for rank, view in sorted(views.items()) if name in view}
        with_values = [rank for rank, buffer in of_rank.items() if buffer[2]]
        if len(of_rank) < len(views) or len(with_values) in (0, len(views)):
            continue
        holders[name] = holder = with_values[0]
        expected = of_rank[holder][:2]
        for rank, (dtype, shape, _) in of_rank.items():
            if [dtype, shape] != expected:
                raise ManifestMismatch(
                    f"expected buffer {name} to be the same on every rank, but it is {expected[0]} {expected[1]} on rank "
                    f"{holder}, which has its values, and {dtype} {shape} on rank {rank}"
                )
    return holders


def share(model: nn.Module, holders: dict[str, int], topology: Topology, stream: torch.Stream | None) -> int:
    """Broadcasts each buffer from its holder to all ranks. Collective.

    Args:
        model: the model that has the buffers.
        holders: what :func:`find_holders` returned.
        topology: the ranks of the load.
        stream: None for a model on CPU. For a model on a device, buffers on CPU are copied to the device and back, because on
            another rank they may be on the device.

    Returns:
        The number of broadcasts that this rank took part in.
    """
    steps = 0
    for holder in sorted(set(holders.values())):
        buffers = [model.get_buffer(name) for name, rank in sorted(holders.items()) if rank == holder]
        sent = [buffer if stream is None else buffer.to(stream.device) for buffer in buffers]
        largest = max(1 << 20, *(tensor.nbytes for tensor in sent))
        coalesced_bcast(sent, holder, topology, bucket_bytes=largest, stream=stream, check=False)
        for buffer, tensor in zip(buffers, sent, strict=True):
            if buffer is not tensor:
                buffer.copy_(tensor)
        route = topology.route(holder)
        steps += bool(route.inter_group) + bool(route.intra_group)
    return steps
