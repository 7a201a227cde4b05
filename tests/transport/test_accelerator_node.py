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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from epload import HierarchicalLoader, Topology
from epload.core.copy_table import CopyTable
from epload.native import ops
from epload.staging import shared_memory
from support import fakedev, ranks
from support.accelerator import DEVICE, NODES, SEMANTICS, aborted_into, for_readers, meta_net, odd_state, wrong
from support.accelerator import Odd as OddNet
from support.checks import all_fine
from support.failures import Failing, Outcome, check, outcome, unpack_breaks_once
from support.small_model import BUCKET, sharded, state_for

WAYS = {
    2: ([[0, 1]], ("one", "per_node", "partitioned", "auto")),
    3: (NODES[3], ("per_node",)),
    4: (NODES[4], ("per_node",)),
}


pytestmark = pytest.mark.usefixtures("fake_device")


def contract(rank: int, folder: Path) -> list[str]:
    """From meta, reload, after a forward; the stream given, current and own."""
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


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_model_has_its_shards(world: int, tmp_path: Path) -> None:
    save_file(state_for(1), tmp_path / "one.safetensors")
    all_fine(ranks.run(world, contract, tmp_path, setup=fakedev.setup))


def _kinds(rank: int) -> list[str]:
    """Ties, buffers, 0-d, empty and split tensors, casts, tensors that stay on CPU."""
    problems = []
    topology = Topology.from_nodes([[0, 1]])
    one = state_for(1)

    def fill(module: nn.Module, path: str, names: tuple[str, ...]) -> None:
        for name in names:
            getattr(module, name).fill_(-1)

    for readers in ("one", "partitioned"):
        loader = HierarchicalLoader(topology, readers=readers, bucket_bytes=BUCKET)
        with torch.device("meta"):
            odd = sharded(OddNet(), mesh=init_device_mesh(fakedev.NAME, (2,)))
        for number in (1, 2):
            loader.load(odd, for_readers(odd_state(number), readers), strict=False, init_missing=fill)
            tied = {**odd_state(number), "head.weight": odd_state(number)["tail.weight"]}
            problems += [f"{readers}, odd: {text}" for text in wrong(odd, tied)]
        model = meta_net(torch.bfloat16)
        loader.load(model, for_readers(one, readers))
        problems += [f"{readers}, cast: {text}" for text in wrong(model, one, dtype=torch.bfloat16)]
        model = meta_net(offload_policy=CPUOffloadPolicy(pin_memory=False))
        loader.load(model, for_readers(one, readers))
        on_device = [name for name, _ in model.named_buffers()]
        on_cpu = [name for name in one if name not in on_device]
        problems += [f"{readers}, offloaded: {text}" for text in wrong(model, one, on_cpu=on_cpu)]
    return problems


def test_kinds_of_tensors() -> None:
    all_fine(ranks.run(2, _kinds, setup=fakedev.setup))


def _traced(rank: int, semantics: str) -> list[str]:
    """What a rank keeps crosses to its device, on the streams of the pipe; no bucket is sent."""
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


@SEMANTICS
def test_only_what_a_rank_keeps_crosses_to_its_device(semantics: str) -> None:
    all_fine(ranks.run(2, _traced, semantics, setup=partial(fakedev.setup, semantics)))


def _in_the_middle(rank: int) -> Outcome:
    loader = HierarchicalLoader(Topology.from_nodes([[0, 1]]), readers="partitioned", bucket_bytes=BUCKET)
    one, two = state_for(1), state_for(2)
    failures: dict[str, tuple[str, str] | None] = {}
    problems: list[str] = []
    loaded = meta_net()
    loader.load(loaded, two)
    for where, model in {"meta": meta_net(), "loaded": loaded}.items():
        source = Failing(one, OSError(5, "the disk is on fire")) if rank == 1 else one
        failures[f"read, {where}"] = outcome(partial(loader.load, model, source))
        problems += [f"{name} was aborted into" for name in aborted_into(model)]
        with unpack_breaks_once(1, "upload"):
            failures[f"unpack, {where}"] = outcome(partial(loader.load, model, one))
        loader.load(model, two)
        problems += [f"{where}: {text}" for text in wrong(model, two)]
    return failures, problems


def test_failures_in_the_middle() -> None:
    read = ("LoadError", ["rank 1 could not read bucket", "OSError", "the disk is on fire"])
    unpack = ("LoadError", ["rank 1 could not unpack bucket", "RuntimeError: no room to unpack"])
    expected = {"read, meta": read, "read, loaded": read, "unpack, meta": unpack, "unpack, loaded": unpack}
    check(ranks.run(2, _in_the_middle, setup=fakedev.setup), expected)


def _differently(rank: int) -> Outcome:
    algorithm = "auto" if rank == 0 else "two_level"
    loader = HierarchicalLoader(Topology.from_nodes([[0, 1]]), readers="one", algorithm=algorithm, bucket_bytes=BUCKET)
    return {"differ": outcome(partial(loader.load, meta_net(), state_for(1)))}, []


def test_ranks_that_ask_for_different_ways_are_reported() -> None:
    expected = {"differ": ("ManifestMismatch", ["ranks [0] have", "algorithm=auto", "ranks [1] have"])}
    check(ranks.run(2, _differently, setup=fakedev.setup), expected)


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
