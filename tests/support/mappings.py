"""Checkpoints that are assembled from a mapping in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from epload import Mapping
from epload.mapping.place import Place
from epload.mapping.place import place as place_tensors
from support.shards import box_slices as box

Shapes = dict[str, tuple[int, ...]]


def shapes_of(tensors: dict[str, Tensor]) -> Shapes:
    return {name: tuple(value.shape) for name, value in tensors.items()}


def place(mapping: Mapping, sources: Shapes, targets: Shapes) -> list[tuple[Place, ...]]:
    return place_tensors(mapping, list(sources), list(sources.values()), targets)


def assemble(mapping: Mapping, sources: dict[str, Tensor], targets: Shapes) -> dict[str, Tensor]:
    """Fills targets region by region; an element written twice or never fails."""
    dtype = next(iter(sources.values())).dtype
    made = {name: torch.zeros(shape, dtype=dtype) for name, shape in targets.items()}
    written = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in targets.items()}
    placed = place(mapping, shapes_of(sources), targets)
    for value, places in zip(sources.values(), placed, strict=True):
        for target, view in places:
            made[target][box(view.start, view.size)] = value.as_strided(view.size, view.strides, view.offset)
            written[target][box(view.start, view.size)] += 1
    filled = {target for places in placed for target, _ in places}
    assert all(bool((written[name] == 1).all()) for name in filled)
    return {name: made[name] for name in filled}
