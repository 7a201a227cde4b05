"""Views, boxes and placements against torch: chains of operations, ranges of a source, strided regions, what a rank owns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations, product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epload.core import views
from epload.core.placement import Layout, Placement, Sharded, owned_regions
from epload.core.views import Assembly, Loop, boxes_of_region
from support.shards import Coordinate, Cut, box_slices, indices, torch_shards


def fill(assembly: Assembly, sources: list[Tensor]) -> Tensor:
    """The tensor that an assembly stands for; every element must be written exactly once."""
    made, written = torch.full(assembly.shape, -1), torch.zeros(assembly.shape, dtype=torch.int64)
    for source, view in assembly.parts:
        box = box_slices(view.start, view.size)
        made[box] = sources[source].as_strided(view.size, view.strides, view.offset)
        written[box] += 1
    assert bool((written == 1).all())
    return made


@st.composite
def chains(draw: st.DrawFn) -> tuple[Assembly, Tensor, list[Tensor]]:
    """A tensor put together by up to six operations, symbolically and by torch, and the sources it was made from."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    sources = [torch.arange(prod(shape)).reshape(shape)]
    symbol, tensor = Assembly.of(0, shape), sources[0]
    for _ in range(draw(st.integers(0, 6))):
        what = draw(st.sampled_from(["transpose", "reshape", "stack", "cat", "split", "unstack"]))
        if what == "stack":
            dim = draw(st.integers(-tensor.ndim - 1, tensor.ndim))
            sources.append(torch.arange(tensor.numel()).reshape(tensor.shape) + 10000 * len(sources))
            other = Assembly.of(len(sources) - 1, tuple(tensor.shape))
            symbol, tensor = views.stack([symbol, other], dim), torch.stack([tensor, sources[-1]], dim)
            continue
        if what == "reshape":
            numbers, left = [], tensor.numel()
            while left > 1 and len(numbers) < 3:
                numbers.append(draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
                left //= numbers[-1]
            new = [*numbers, left] if left > 1 or draw(st.booleans()) else numbers
            symbol, tensor = views.reshape(symbol, new), tensor.reshape(new)
            continue
        if not tensor.ndim:
            continue
        dim = draw(st.integers(-tensor.ndim, tensor.ndim - 1))
        if what == "transpose":
            other_dim = draw(st.integers(-tensor.ndim, tensor.ndim - 1))
            symbol, tensor = views.transpose(symbol, dim, other_dim), tensor.transpose(dim, other_dim)
        elif what == "cat":
            shape = list(tensor.shape)
            shape[dim] = draw(st.integers(0, 3))
            sources.append(torch.arange(prod(shape)).reshape(shape) + 10000 * len(sources))
            symbol = views.concatenate([Assembly.of(len(sources) - 1, tuple(shape)), symbol], dim)
            tensor = torch.cat([sources[-1], tensor], dim)
        elif what == "split":
            at = draw(st.integers(0, tensor.shape[dim] - 1))
            sizes = [at, tensor.shape[dim] - at]
            symbol, tensor = views.split(symbol, dim, sizes)[1], tensor.split(sizes, dim)[1]
        else:
            at = draw(st.integers(0, tensor.shape[dim] - 1))
            symbol, tensor = views.unstack(symbol, dim)[at], tensor.unbind(dim)[at]
    return symbol, tensor, sources


@settings(max_examples=500)
@given(chains(), st.data())
def test_a_chain_of_operations_is_what_torch_makes_of_it(chain: Any, data: st.DataObject) -> None:
    """However a source is cut, each range brings exactly its own elements to their places."""
    symbol, tensor, sources = chain
    assert symbol.shape == tuple(tensor.shape)
    assert torch.equal(fill(symbol, sources), tensor)
    cuts = {i: sorted(data.draw(st.sets(st.integers(0, max(s.numel(), 1)), max_size=4))) for i, s in enumerate(sources)}
    pieces = []
    for source, view in symbol.parts:
        for begin, end in pairwise([0, *cuts[source], sources[source].numel()]):
            parts = view.within(begin, end)
            for part in parts:
                read = torch.arange(sources[source].numel()).as_strided(part.size, part.strides, part.offset)
                assert read.numel() == 0 or (int(read.min()) >= begin and int(read.max()) < end)
            pieces += [(source, part) for part in parts]
    assert torch.equal(fill(Assembly(symbol.shape, tuple(pieces)), sources), tensor)


def test_a_part_without_elements_is_none_of_a_scalar() -> None:
    one = views.concatenate([Assembly.of(1, (0,)), Assembly.of(0, (1,))], 0)
    assert views.reshape(one, ()) == Assembly.of(0, ())
    assert views.unstack(one, 0) == [Assembly.of(0, ())]


def test_what_does_not_go_together_is_refused() -> None:
    a, b = Assembly.of(0, (2, 3)), Assembly.of(1, (2, 4))
    for operation, *arguments in (
        (views.concatenate, [a, b], 0), (views.stack, [a, b], 0), (views.split, a, 0, [1, 2]), (views.reshape, a, (4, 2)),
        (views.reshape, a, (-1, 4)), (views.transpose, a, 0, 2),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"2|dim"):
            operation(*arguments)


@st.composite
def dense(draw: st.DrawFn) -> Tensor:
    """A tensor of numbered elements whose dims lie in any order, perhaps with gaps between them."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    padded = [n + draw(st.integers(0, 1)) for n in shape]
    order = draw(st.sampled_from(list(permutations(range(len(shape))))))
    tensor = torch.arange(prod(padded)).reshape(padded)[tuple(slice(n) for n in shape)]
    return tensor.permute(order)


def view_of(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    """A view made by up to four operations."""
    for _ in range(draw(st.integers(0, 4))):
        what = draw(st.sampled_from(["slice", "select", "transpose", "unflatten", "flatten"]))
        if not tensor.ndim:
            break
        dim = draw(st.integers(0, tensor.ndim - 1))
        length = tensor.shape[dim]
        if what == "slice" and length:
            start = draw(st.integers(0, length - 1))
            taken = slice(start, draw(st.integers(start, length)), draw(st.integers(1, 3)))
            tensor = tensor[(slice(None),) * dim + (taken,)]
        elif what == "select" and length:
            tensor = tensor.select(dim, draw(st.integers(0, length - 1)))
        elif what == "transpose":
            tensor = tensor.transpose(0, dim)
        elif what == "unflatten" and length and length % 2 == 0:
            tensor = tensor.unflatten(dim, (2, -1))
        elif what == "flatten":
            with contextlib.suppress(RuntimeError):
                tensor = tensor.view(-1)
    return tensor


@settings(max_examples=400)
@given(st.data())
def test_the_boxes_are_the_region(data: st.DataObject) -> None:
    tensor = data.draw(dense())
    region = view_of(data.draw, tensor)
    other = torch.arange(region.numel()).add(1000).reshape(region.shape)
    if other.ndim > 1 and data.draw(st.booleans()):
        other = other.transpose(0, 1).contiguous().transpose(0, 1)
    loops = [Loop(*loop) for loop in zip(region.shape, region.stride(), other.stride(), strict=True)]
    written = torch.zeros(tensor.shape, dtype=torch.int64)
    at = region.storage_offset() - tensor.storage_offset()
    flat = torch.empty(0, dtype=torch.int64).set_(other.untyped_storage(), 0, (other.numel(),))
    for view in boxes_of_region(tuple(tensor.shape), tensor.stride(), at, loops):
        box = box_slices(view.start, view.size)
        assert bool((written[box] == 0).all())
        written[box] = flat.as_strided(view.size, view.strides, view.offset)
    whole = torch.empty(0, dtype=torch.int64).set_(tensor.untyped_storage())
    marks = torch.zeros(whole.numel(), dtype=torch.int64)
    marks.as_strided(region.shape, region.stride(), region.storage_offset()).copy_(other)
    expected = marks.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    assert torch.equal(written, expected)


def test_a_region_outside_of_the_tensor_or_with_an_element_twice_is_refused() -> None:
    for offset, loops in (
        (0, [Loop(13, 1, 1)]),  # past the end
        (-1, [Loop(2, 1, 1)]),
        (4, [Loop(1, 1, 1), Loop(3, 5, 1)]),  # between the rows
        (0, [Loop(2, 0, 1)]),  # an element twice
        (0, [Loop(2, 1, 1), Loop(2, 1, 5)]),
    ):
        with pytest.raises(ValueError, match=r"outside|twice"):
            list(boxes_of_region((3, 4), (5, 1), offset, loops))


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


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_every_shard_replicate_combination_of_one_dim(axes: int) -> None:
    lengths = range(10) if axes < 3 else (1, 5, 9)
    choices: tuple[Placement, ...] = (None, Sharded(0))
    for mesh_shape, length in product(product((1, 2, 3, 4), repeat=axes), lengths):
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
        for mesh in product((1, 2, 3), repeat=2):
            yield Layout((length,), mesh, (Sharded(0), Sharded(0, parts))), [(0, 0, 1), (1, 0, parts)]
            # FSDP over a fused projection: TP has a piece of each part, and FSDP cuts what TP left on the rank.
            for dim in (0, 1):
                fsdp = Sharded(dim, mesh[1] if dim == 1 else 1)
                yield Layout((5, length), mesh, (fsdp, Sharded(1, parts))), [(1, 1, parts), (0, dim, 1)]
    for length, mesh in product(range(10), product((1, 2, 3, 4), repeat=2)):  # FSDP over TP: the right axis cuts first
        yield Layout((2, length), mesh, (Sharded(1, mesh[1]), Sharded(1))), [(1, 1, 1), (0, 1, 1)]
    for length, mesh in product(range(10), product((1, 2, 3), repeat=3)):
        strided = Sharded(0, mesh[2])
        yield Layout((length, 3), mesh, (None, strided, Sharded(0))), [(2, 0, 1), (1, 0, 1)]
        yield Layout((length, 4), mesh, (strided, Sharded(1), Sharded(0))), [(2, 0, 1), (0, 0, 1), (1, 1, 1)]


def test_strided_layouts() -> None:
    for layout, cuts in strided_layouts():
        check_layout(layout, cuts)
