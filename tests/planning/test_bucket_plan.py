"""The bucket plan: every byte once, in order, aligned, in pieces that are boxes; nonsense is refused."""

from __future__ import annotations

from array import array
from itertools import groupby, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epload import _C

Extent = tuple[int, int, int]


def plan_buckets(extents: list[Extent], capacity: int, alignment: int, header: int) -> tuple[Any, list[int]]:
    kind_of = array("q", range(len(extents))).tobytes()
    columns, bucket_nbytes = _C.plan_buckets(extents, capacity, alignment, header, kind_of)
    return [memoryview(column).cast("q").tolist() for column in columns], bucket_nbytes


ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])


@st.composite
def free_extents(draw: st.DrawFn, room: int) -> Extent:
    """Granule, slab and size that fit together, not only those that a shape gives."""
    granule = draw(st.integers(1, room))
    slab = granule * draw(st.integers(1, 8))
    return slab * draw(st.integers(0, 8)), granule, slab


@st.composite
def shape_extents(draw: st.DrawFn, room: int) -> Extent:
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    return _C.extent_of(shape, draw(ITEMSIZES), room)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Extent], int, int, int]:
    """Extents, capacity, alignment and header."""
    alignment = draw(st.sampled_from([1, 2, 3, 16, 64]))
    header = alignment * draw(st.integers(0, 4))
    room = draw(st.one_of(st.integers(16, 64), st.integers(65, 3000)))
    extents = draw(st.lists(st.one_of(free_extents(room), shape_extents(room)), max_size=30))
    return extents, header + room, alignment, header


@settings(max_examples=500)
@given(problems())
def test_plan_holds_every_byte_once_in_order(problem: tuple[list[Extent], int, int, int]) -> None:
    extents, capacity, alignment, header = problem
    room = capacity - header
    columns, bucket_nbytes = plan_buckets(extents, capacity, alignment, header)
    slots = list(zip(*columns, strict=True))

    assert slots == sorted(slots, key=lambda slot: (slot[0], slot[1])), "slots are in the order of the tensors"
    pieces = {tensor: list(group) for tensor, group in groupby(slots, key=lambda slot: slot[0])}
    assert sorted(pieces) == [i for i, extent in enumerate(extents) if extent[0] > 0], "empty tensors get no slot"
    for tensor, own in pieces.items():
        nbytes, granule, slab = extents[tensor]
        at = 0
        for _, offset, _, _, size in own:
            assert offset == at
            assert size > 0
            at += size
        assert at == nbytes
        if nbytes <= room:
            assert len(own) == 1, "a tensor that fits is never split"
            continue
        for _, offset, _, _, size in own:
            assert offset % granule == size % granule == 0
            assert offset // slab == (offset + size - 1) // slab, "a piece crosses no slab"

    assert [slot[2] for slot in slots] == sorted(slot[2] for slot in slots)
    buckets = {bucket: list(group) for bucket, group in groupby(slots, key=lambda slot: slot[2])}
    assert sorted(buckets) == list(range(len(bucket_nbytes))), "no bucket is empty"
    for bucket, own in buckets.items():
        end = header
        for _, _, _, offset, size in own:
            assert offset % alignment == 0
            assert offset == -(-end // alignment) * alignment, "slots neither overlap nor leave more than asked for"
            end = offset + size
        assert end == bucket_nbytes[bucket] <= capacity


@settings(max_examples=300)
@given(st.lists(st.integers(1, 6), max_size=4), st.sampled_from([1, 2, 4]), st.integers(4, 80), st.integers(0, 70))
def test_every_piece_is_a_box(shape: list[int], itemsize: int, room: int, before: int) -> None:
    """``before`` fills a part of the first bucket, so that cuts fall in odd places."""
    extents = [(min(before, room), 1, max(1, min(before, room))), _C.extent_of(shape, itemsize, room)]
    columns, _ = plan_buckets(extents, room, 1, 0)
    indices = list(product(*map(range, shape)))
    for tensor, offset, _, _, size in zip(*columns, strict=True):
        if tensor == 0:
            continue
        piece = indices[offset // itemsize : (offset + size) // itemsize]
        sides = [sorted({index[dim] for index in piece}) for dim in range(len(shape))]
        assert all(side == list(range(side[0], side[-1] + 1)) for side in sides)
        assert list(product(*sides)) == piece


BIG = 2**63 - 1


def test_settings_extents_and_shapes_that_cannot_be_are_refused() -> None:
    usual = {"capacity": 64, "alignment": 16, "header": 0}
    for wrong in (
        {"capacity": 0}, {"capacity": BIG}, {"header": 64}, {"alignment": 0}, {"header": -16}, {"header": 8},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="plan_buckets: "):
            plan_buckets([(10, 1, 10)], **usual | wrong)
    for extent in (
        (-1, 1, 1), (-BIG - 1, 1, 1), (BIG, 1, BIG), (100, 0, 100), (100, 4, 0), (100, 3, 100), (100, 4, 40), (130, 65, 130),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="plan_buckets: "):
            plan_buckets([(4, 4, 4), extent], **usual)
    for shape, itemsize, room in (
        ([2**62, 2**62], 4, 64), ([2**62], 2, 64), ([2**31, 2**31, 2], 1, 64), ([-1, -1], 4, 16), ([3, -2], 4, 16), ([3], 0, 16),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"plan_buckets: |overflows"):
            _C.extent_of(shape, itemsize, room)
