"""The local shards of a layout in plain torch: index tensors cut with torch.chunk. No epload code takes part in it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import torch
from torch import Tensor

Cut = tuple[int, int, int]
"""Mesh axis, dim, and the parts that the dim is cut into before this axis cuts each of them (1: none)."""
Coordinate = tuple[int, ...]


def torch_chunk(tensor: Tensor, parts: int, dim: int) -> list[Tensor]:
    """torch.chunk gives fewer pieces than asked for when the size is small; a mesh has a rank for each all the same."""
    pieces = list(torch.chunk(tensor, parts, dim))
    return pieces + [tensor.narrow(dim, 0, 0)] * (parts - len(pieces))


def torch_shards(tensor: Tensor, mesh_shape: Sequence[int], cuts: Sequence[Cut]) -> dict[Coordinate, Tensor]:
    """The local shard at each coordinate of the mesh, the axes cutting in the order of ``cuts``."""
    shards: dict[tuple[tuple[int, int], ...], Tensor] = {(): tensor}
    for axis, dim, parts in cuts:
        cut = {}
        for where, shard in shards.items():
            pieces = [torch_chunk(part, mesh_shape[axis], dim) for part in torch_chunk(shard, parts, dim)]
            for index in range(mesh_shape[axis]):
                cut[where + ((axis, index),)] = torch.cat([piece[index] for piece in pieces], dim)
        shards = cut
    at = {frozenset(where): shard for where, shard in shards.items()}
    cutting = [axis for axis, _, _ in cuts]
    return {
        coordinate: at[frozenset((axis, coordinate[axis]) for axis in cutting)] for coordinate in product(*map(range, mesh_shape))
    }


def indices(shape: Sequence[int]) -> Tensor:
    """A tensor of this shape whose elements are all different."""
    return torch.arange(prod(shape)).reshape(tuple(shape))


def box_slices(start: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
