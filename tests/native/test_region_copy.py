"""The batched region copy: equal to plain torch views and copy_."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import operator_schemas

from epload.core import dtypes
from epload.native import ops
from support.checks import as_bytes
from support.region_copies import DTYPES, Problem, Row, check_conversions, check_equal, problems, table_of


@settings(max_examples=250, deadline=None)
@given(problems(), st.booleans())
def test_equal_to_plain_torch(problem: Problem, unpack: bool) -> None:
    check_equal(problem, unpack, ops.unpack if unpack else ops.pack)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_bit_pattern(dtype: torch.dtype) -> None:
    """All 256 byte values move unchanged, NaNs too."""
    offset = 1
    values = torch.arange(256, dtype=torch.uint8)
    values = (values % 2 if dtype is torch.bool else values).view(dtype)
    row = Row(0, offset, dtype, [0], [len(values)], [1])
    bucket = torch.zeros(offset + 256, dtype=torch.uint8)
    ops.pack(bucket, [values], table_of([row], 1))
    assert torch.equal(bucket[offset:], as_bytes(values))
    target = torch.zeros(256, dtype=torch.uint8).view(dtype)
    ops.unpack(bucket, [target], table_of([row], 1))
    assert torch.equal(as_bytes(target), as_bytes(values))


def test_conversion_is_that_of_copy() -> None:
    check_conversions(ops.pack, ops.unpack, "cpu")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shift", [0, 1])
def test_inference_tensors_are_written_and_converted(stored: torch.dtype, shift: int) -> None:
    """An engine has such tensors; torch's own copy_ writes them, and then raises."""
    with torch.inference_mode():
        targets = [torch.zeros(3), torch.zeros(2)]
    values = torch.arange(1, 6).to(stored)
    bucket = torch.cat([torch.zeros(shift, dtype=torch.uint8), as_bytes(values)])
    rows = [
        Row(0, shift, stored, [0], [3], [1]),
        Row(1, shift + 3 * stored.itemsize, stored, [0], [2], [1]),
    ]
    ops.unpack(bucket, targets, table_of(rows, 1))
    assert torch.cat(targets).tolist() == [1, 2, 3, 4, 5]
    packed = torch.zeros_like(bucket)
    ops.pack(packed, targets, table_of(rows, 1))
    assert torch.equal(packed, bucket)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=str)
def test_a_bucket_at_any_address(dtype: torch.dtype) -> None:
    values = torch.arange(1, 6).to(dtype)
    bucket = torch.frombuffer(bytearray(b"?" + bytes(as_bytes(values).tolist())), dtype=torch.uint8, offset=1)
    row = Row(0, 0, dtype, [0], [5], [1])
    target = torch.zeros(5, dtype=torch.complex64 if dtype.is_complex else torch.float64)
    ops.unpack(bucket, [target], table_of([row], 1))
    assert torch.equal(target.to(dtype), values)
    table = table_of([row], 1)
    table[0, 0] = dtypes.code(dtype)
    assert ops.digest_bucket(bucket, table)[0] == ops.digest_tensors([values], table_of([row], 1))[0]


def test_a_bucket_that_is_copied_on_write(two_threads: None) -> None:
    values = torch.arange(8 << 20, dtype=torch.float32)
    bucket = torch._lazy_clone(as_bytes(values))
    target = torch.zeros_like(values)
    ops.unpack(bucket, [target], table_of([Row(0, 0, torch.float32, [0], [len(values)], [1])], 1))
    assert torch.equal(target, values)


@pytest.mark.parametrize("lazy", ["conj", "neg"])
def test_lazy_views_are_resolved_or_refused(lazy: str) -> None:
    """torch resolves them for an op that reads them and refuses them for one that writes a list of them."""
    values = torch.arange(6, dtype=torch.float32).view(3, 2)
    source = torch.view_as_complex(values)
    source = source.conj() if lazy == "conj" else source.conj().imag
    row = Row(0, 0, source.dtype, [0], [3], [1])
    bucket = torch.zeros(source.nbytes, dtype=torch.uint8)
    ops.pack(bucket, [source], table_of([row], 1))
    assert torch.equal(bucket.view(source.dtype), source.clone())
    before = bucket.clone()
    with pytest.raises(RuntimeError, match="aterialize"):
        ops.unpack(bucket, [source], table_of([row], 1))
    assert torch.equal(bucket, before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128])
@pytest.mark.parametrize("dims", [(1, 0), (0, 2, 1), (2, 1, 0), (1, 2, 0), (3, 1, 0, 2)])
def test_transposed_regions_larger_than_a_tile(dims: tuple[int, ...], dtype: torch.dtype) -> None:
    """Copies leave alone what lies around the region."""
    shape = {2: (65, 70), 3: (33, 40, 67), 4: (3, 35, 34, 5)}[len(dims)]
    values = (torch.arange(torch.Size(shape).numel()) % 251).to(dtype).reshape(shape)
    bucket, turned = as_bytes(values.reshape(-1)).clone(), values.permute(dims)
    row = Row(0, 0, dtype, [1] * len(dims), list(turned.shape), list(turned.stride()))
    target = torch.full([n + 2 for n in turned.shape], 9, dtype=dtype)
    expected, inner = target.clone(), tuple(slice(1, n + 1) for n in turned.shape)
    expected[inner] = turned
    ops.unpack(bucket, [target], table_of([row], len(dims)))
    assert torch.equal(target, expected)
    again = torch.zeros_like(bucket)
    ops.pack(again, [target], table_of([row], len(dims)))
    assert torch.equal(again, bucket)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


MEGABYTES = 9 << 20
"""Of each of two regions: enough for two threads."""


