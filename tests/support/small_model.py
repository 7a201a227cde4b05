"""A small model that 4 ranks divide unevenly, its values, and what each rank must hold of them after a load."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from epload import HierarchicalLoader, Topology

NODES = [[0, 1], [2, 3]]
BUCKET = 256
"""Bytes; the small model takes a dozen such buckets."""
State = dict[str, Tensor]


def loader() -> HierarchicalLoader:
    return HierarchicalLoader(Topology.from_nodes(NODES), bucket_bytes=4096, progress=False, timeout=60)


class Net(nn.Module):
    """Dims that 4 ranks divide unevenly, and some so small that ranks own nothing."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6, dtype=dtype)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 11, dtype=dtype), nn.Linear(11, 6, dtype=dtype)) for _ in range(2))
        self.norm = nn.LayerNorm(6, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(1, dtype=dtype))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.zeros(5, 3, dtype=torch.float32))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.norm(hidden) * self.scale


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def meta_net(dtype: torch.dtype = torch.float32, where: str = "cpu", **options: Any) -> nn.Module:
    mesh = init_device_mesh(torch.device(where).type, (dist.get_world_size(),))
    with torch.device("meta"):
        return sharded(Net(dtype), mesh=mesh, **options)


def state_for(number: int = 0, dtype: torch.dtype = torch.float32) -> State:
    """Values that no two elements of two names share, unless a narrow dtype rounds them together."""
    with torch.device("meta"):
        model = Net()
    made = {}
    for i, (name, value) in enumerate(model.state_dict().items()):
        whole = torch.arange(prod(value.shape)).reshape(value.shape) + 1000 * (i + 1) + 50_000 * number
        made[name] = whole.to(dtype if value.is_floating_point() else value.dtype)
    return made


def local_of(full: Tensor, like: Tensor) -> Tensor:
    """Returns the part of ``full``, which is laid out as ``like``, that this rank owns."""
    if isinstance(like, DTensor):
        for axis, placement in enumerate(like.placements):
            if isinstance(placement, Shard):
                pieces = full.chunk(like.device_mesh.size(axis), placement.dim)
                at = like.device_mesh.get_local_rank(axis)
                full = pieces[at] if at < len(pieces) else full.narrow(placement.dim, 0, 0)
    return full


def wrong(
    model: nn.Module, state: Mapping[str, Tensor], dtype: torch.dtype | None = None, where: str = "cpu",
    on_cpu: Collection[str] = (),
) -> list[str]:  # fmt: skip
    """Names whose local values are not those of the full tensors in ``state``, cast to ``dtype`` if floating; or which lie on
    another device than ``where``, or for names in ``on_cpu`` than the CPU."""
    problems = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        full = state[name]
        if dtype is not None and isinstance(tensor, nn.Parameter):
            full = full.to(dtype)
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        expected = local_of(full, tensor)
        device = "cpu" if name in on_cpu else where
        if (local.dtype, str(local.device)) != (expected.dtype, device) or not torch.equal(local.cpu(), expected):
            problems.append(f"{name}: {local.device} {local.dtype} {local.flatten()[:3]} not {expected.flatten()[:3]}")
    return problems


def only_readers(value: Any, readers: str = "one") -> Any:
    reading = {"one": (0,), "auto": (0,), "per_node": (0, 2)}.get(readers, range(dist.get_world_size()))
    return value if dist.get_rank() in reading else None
