"""The full state dict that sharded models hold."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from epload.core.placement import owned_regions
from epload.model.targets import collect
from support.checks import local_of
from support.shards import box_slices


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
