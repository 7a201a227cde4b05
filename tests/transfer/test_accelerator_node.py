"""Models on a device whose ranks take what they keep out of memory that their node shares: what a load leaves, what crosses to
the devices, which waits it needs, and what happens where memory cannot be shared. On a fake asynchronous accelerator."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from epload import HierarchicalLoader, Topology
from epload.core.copy_table import CopyTable
from epload.native import ops
from epload.transfer import shared_memory
from support import fakedev, ranks
from support.accelerator import DEVICE, meta_net, wrong
from support.checks import all_fine
from support.small_model import BUCKET, state_for

pytestmark = pytest.mark.usefixtures("fake_device")


def _traced(rank: int, semantics: str) -> list[str]:
    """All that a rank keeps crosses to its device, on the streams of the pipe; no bucket is sent."""
    problems = []
    stream = torch.Stream(DEVICE)
    loader = HierarchicalLoader(
        Topology.from_nodes([[0, 1]]), readers="partitioned", bucket_bytes=BUCKET, stream=stream
    )
    model = meta_net()
    loader.load(model, state_for(1))
    crossed = 0

    def upload(sources: Any, origins: Any, targets: Any, copies: torch.Tensor, pipe: Any) -> None:
        nonlocal crossed
        crossed += int(CopyTable(copies).nbytes().sum())
        upload_really(sources, origins, targets, copies, pipe)

    upload_really = ops.upload
    with fakedev.traced() as seen, mock.patch.object(ops, "upload", upload):
        loader.load(model, state_for(2))
    problems += wrong(model, state_for(2))
    where: dict[str, Counter[int]] = {}
    for _, on, what in seen:
        where.setdefault(what, Counter())[on] += 1
    if "broadcast" in where:
        problems.append(f"{where['broadcast']} broadcasts")
    if stream.stream_id in where["copy to device"]:
        problems.append(f"host to device on {where['copy to device']}, with {stream.stream_id} for what follows")
    owned = sum(t.numel() * t.element_size() for t in (p.to_local() for p in model.parameters()))
    owned += sum(b.numel() * b.element_size() for b in model.buffers())
    if crossed != owned:
        problems.append(f"{crossed} bytes crossed for {owned} that the rank keeps")
    return problems


@pytest.mark.parametrize("semantics", fakedev.SEMANTICS)
def test_only_what_a_rank_keeps_crosses_to_its_device(semantics: str) -> None:
    all_fine(ranks.run(2, _traced, semantics, setup=partial(fakedev.setup, semantics)))


def _apart(rank: int) -> list[str]:
    loader = HierarchicalLoader(Topology.from_nodes([[0, 1]]), readers="partitioned", bucket_bytes=BUCKET)
    model = meta_net()
    with mock.patch.object(shared_memory, "_make", side_effect=OSError("no memfd here")):
        report = loader.load(model, state_for(1))
    sent = report.transport_steps >= report.buckets
    return [
        *wrong(model, state_for(1)),
        *([] if sent else [f"sent {report.transport_steps} of {report.buckets} buckets"]),
    ]


def test_where_memory_cannot_be_shared_the_buckets_are_sent() -> None:
    all_fine(ranks.run(2, _apart, setup=fakedev.setup))
