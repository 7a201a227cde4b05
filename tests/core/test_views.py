"""Views against torch: chains of operations on real tensors, and cutting a view by ranges of its source."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epload.core import views
from epload.core.views import Assembly, View


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
