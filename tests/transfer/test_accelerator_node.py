"""Models on a device whose ranks take what they keep out of memory that their node shares: what a load leaves, what crosses to
the devices, which waits it needs, and what happens where memory cannot be shared. On a fake asynchronous accelerator."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from epload import HierarchicalLoader, Topology
from epload.core.copy_table import CopyTable
from epload.native import ops
from epload.transfer import shared_memory
from support import fakedev, ranks
from support.accelerator import DEVICE, NODES, for_readers, meta_net, wrong
from support.checks import all_fine
from support.small_model import BUCKET, state_for

WAYS = {
    2: ([[0, 1]], ("one", "per_node", "partitioned", "auto")),
    3: (NODES[3], ("per_node",)),
}


pytestmark = pytest.mark.usefixtures("fake_device")


def contract(rank: int, folder: Path) -> list[str]:
    """Loads from meta, again, and after a forward; the stream given, current and own."""
    problems: list[str] = []
    world = dist.get_world_size()
    nodes, every_way = WAYS[world]
    topology = Topology.from_nodes(nodes)
    streams = (None, torch.Stream(DEVICE), torch.accelerator.current_stream(DEVICE))
    for number, readers in enumerate(every_way):
        loader = HierarchicalLoader(topology, readers=readers, bucket_bytes=BUCKET, stream=streams[number % 3])
        model = meta_net()
        loader.load(model, folder / "one.safetensors")
        problems += [f"{readers}, from meta: {text}" for text in wrong(model, state_for(1))]
        report = loader.load(model, for_readers(state_for(2), "one" if readers == "auto" else readers))
        problems += [f"{readers}, reload: {text}" for text in wrong(model, state_for(2))]
        if (
            loader._resources.memory is None
            or not loader._resources.memory.shared
            or report.phases["unpack"].nbytes == 0
        ):
            problems.append(f"{readers}: not by way of the node's memory, {report}")
        model(torch.arange(13).to(DEVICE))
        loader.load(model, folder / "one.safetensors")
        problems += [f"{readers}, after a forward: {text}" for text in wrong(model, state_for(1))]
    return problems


@pytest.mark.parametrize("world", [2, 3])
def test_the_model_has_its_shards(world: int, tmp_path: Path) -> None:
    save_file(state_for(1), tmp_path / "one.safetensors")
    all_fine(ranks.run(world, contract, tmp_path, setup=fakedev.setup))


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
    assert loader._resources.memory is not None
    problems = ["the memory is shared"] * loader._resources.memory.shared
    if report.transport_steps < report.buckets:
        problems.append(f"{report.transport_steps} steps for {report.buckets} buckets")
    return problems + wrong(model, state_for(1))


def test_where_memory_cannot_be_shared_the_buckets_are_sent() -> None:
    all_fine(ranks.run(2, _apart, setup=fakedev.setup))
