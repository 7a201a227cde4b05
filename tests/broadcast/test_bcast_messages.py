"""The messages that one call of the op sends: as many as its plan says, each byte over each link once, and no collective."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from epload import _C, Topology, coalesced_bcast
from epload.core.columns import to_raw
from support.broadcasts import SHAPES
from support.on_ranks import on_ranks


def _messages(topo: Topology, rank: int) -> list[str]:
    """Returns the calls that move a bucket from rank 0: each rank passes it on in the chain of the leaders and in
    that of its node."""
    chains = [topo.leaders(0), topo.node]
    sends = sum(rank in chain and rank != chain[-1] for chain in chains)
    return ["c10d::recv_"] * (rank != 0) + ["c10d::send"] * sends


@on_ranks(3)
def test_profiler_sees_the_steps_of_the_plan_and_no_more(rank: int) -> list[str]:
    wrong = []
    for nodes in ([[0, 1], [2]], [[0, 1, 2]]):
        topo = Topology.from_nodes(nodes)
        for bucket_bytes in (100, 1 << 20):
            tensors = [torch.ones(shape) for shape in (*SHAPES, (90,), (3, 17))]
            options: dict[str, Any] = {"topology": topo, "bucket_bytes": bucket_bytes}
            coalesced_bcast(tensors, **options)
            extents = [_C.extent_of(list(t.shape), 4, bucket_bytes) for t in tensors]
            kind_of = to_raw(torch.arange(len(extents)))
            buckets = len(_C.plan_buckets(extents, bucket_bytes, _C.OP_ALIGNMENT, 0, kind_of)[1])
            messages = _messages(topo, rank)
            text = _unexpected(messages * buckets, tensors, **options)
            wrong += [f"{nodes} {bucket_bytes}, {buckets} buckets: {text}"] if text else []
    return wrong


def _unexpected(messages: list[str], tensors: list[Tensor], **options: Any) -> str:
    """Returns what a profiler sees of a call if it is not these calls of c10d and no collective."""
    with (
        CommDebugMode() as comm,
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        ) as profile,
    ):
        coalesced_bcast(tensors, **options)
    seen = Counter(event.name for event in profile.events() if event.name.startswith("c10d::"))
    if comm.get_total_counts():
        return f"CommDebugMode saw {comm.get_comm_counts()}"
    return "" if seen == Counter(messages) else f"expected {Counter(messages)}, saw {seen}"


@on_ranks(4)
def test_profiler_sees_each_stripe_cross_once(rank: int) -> list[str]:
    """One bucket from rank 0. Each rank of its node passes a half on; those of the other swap theirs, and a rest."""
    counts = {
        ((0, 1), (2, 3)): [(2, 0), (1, 1), (1, 3), (2, 2)],
        ((0,), (1,), (2,), (3,)): [(1, 0), (1, 1), (1, 1), (0, 1)],
    }
    wrong = []
    for nodes, of_rank in counts.items():
        topo = Topology.from_nodes([list(node) for node in nodes])
        tensors = [torch.ones(90), torch.ones(3, 17)]
        options: dict[str, Any] = {"topology": topo, "bucket_bytes": 1 << 20, "algorithm": "striped"}
        coalesced_bcast(tensors, **options)
        sent, received = of_rank[rank]
        text = _unexpected(["c10d::send"] * sent + ["c10d::recv_"] * received, tensors, **options)
        wrong += [f"{nodes}: {text}"] if text else []
    return wrong
