"""Broadcasts many tensors from rank 0, without a model or a file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import epload
from epload.core import dtypes
from epload.native import ops

BUCKET = 16 << 20
CHUNK = 1 << 20
Collective = Callable[[list[Tensor]], None]


class Groups:
    """Process groups for plain c10d broadcasts."""

    def __init__(self, topology: epload.Topology) -> None:
        """Collective: all ranks create all groups in the same order."""
        self.leaders = topology.leaders(0)
        groups = [dist.new_group(list(node)) for node in topology.nodes]
        self.intra, self.inter = groups[topology.nodes.index(topology.node)], dist.new_group(list(self.leaders))
        self.first, self.rank = topology.leaders(0)[topology.nodes.index(topology.node)], topology.rank

    def broadcast(self, bucket: Tensor, algorithm: str) -> None:
        """``"flat"``: gloo's tree over all ranks. ``"two-level"``: gloo's tree over the leaders, then within every node."""
        if algorithm == "flat":
            dist.broadcast(bucket, 0)
            return
        if self.rank in self.leaders:
            dist.broadcast(bucket, 0, group=self.inter)
        dist.broadcast(bucket, self.first, group=self.intra)


def _per_parameter(topology: epload.Topology) -> Collective:
    def run(tensors: list[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, 0)

    return run


def _op(algorithm: str, topology: epload.Topology) -> Collective:
    return partial(epload.coalesced_bcast, topology=topology, algorithm=algorithm)


def _ring(topology: epload.Topology) -> Collective:
    """Passes buckets from rank to rank in chunks, node after node, like NCCL's broadcast."""
    order = [rank for node in topology.nodes for rank in node]
    at = order.index(topology.rank)
    before = order[at - 1] if at else -1
    after = order[at + 1] if at + 1 < len(order) else -1
    name = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    staging = torch.empty(BUCKET, dtype=torch.uint8)

    def run(tensors: list[Tensor]) -> None:
        for bucket, table in _buckets(tensors):
            nbytes = int(table[-1, 1]) + bucket[-1].nbytes
            if at == 0:
                ops.pack(staging, bucket, table)
            ops.relay(staging, torch.tensor([[0, nbytes, before, -1, after, -1]]), name, "", CHUNK)
            if at:
                ops.unpack(staging, bucket, table)

    return run


def _tree(topology: epload.Topology) -> Collective:
    """Broadcasts buckets with gloo's own algorithm, a tree over all ranks."""
    staging = torch.empty(BUCKET, dtype=torch.uint8)

    def run(tensors: list[Tensor]) -> None:
        for bucket, table in _buckets(tensors):
            nbytes = int(table[-1, 1]) + bucket[-1].nbytes
            if topology.rank == 0:
                ops.pack(staging, bucket, table)
            dist.broadcast(staging[:nbytes], 0)
            if topology.rank != 0:
                ops.unpack(staging, bucket, table)

    return run


def _buckets(tensors: list[Tensor]) -> list[tuple[list[Tensor], Tensor]]:
    """The tensors and the copy table of each bucket. No tensor may be larger than a bucket."""
    made: list[tuple[list[Tensor], Tensor]] = []
    bucket: list[Tensor] = []
    rows: list[list[int]] = []
    end = 0
    dims = max(t.ndim for t in tensors)
    for tensor in [*tensors, None]:
        if tensor is None or end + tensor.nbytes > BUCKET:
            made.append((bucket, torch.tensor(rows, dtype=torch.int64)))
            bucket, rows, end = [], [], 0
        if tensor is not None:
            pad = [0] * (dims - tensor.ndim)
            geometry = [*([0] * dims), *tensor.shape, *pad, *tensor.stride(), *pad]
            rows.append([len(bucket), end, dtypes.code(tensor.dtype), tensor.ndim, *geometry])
            bucket.append(tensor)
            end += -(-tensor.nbytes // 64) * 64
    return made


COLLECTIVES: dict[str, Callable[[epload.Topology], Collective]] = {
    "one broadcast per tensor": _per_parameter,
    "buckets, flat tree (gloo)": _tree,
    "buckets, flat ring (like NCCL)": _ring,
    "buckets, two_level": partial(_op, "two_level"),
    "buckets, striped": partial(_op, "striped"),
}
