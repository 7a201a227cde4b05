"""Boxes of strided regions against torch: every element that a region covers, once, with the element that goes along."""

from __future__ import annotations

import contextlib
from itertools import permutations
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epload.core.placement import row_major_strides
from epload.core.views import Loop, boxes_of_region


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


def test_a_whole_tensor_is_one_box() -> None:
    shape = (3, 1, 4)
    loops = [Loop(12, 1, 1)]
    (view,) = boxes_of_region(shape, row_major_strides(shape), 0, loops)
    assert view == ((0, 0, 0), shape, 0, row_major_strides(shape))


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
