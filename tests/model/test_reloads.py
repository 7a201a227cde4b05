"""A model that was moved, swapped, retied or dropped between loads of one loader is loaded as it is now."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from epload import HierarchicalLoader, Topology
from epload.model.dtensor import local_tensors
from support import ranks
from support.checks import all_fine
from support.small_model import BUCKET, meta_net, state_for, wrong


def after_loads(rank: int) -> list[str]:
    """Moves and swaps of a model between loads work, and the loads behind them are right."""
    problems = []
    loader = HierarchicalLoader(Topology.from_nodes([[0, 1]]), bucket_bytes=BUCKET, readers="one")
    model = meta_net()
    number = 0

    def load(what: str, dtype: torch.dtype = torch.float32) -> None:
        nonlocal number
        number += 1
        loader.load(model, state_for(number))
        expected = state_for(number, dtype)  # Module.to casts buffers too
        problems.extend(f"after {what}: {text}" for text in wrong(model, expected))

    for what in ("meta", "a load", "two loads", "three"):
        load(what)
    model(torch.arange(13)).sum().backward()
    load("a step")
    weight = model.embed.weight
    model.to(torch.bfloat16)
    load("to bfloat16", torch.bfloat16)
    load("to bfloat16, again", torch.bfloat16)
    model.to(torch.float32)
    load("to float32")
    load("to float32, again")
    model.to_empty(device="cpu")
    load("to_empty")
    load("to_empty, again")
    fresh = nn.Parameter(torch.zeros_like(weight))
    torch.utils.swap_tensors(model.embed.weight, fresh)
    load("swap_tensors")
    model.table = torch.zeros(5, 3)
    load("a new buffer")
    alive = weakref.ref(model)
    model = meta_net()
    gc.collect()
    if alive() is not None:
        problems.append("the loader keeps a model alive that was trained and dropped")
    load("another model")
    return problems


def test_models_can_be_moved_and_dropped_between_loads() -> None:
    all_fine(ranks.run(2, after_loads))


def _both_ways(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2))
    model = meta_net().to_empty(device="cpu")
    tensors: list[Tensor] = [*model.parameters(), *model.buffers(), torch.zeros(()), nn.Parameter(torch.zeros(3))]
    for placements in ([Shard(0), Shard(0)], [Replicate(), Shard(1)], [Replicate(), Replicate()]):
        tensor = distribute_tensor(torch.zeros(5, 3), mesh, placements)
        tensors += [tensor, nn.Parameter(tensor), tensor.to("meta"), tensor.double()]
    problems = []
    for a, b in zip(local_tensors(tensors, private=True), local_tensors(tensors, private=False), strict=True):
        if (a.shape, a.dtype, a.device, a.requires_grad) != (b.shape, b.dtype, b.device, False):
            problems.append(f"{a} {b}")
        if not a.is_meta and a.data_ptr() != b.data_ptr():
            problems.append("not the same memory")
    return problems


def test_private_and_public_ways_to_read_dtensors_agree() -> None:
    all_fine(ranks.run(4, _both_ways))
