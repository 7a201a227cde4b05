"""Placements against plain torch: which elements of a tensor a rank owns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epload.core.placement import (
    Box,
    Layout,
    Placement,
    Replicated,
    Sharded,
    chunk_intervals,
    intersect,
    owned_regions,
    slice_intervals,
)
from support.shards import Coordinate, Cut, box_slices, indices, torch_chunk, torch_shards


def check_layout(layout: Layout, cuts: Sequence[Cut]) -> None:
    """Regions put together equal the oracle's shard on each coordinate, and each replica group owns all of it once."""
    whole = indices(layout.shape)
    replicating = [axis for axis, p in enumerate(layout.placements) if isinstance(p, Replicated)]
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
    """How axes cut when none is strided by an axis to its right."""
    return [(axis, p.dim, p.split_factor) for axis, p in enumerate(placements) if isinstance(p, Sharded)]


def meshes(axes: int, sizes: Sequence[int] = (1, 2, 3, 4)) -> Iterator[tuple[int, ...]]:
    return product(sizes, repeat=axes)


# ---- owned_regions ----


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_every_shard_replicate_combination_of_one_dim(axes: int) -> None:
    lengths = range(10) if axes < 3 else (1, 5, 9)
    choices: tuple[Placement, ...] = (Replicated(), Sharded(0))
    for mesh_shape, length in product(meshes(axes), lengths):
        for placements in product(choices, repeat=axes):
            check_layout(Layout((length,), mesh_shape, placements), left_to_right(placements))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 2), (5, 7), (9, 1), (2, 3, 5), (4, 0, 3)], ids=str)
@pytest.mark.parametrize("mesh_shape", [(3,), (2, 3), (4, 2), (2, 1, 3), (2, 3, 2)], ids=str)
def test_every_shard_replicate_combination_of_several_dims(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> None:
    choices: tuple[Placement, ...] = (Replicated(), *(Sharded(dim) for dim in range(len(shape))))
    for placements in product(choices, repeat=len(mesh_shape)):
        check_layout(Layout(shape, mesh_shape, placements), left_to_right(placements))


@pytest.mark.parametrize("dim", [0, 1])
def test_fsdp_over_tp_cuts_by_the_right_axis_first(dim: int) -> None:
    for mesh_shape, length in product(meshes(2), range(10)):
        shape = (length, 2) if dim == 0 else (2, length)
        placements = (Sharded(dim, split_factor=mesh_shape[1]), Sharded(dim))
        check_layout(Layout(shape, mesh_shape, placements), [(1, dim, 1), (0, dim, 1)])


def test_lone_strided_shard_keeps_a_piece_of_every_part() -> None:
    for size, split_factor, length in product((1, 2, 3, 4), (1, 2, 3, 4, 5), range(13)):
        layout = Layout((2, length), (size,), (Sharded(1, split_factor),))
        check_layout(layout, [(0, 1, split_factor)])


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_three_axes_of_one_dim_in_any_order(order: tuple[int, ...]) -> None:
    """torch writes the order in which axes cut as split factors: the shards made before by axes to the right."""
    for mesh_shape in ((2, 2, 2), (2, 3, 2), (3, 2, 4), (1, 2, 3), (2, 1, 2)):
        split = [prod(mesh_shape[other] for other in order[: order.index(axis)] if other > axis) for axis in range(3)]
        placements = tuple(Sharded(0, factor) for factor in split)
        for length in (0, 1, 5, 7, 9, 12, 17):
            check_layout(Layout((length, 2), mesh_shape, placements), [(axis, 0, 1) for axis in order])


def test_hsdp_over_tp() -> None:
    for mesh_shape, length in product(meshes(3, (1, 2, 3)), range(10)):
        placements = (Replicated(), Sharded(0, split_factor=mesh_shape[2]), Sharded(0))
        check_layout(Layout((length, 3), mesh_shape, placements), [(2, 0, 1), (1, 0, 1)])


def test_strided_across_an_axis_that_shards_another_dim() -> None:
    for mesh_shape, length in product(meshes(3, (1, 2, 3)), range(10)):
        placements = (Sharded(0, split_factor=mesh_shape[2]), Sharded(1), Sharded(0))
        check_layout(Layout((length, 4), mesh_shape, placements), [(2, 0, 1), (0, 0, 1), (1, 1, 1)])


@pytest.mark.parametrize("fsdp_dim", [0, 1])
def test_fsdp_over_a_fused_projection_under_tp(fsdp_dim: int) -> None:
    """The fused dim is cut in parts and every rank has a piece of each; FSDP cuts what TP left on the rank."""
    for mesh_shape, parts, length in product(meshes(2, (1, 2, 3)), (2, 3), range(12)):
        fsdp = Sharded(fsdp_dim, mesh_shape[1] if fsdp_dim == 1 else 1)
        placements = (fsdp, Sharded(1, parts))
        check_layout(Layout((5, length), mesh_shape, placements), [(1, 1, parts), (0, fsdp_dim, 1)])


def test_shard_to_the_left_of_a_lone_strided_shard() -> None:
    for mesh_shape, length in product(meshes(2), range(13)):
        placements = (Sharded(0), Sharded(0, 2))
        check_layout(Layout((length,), mesh_shape, placements), [(0, 0, 1), (1, 0, 2)])


# ---- intervals and boxes ----

intervals_of = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), max_size=5)


def spelled(intervals: Sequence[tuple[int, int]]) -> list[int]:
    return [index for start, size in intervals for index in range(start, start + size)]


@settings(deadline=None)
@given(intervals_of, st.integers(0, 40), st.integers(0, 40))
def test_slice_intervals_is_a_slice(intervals: list[tuple[int, int]], begin: int, end: int) -> None:
    assert spelled(slice_intervals(intervals, begin, end)) == spelled(intervals)[begin:end]


@settings(deadline=None)
@given(intervals_of, st.integers(1, 9))
def test_chunk_intervals_is_torch_chunk(intervals: list[tuple[int, int]], parts: int) -> None:
    pieces = torch_chunk(torch.tensor(spelled(intervals), dtype=torch.int64), parts, 0)
    assert [spelled(chunk_intervals(intervals, parts, i)) for i in range(parts)] == [piece.tolist() for piece in pieces]


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))

    def box() -> Box:
        start = [draw(st.integers(0, n)) for n in shape]
        return tuple(start), tuple(draw(st.integers(0, n - a)) for n, a in zip(shape, start, strict=True))

    return shape, box(), box()


@settings(deadline=None)
@given(two_boxes())
def test_intersect_is_the_shared_elements(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, a, b = case
    masks = []
    for box in (a, b):
        mask = torch.zeros(shape, dtype=torch.bool)
        mask[box_slices(*box)] = True
        masks.append(mask)
    both = masks[0] & masks[1]
    shared = intersect(a, b)
    assert shared == intersect(b, a)
    if shared is None:
        assert not both.any()
    else:
        mask = torch.zeros(shape, dtype=torch.bool)
        mask[box_slices(*shared)] = True
        assert torch.equal(mask, both)
        assert all(size > 0 for size in shared[1])
