"""Checksums and digests of regions, against plain torch."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epload.core import dtypes
from epload.native import ops
from support.failures import must_raise
from support.region_copies import Problem, problems, table_of


@settings(max_examples=150, deadline=None)
@given(size=st.integers(0, 300), seed=st.integers(0, 9), data=st.data())
def test_a_checksum_sees_every_bit(size: int, seed: int, data: st.DataObject) -> None:
    bytes_ = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    before = ops.checksum(bytes_)
    assert 0 < before < 1 << 64
    assert before == ops.checksum(bytes_.clone())
    assert before != ops.checksum(torch.cat([bytes_, torch.zeros(1, dtype=torch.uint8)]))
    if size:
        bytes_[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
        assert before != ops.checksum(bytes_)


def reference(data: bytes) -> int:
    """The checksum as csrc/digest.cpp describes it."""

    def step(lane: int, word: int) -> int:
        product = (lane ^ word) * 0x9E3779B97F4A7C15
        return product % (1 << 64) ^ product >> 64

    lanes = [1, 2, 3, 4]
    for at in range(0, len(data), 32):
        block = data[at : at + 32].ljust(32, b"\0")
        lanes = [step(lane, int.from_bytes(block[8 * i : 8 * i + 8], "little")) for i, lane in enumerate(lanes)]
    return functools.reduce(step, lanes, len(data)) or 1


@pytest.mark.parametrize("size", [0, 1, 7, 8, 31, 32, 33, 64, 100, 1000])
def test_a_checksum_is_that_of_the_description(size: int) -> None:
    """Whatever instructions the machine has: ranks of different machines compare theirs."""
    data = bytes(i * 37 % 256 for i in range(size))
    assert ops.checksum(torch.tensor(list(data), dtype=torch.uint8)) == reference(data)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_signs_do_not_undo_each_other(dtype: torch.dtype) -> None:
    """A multiplication alone passes a change of the highest bit on as it is, which another sign could undo."""
    per_word = 8 // dtype.itemsize
    values = torch.arange(1, 1 + 12 * per_word).to(dtype)
    of_one_lane = [4 * word * per_word + element for word in range(3) for element in range(per_word)]
    flips = [chosen for count in range(5) for chosen in itertools.combinations(of_one_lane, count)]
    seen = set()
    for chosen in flips:
        changed = values.clone()
        changed[list(chosen)] *= -1
        seen.add(ops.checksum(changed))
    assert len(seen) == len(flips)


def test_what_is_not_contiguous_is_refused() -> None:
    must_raise(ValueError, "checksum: expected a contiguous tensor", ops.checksum, torch.zeros(4, 4)[:, 1])


@settings(max_examples=200, deadline=None)
@given(problem=problems())
def test_digests_are_those_of_the_regions(problem: Problem) -> None:
    """Of tensors, the region's elements one after the other; of a bucket, what unpacking makes of it."""
    bucket, tensors = problem.bucket(), problem.tensors([base.clone() for base in problem.bases])
    table = table_of(problem.rows, problem.dims)
    ops.unpack(bucket, tensors, table)
    boxes = [
        tensors[row.tensor][tuple(slice(a, a + n) for a, n in zip(row.start, row.size, strict=True))]
        for row in problem.rows
    ]
    digests = ops.digest_tensors(tensors, table).tolist()
    assert [digest & (1 << 64) - 1 for digest in digests] == [ops.checksum(box.contiguous()) for box in boxes]
    for row, number in zip(table, table[:, 0].tolist(), strict=True):
        row[0] = dtypes.code(tensors[number].dtype)
    assert ops.digest_bucket(bucket, table).tolist() == digests


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [(0, 999, "dtype code"), (1, -1, "outside the bucket"), (1, 61, "outside the bucket"), (2, 999, "dtype code"),
     (3, 2, "dims"), (5, 17, "outside the bucket"), (5, -1, "negative"), (6, 1 << 62, "outside the bucket")],
)  # fmt: skip
def test_a_table_that_reaches_outside_the_bucket_is_refused(column: int, value: int, message: str) -> None:
    table = torch.tensor([[dtypes.code(torch.float32), 0, dtypes.code(torch.float32), 1, 0, 16, 1]])
    ops.digest_bucket(torch.zeros(64, dtype=torch.uint8), table)
    table[0, column] = value
    must_raise(ValueError, message, ops.digest_bucket, torch.zeros(64, dtype=torch.uint8), table)
