"""Views and boxes against torch: chains of operations on real tensors, ranges of a source, boxes of strided regions."""

from __future__ import annotations

import contextlib
from itertools import pairwise, permutations
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epload.core import views
from epload.core.views import Assembly, Loop, View, boxes_of_region


def fill(assembly: Assembly, sources: list[Tensor]) -> Tensor:
    """The tensor that an assembly stands for; every element must be written exactly once."""
    made, written = torch.full(assembly.shape, -1), torch.zeros(assembly.shape, dtype=torch.int64)
    for source, view in assembly.parts:
        copy(made, sources[source], view)
        written[slices(view)] += 1
    assert bool((written == 1).all())
    return made


def slices(view: View) -> tuple[slice, ...]:
    return tuple(slice(at, at + n) for at, n in zip(view.start, view.size, strict=True))


def copy(target: Tensor, source: Tensor, view: View) -> None:
    target[slices(view)] = source.as_strided(view.size, view.strides, view.offset)


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


@settings(max_examples=400, deadline=None)
@given(chains())
def test_a_chain_of_operations_is_what_torch_makes_of_it(chain: tuple[Assembly, Tensor, list[Tensor]]) -> None:
    symbol, tensor, sources = chain
    assert symbol.shape == tuple(tensor.shape)
    assert torch.equal(fill(symbol, sources), tensor)


@settings(max_examples=300, deadline=None)
@given(chains(), st.data())
def test_the_ranges_of_a_source_fill_what_the_whole_fills(
    chain: tuple[Assembly, Tensor, list[Tensor]], data: st.DataObject
) -> None:
    """However the source is cut, each range brings exactly its own elements to their places."""
    symbol, tensor, sources = chain
    cuts = {i: sorted(data.draw(st.sets(st.integers(0, max(s.numel(), 1)), max_size=4))) for i, s in enumerate(sources)}
    pieces = []
    for source, view in symbol.parts:
        edges = [0, *cuts[source], sources[source].numel()]
        for begin, end in pairwise(edges):
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
    for attempt in (
        lambda: views.concatenate([a, b], 0),
        lambda: views.stack([a, b], 0),
        lambda: views.split(a, 0, [1, 2]),
        lambda: views.reshape(a, (4, 2)),
        lambda: views.reshape(a, (-1, 4)),
        lambda: views.transpose(a, 0, 2),
    ):
        with pytest.raises(ValueError, match=r"2|dim"):
            attempt()


# ---- boxes of a region ----


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
            tensor = tensor[
                (slice(None),) * dim + (slice(start, draw(st.integers(start, length)), draw(st.integers(1, 3))),)
            ]
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


@settings(max_examples=400, deadline=None)
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
        box = tuple(slice(start, start + size) for start, size in zip(view.start, view.size, strict=True))
        assert bool((written[box] == 0).all())
        written[box] = flat.as_strided(view.size, view.strides, view.offset)
    whole = torch.empty(0, dtype=torch.int64).set_(tensor.untyped_storage())
    marks = torch.zeros(whole.numel(), dtype=torch.int64)
    marks.as_strided(region.shape, region.stride(), region.storage_offset()).copy_(other)
    expected = marks.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    assert torch.equal(written, expected)


@pytest.mark.parametrize(
    ("offset", "loops"),
    [
        (0, [Loop(13, 1, 1)]),  # past the end
        (-1, [Loop(2, 1, 1)]),
        (4, [Loop(1, 1, 1), Loop(3, 5, 1)]),  # between the rows
        (0, [Loop(2, 0, 1)]),  # an element twice
        (0, [Loop(2, 1, 1), Loop(2, 1, 5)]),
    ],
)
def test_a_region_outside_of_the_tensor_or_with_an_element_twice_is_refused(offset: int, loops: list[Loop]) -> None:
    with pytest.raises(ValueError, match=r"outside|twice"):
        list(boxes_of_region((3, 4), (5, 1), offset, loops))
