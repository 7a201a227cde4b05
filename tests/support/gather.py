"""Saving's mirror, for tests: the full state dict that sharded models hold, and the checkpoint it came from. Plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from epload.core.placement import owned_regions
from epload.mapping import Mapping
from epload.mapping.place import place
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


def checkpoint_of(model: nn.Module, mapping: Mapping, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint, of names and shapes ``like`` one that could be loaded, that holds what the model holds."""
    state = full_state(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    placed = place(mapping, list(like), [tuple(tensor.shape) for tensor in like.values()], shapes)
    made = {}
    for name, places in zip(like, placed, strict=True):
        if not places:
            continue
        assert sum(prod(view.size) for _, view in places) == like[name].numel(), (
            f"{name} is not all in the model, or twice"
        )
        made[name] = torch.empty(like[name].shape, dtype=state[places[0][0]].dtype)
        for target, view in places:
            made[name].as_strided(view.size, view.strides, view.offset).copy_(
                state[target][_box(view.start, view.size)]
            )
    return made


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _box(start: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))
