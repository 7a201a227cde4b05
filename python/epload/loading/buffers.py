"""Non-persistent buffers: no checkpoint holds them, but a rank whose model was not made on meta may."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from epload.broadcast import coalesced_bcast
from epload.cluster.topology import Topology
from epload.control.control import Control
from epload.errors import ManifestMismatch
from epload.model.targets import Targets


def find_holders(control: Control, model: nn.Module, targets: Targets) -> dict[str, int]:
    """For each buffer that some rank lacks, the lowest rank that has it. A round of agreement, on all ranks alike.

    Raises:
        ManifestMismatch: it is of another dtype or shape on another rank.
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))
    known = [name for name in {*targets.unsaved_meta, *targets.unsaved_buffers} if name in buffers]
    plain = {name: buffers[name] for name in known if not isinstance(buffers[name], DTensor)}
    view = {name: [str(b.dtype), list(b.shape), name in targets.unsaved_buffers] for name, b in sorted(plain.items())}

    def first(views: dict[int, dict[str, Any]]) -> dict[str, int]:
        holders: dict[str, int] = {}
        lacking = {name for seen in views.values() for name, (_, _, held) in seen.items() if not held}
        for name in sorted(lacking):
            kinds = {rank: seen[name] for rank, seen in views.items() if name in seen}
            holder = next((rank for rank, (_, _, held) in sorted(kinds.items()) if held), None)
            if holder is None or len(kinds) < len(views):
                continue
            for rank, kind in kinds.items():
                if kind[:2] != kinds[holder][:2]:
                    raise ManifestMismatch(
                        f"buffer {name} is {kinds[holder][0]} {kinds[holder][1]} on rank {holder} but {kind[0]} {kind[1]} on "
                        f"rank {rank}, which is to have it from there"
                    )
            holders[name] = holder
        return holders

    found: dict[str, int] = control.settle("comparing buffers", None, view, first)
    return found


def share(model: nn.Module, holders: dict[str, int], topology: Topology, stream: torch.Stream | None) -> int:
    """Sends each buffer from its holder to all ranks. Returns the broadcasts that this rank took part in.

    ``stream``: for a model on a device, by way of which buffers on CPU go too, since they need not be there on every rank.
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
