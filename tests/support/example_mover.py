"""A mover as an example of how to write one: point-to-point messages of torch.distributed, a whole bucket each."""

from __future__ import annotations

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from epload.errors import LoadError, message_of
from epload.planning.waves import Wave
from epload.transfer.context import TransferContext
from epload.transfer.host_ring import HostRing
from epload.transfer.movers import Mover, Routes


def point_to_point(context: TransferContext, ring: HostRing, routes: Routes, chunk_bytes: int, seconds: float) -> Mover:
    """Does the steps of the flow, one after the other. See :func:`~epload.transfer.movers.relay`."""
    route = next(iter(routes.values()))
    groups = [_resolve_process_group(name) if name else None for name in (route.inter_group, route.intra_group)]

    def move(wave: Wave) -> None:
        """Receives each bucket from the rank before, and sends it to those after."""
        sends = []
        try:
            for begin, end, *peers in context.flow.steps(list(zip(wave.numbers, wave.begins, wave.ends, strict=True))):
                data = ring.bucket(wave)[begin:end]
                for i, peer in enumerate(peers):  # from a rank in either group, then to one in either
                    group = groups[i % 2]
                    if peer < 0 or group is None:
                        continue
                    ranks = group._get_backend(torch.device("cpu")).options.global_ranks_in_group or range(group.size())
                    call = group.recv if i < 2 else group.send
                    work = call([data], list(ranks).index(peer), 0)
                    sends.append(work) if i >= 2 else work.wait()
                    context.report.transport_steps += 1
            for work in sends:
                work.wait()
        except RuntimeError as error:
            raise LoadError(f"rank {context.flow.rank} could not pass on wave {wave.index}: {message_of(error)}") from error

    return move
