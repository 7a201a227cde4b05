"""What the tests of drop-ins share: a sharded model, and what a call raised or left."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from epload.core.placement import owned_regions
from epload.model.targets import collect
from support.checks import as_bytes, local_of
from support.models import Mlp, mesh, on_meta
from support.shards import box_slices


def sharded(dtype: torch.dtype = torch.float32) -> Any:
    """Uneven and empty shards over 4 ranks, on meta."""
    model = on_meta(lambda: Mlp(7, 5, 3).to(dtype))
    return fully_shard(model, mesh=mesh(("all", 4)))


def on_rank_0(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(values) if dist.get_rank() == 0 else {}


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor whole, on every rank; regions that several ranks own must be equal."""
    targets = collect(model)
    own = []
    for i, (name, tensor) in enumerate(zip(targets.names, targets.tensors, strict=True)):
        layout = targets.layout[i]
        own.append((name, owned_regions(targets.layouts[layout], targets.coordinates[layout]), local_of(tensor).detach()))
    everyone: list[list[tuple[str, list, Tensor]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    made: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for shards in everyone:
        for (name, regions, local), shape in zip(shards, (targets.shapes[name] for name in targets.names), strict=True):
            whole = made.setdefault(name, torch.zeros(shape, dtype=local.dtype))
            count = filled.setdefault(name, torch.zeros(shape, dtype=torch.bool))
            for region in regions:
                there, here = box_slices(region.start, region.size), box_slices(region.local_start, region.size)
                fresh = ~count[there]
                assert torch.equal(whole[there][~fresh], local[here][~fresh]), f"{name}: ranks hold different values"
                whole[there] = local[here]
                count[there] = True
    assert all(bool(count.all()) for count in filled.values())
    return {name: made[targets.names[i]] for name, i in targets.index.items()}


def wrong(model: nn.Module, values: dict[str, Tensor]) -> list[str]:
    state = full_state(model)
    return [name for name, value in values.items() if not torch.equal(as_bytes(state[name]), as_bytes(value))]


def everywhere(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
