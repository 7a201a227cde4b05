"""Placements against plain torch: which elements of a tensor a rank owns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product
from math import prod

import pytest
import torch
from torch import Tensor

from epload.core.placement import Layout, Placement, Sharded, owned_regions
from support.shards import Coordinate, Cut, box_slices, indices, torch_shards


def check_layout(layout: Layout, cuts: Sequence[Cut]) -> None:
    """Regions put together equal the oracle's shard on each coordinate, and each replica group owns all of it once."""
    whole = indices(layout.shape)
    replicating = [axis for axis, p in enumerate(layout.placements) if p is None]
    owners: dict[Coordinate, Tensor] = {}
    for coordinate, expected in torch_shards(whole, layout.mesh_shape, cuts).items():
        where = f"{layout} at {coordinate}"
        local = torch.full(expected.shape, -1)
        group = owners.setdefault(tuple(coordinate[axis] for axis in replicating), torch.zeros_like(whole))
        for region in owned_regions(layout, coordinate):
            assert all(size > 0 for size in region.size), where
            box = box_slices(region.start, region.size)
            target = local[box_slices(region.local_start, region.size)]
            assert target.shape == whole[box].shape, where
            assert (target == -1).all(), f"{where}: regions overlap in the shard"
            target.copy_(whole[box])
            group[box] += 1
        assert torch.equal(local, expected), where
    for group in owners.values():
        assert (group == 1).all(), f"{layout}: owned {group.tolist()} times"


def left_to_right(placements: Sequence[Placement]) -> list[Cut]:
    """Returns the cuts of axes none of which is strided by an axis to its right."""
    return [(axis, p.dim, p.split_factor) for axis, p in enumerate(placements) if isinstance(p, Sharded)]


def meshes(axes: int, sizes: Sequence[int] = (1, 2, 3, 4)) -> Iterator[tuple[int, ...]]:
    return product(sizes, repeat=axes)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_every_shard_replicate_combination_of_one_dim(axes: int) -> None:
    lengths = range(10) if axes < 3 else (1, 5, 9)
    choices: tuple[Placement, ...] = (None, Sharded(0))
    for mesh_shape, length in product(meshes(axes), lengths):
        for placements in product(choices, repeat=axes):
            check_layout(Layout((length,), mesh_shape, placements), left_to_right(placements))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 2), (5, 7), (9, 1), (2, 3, 5), (4, 0, 3)], ids=str)
@pytest.mark.parametrize("mesh_shape", [(3,), (2, 3), (4, 2), (2, 1, 3), (2, 3, 2)], ids=str)
def test_every_shard_replicate_combination_of_several_dims(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> None:
    choices: tuple[Placement, ...] = (None, *(Sharded(dim) for dim in range(len(shape))))
    for placements in product(choices, repeat=len(mesh_shape)):
        check_layout(Layout(shape, mesh_shape, placements), left_to_right(placements))


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_three_axes_of_one_dim_in_any_order(order: tuple[int, ...]) -> None:
    """torch writes the order in which axes cut as split factors: the shards made before by axes to the right."""
    for mesh_shape in ((2, 2, 2), (2, 3, 2), (3, 2, 4), (1, 2, 3), (2, 1, 2)):
        split = [prod(mesh_shape[other] for other in order[: order.index(axis)] if other > axis) for axis in range(3)]
        placements = tuple(Sharded(0, factor) for factor in split)
        for length in (0, 1, 5, 7, 9, 12, 17):
            check_layout(Layout((length, 2), mesh_shape, placements), [(axis, 0, 1) for axis in order])


def strided_layouts() -> Iterator[tuple[Layout, list[Cut]]]:
    """Layouts with the order in which axes cut, each a mesh axis, a dim and the parts that are cut one by one."""
    for length, parts in product(range(13), (1, 2, 3, 5)):
        for size in (1, 2, 3, 4):  # a lone strided shard keeps a piece of every part
            yield Layout((2, length), (size,), (Sharded(1, parts),)), [(0, 1, parts)]
        for mesh in meshes(2, (1, 2, 3)):
            yield Layout((length,), mesh, (Sharded(0), Sharded(0, parts))), [(0, 0, 1), (1, 0, parts)]
            # FSDP over a fused projection: TP has a piece of each part, and FSDP cuts what TP left on the rank.
            for dim in (0, 1):
                fsdp = Sharded(dim, mesh[1] if dim == 1 else 1)
                yield Layout((5, length), mesh, (fsdp, Sharded(1, parts))), [(1, 1, parts), (0, dim, 1)]
    for length, mesh in product(range(10), meshes(2)):  # FSDP over TP: the right axis cuts first
        yield Layout((2, length), mesh, (Sharded(1, mesh[1]), Sharded(1))), [(1, 1, 1), (0, 1, 1)]
    for length, mesh in product(range(10), meshes(3, (1, 2, 3))):
        strided = Sharded(0, mesh[2])
        yield Layout((length, 3), mesh, (None, strided, Sharded(0))), [(2, 0, 1), (1, 0, 1)]
        yield Layout((length, 4), mesh, (strided, Sharded(1), Sharded(0))), [(2, 0, 1), (0, 0, 1), (1, 1, 1)]


def test_strided_layouts() -> None:
    for layout, cuts in strided_layouts():
        check_layout(layout, cuts)
