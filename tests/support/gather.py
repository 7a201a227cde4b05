"""The full state dict that sharded models hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from epload.core.placement import owned_regions
from epload.model.targets import collect


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor whole, on every rank; regions that several ranks own must be equal."""
    targets = collect(model)
    mine = [
        (
            name,
            owned_regions(targets.layouts[targets.layout[i]], targets.coordinates[targets.layout[i]]),
            _local(model_tensor),
        )
        for i, (name, model_tensor) in enumerate(zip(targets.names, targets.tensors, strict=True))
    ]
    everyone: list[list[tuple[str, list, Tensor]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    made: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for shards in everyone:
        for (name, regions, local), shape in zip(shards, (targets.shapes[name] for name in targets.names), strict=True):
            whole = made.setdefault(name, torch.zeros(shape, dtype=local.dtype))
            count = filled.setdefault(name, torch.zeros(shape, dtype=torch.bool))
            for region in regions:
                there, here = _box(region.start, region.size), _box(region.local_start, region.size)
                fresh = ~count[there]
                assert torch.equal(whole[there][~fresh], local[here][~fresh]), f"{name}: ranks hold different values"
                whole[there] = local[here]
                count[there] = True
    assert all(bool(count.all()) for count in filled.values())
    return {name: made[targets.names[i]] for name, i in targets.index.items()}


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _box(start: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))