@pytest.mark.parametrize("run", [1, 1023, 1025, 5003])
@pytest.mark.parametrize("shift", [0, 33])
def test_megabytes_of_no_alignment(two_threads: None, run: int, shift: int) -> None:
    """A run a row on both sides, and one long run; the bytes between them stay as they were."""
    rows_of = MEGABYTES // run
    whole = torch.arange(shift + rows_of * (run + 3), dtype=torch.int32).to(torch.uint8)
    bucket = torch.arange(rows_of * (run + 5) + MEGABYTES, dtype=torch.int32).mul_(7).to(torch.uint8)
    target = whole[shift:].view(rows_of, run + 3)[:, 1 : 1 + run]
    long = torch.zeros(shift + MEGABYTES, dtype=torch.uint8)
    rows = [
        Row(0, 2, torch.uint8, [0, 0], [rows_of, run], [run + 5, 1]),
        Row(1, rows_of * (run + 5) + 3, torch.uint8, [0], [MEGABYTES - 9], [1]),
    ]
    expected, expected_long = whole.clone(), long.clone()
    rows_in_bucket = bucket[: rows_of * (run + 5)].view(rows_of, run + 5)
    expected[shift:].view(rows_of, run + 3)[:, 1 : 1 + run] = rows_in_bucket[:, 2 : 2 + run]
    expected_long[shift : shift + MEGABYTES - 9] = bucket[rows_of * (run + 5) + 3 :][: MEGABYTES - 9]
    ops.unpack(bucket, [target, long[shift:]], table_of(rows, 2))
    assert torch.equal(whole, expected)
    assert torch.equal(long, expected_long)


def test_regions_that_interleave_in_the_bucket(two_threads: None) -> None:
    """Two converted, misaligned regions share no byte but lie between each other's elements; two threads must not mix
    them up."""
    count = 4 << 20
    tensors = [torch.full((count,), 1.0), torch.full((count,), 2.0)]
    width = torch.bfloat16.itemsize
    rows = [Row(i, 1 + i * width, torch.bfloat16, [0], [count], [2]) for i in range(2)]
    bucket = torch.zeros(1 + 2 * count * width, dtype=torch.uint8)
    for _ in range(3):
        bucket.zero_()
        ops.pack(bucket, tensors, table_of(rows, 1))
        got = bucket[1:].clone().view(torch.bfloat16).view(count, 2).sum(dim=0, dtype=torch.float32)
        assert got.tolist() == [count, 2 * count]


def test_no_rows_and_empty_regions() -> None:
    bucket = torch.zeros(0, dtype=torch.uint8)
    ops.unpack(bucket, [], torch.empty((0, 4), dtype=torch.int64))
    ops.unpack(bucket, [torch.zeros(3)], torch.empty((0, 16), dtype=torch.int64))
    empty = Row(0, 0, torch.float32, [1, 0], [2, 0], [0, 1])
    ops.unpack(bucket, [torch.zeros(3, 0)], table_of([empty], 2))
    ops.pack(bucket, [torch.zeros(3, 0)], table_of([empty], 2))


def test_parameters_record_no_gradient() -> None:
    layer = torch.nn.Linear(4, 3)
    before = layer(torch.ones(1, 4)).sum()
    rows = [Row(0, 0, torch.float32, [0, 0], [3, 4], [4, 1]), Row(1, 48, torch.bfloat16, [0], [3], [1])]
    bucket = torch.cat([torch.arange(12.0).view(torch.uint8), torch.ones(3, dtype=torch.bfloat16).view(torch.uint8)])
    parameters = [layer.weight, layer.bias]
    ops.unpack(bucket, parameters, table_of(rows, 2))
    for parameter in parameters:
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert parameter.grad_fn is None
    assert layer.weight.flatten().tolist() == list(range(12))
    assert layer.bias.tolist() == [1, 1, 1]
    packed = torch.zeros_like(bucket)
    ops.pack(packed, parameters, table_of(rows, 2))
    assert torch.equal(packed, bucket)
    assert not packed.requires_grad
    layer(torch.ones(1, 4)).sum().backward()
    assert layer.weight.grad is not None
    assert before.requires_grad


def test_autograd_learns_of_the_write() -> None:
    """A backward that needs the values from before must fail rather than use the new ones."""
    weight = torch.nn.Parameter(torch.ones(4))
    loss = (weight * weight).sum()
    row = Row(0, 0, torch.float32, [0], [4], [1])
    ops.unpack(torch.zeros(16, dtype=torch.uint8), [weight], table_of([row], 1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch reads schemas by evaluating their type names and does not know this one.
    monkeypatch.setitem(operator_schemas._type_eval_globals, "Stream", torch.Stream)
    tensors = [torch.randn(4, 6), torch.randn(3)]
    rows = [Row(0, 0, torch.float32, [1, 2], [3, 4], [6, 1]), Row(1, 100, torch.bfloat16, [0], [3], [1])]
    arguments = torch.zeros(256, dtype=torch.uint8), tensors, table_of(rows, 2)
    torch.library.opcheck(torch.ops.epload.pack.default, arguments)
    torch.library.opcheck(torch.ops.epload.unpack.default, arguments)
    torch.library.opcheck(torch.ops.epload.coalesced_bcast.default, (tensors, 0, "", "", 64, "two_level"))


def test_reference_bytes() -> None:
    """The table's columns, spelled out once without the helpers of this file."""
    bucket = torch.tensor([9, 9, 1, 2, 3, 4, 5, 6], dtype=torch.uint8)
    target = torch.zeros(3, 2, dtype=torch.uint8)
    ops.unpack(bucket, [target], torch.tensor([[0, 2, 0, 2, 1, 0, 2, 2, 3, 1]]))
    assert target.tolist() == [[0, 0], [1, 2], [4, 5]]
