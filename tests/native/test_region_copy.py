"""The batched region copy on CPU against plain torch; a bad table, bucket or tensor is refused before anything is copied."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from epload.core import dtypes
from epload.native import ops
from support import ranks
from support.checks import as_bytes
from support.failures import must_raise
from support.region_copies import DTYPES, Problem, Row, check_conversions, check_equal, problems, table_of


def assert_packed(tensors: list[Tensor], table: Tensor, bucket: Tensor) -> None:
    packed = torch.zeros_like(bucket)
    ops.pack(packed, tensors, table)
    assert torch.equal(packed, bucket)
    assert not packed.requires_grad


@settings(max_examples=250)
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
    rows = [Row(0, shift, stored, [0], [3], [1]), Row(1, shift + 3 * stored.itemsize, stored, [0], [2], [1])]
    ops.unpack(bucket, targets, table_of(rows, 1))
    assert torch.cat(targets).tolist() == [1, 2, 3, 4, 5]
    assert_packed(targets, table_of(rows, 1), bucket)


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
    must_raise(RuntimeError, "aterialize", ops.unpack, bucket, [source], table_of([row], 1))
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
    assert_packed([target], table_of([row], len(dims)), bucket)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


MEGABYTES = 9 << 20
"""Each of two regions has so many bytes: enough for two threads."""


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
    """Two regions share no byte but lie between each other's elements; two threads must not mix them up."""
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


def test_no_rows_empty_regions_and_reference_bytes() -> None:
    bucket = torch.zeros(0, dtype=torch.uint8)
    ops.unpack(bucket, [], torch.empty((0, 4), dtype=torch.int64))
    ops.unpack(bucket, [torch.zeros(3)], torch.empty((0, 16), dtype=torch.int64))
    empty = Row(0, 0, torch.float32, [1, 0], [2, 0], [0, 1])
    ops.unpack(bucket, [torch.zeros(3, 0)], table_of([empty], 2))
    ops.pack(bucket, [torch.zeros(3, 0)], table_of([empty], 2))
    # The table's columns, spelled out once without the helpers of this file.
    bucket = torch.tensor([9, 9, 1, 2, 3, 4, 5, 6], dtype=torch.uint8)
    target = torch.zeros(3, 2, dtype=torch.uint8)
    ops.unpack(bucket, [target], torch.tensor([[0, 2, 0, 2, 1, 0, 2, 2, 3, 1]]))
    assert target.tolist() == [[0, 0], [1, 2], [4, 5]]


def test_parameters_record_no_gradient() -> None:
    """But a backward that needs the values from before fails, rather than use the new ones."""
    layer = torch.nn.Linear(4, 3)
    before = (layer.weight * layer.weight).sum()
    rows = [Row(0, 0, torch.float32, [0, 0], [3, 4], [4, 1]), Row(1, 48, torch.bfloat16, [0], [3], [1])]
    bucket = torch.cat([torch.arange(12.0).view(torch.uint8), torch.ones(3, dtype=torch.bfloat16).view(torch.uint8)])
    parameters = [layer.weight, layer.bias]
    ops.unpack(bucket, parameters, table_of(rows, 2))
    assert [(each.is_leaf, each.requires_grad, each.grad_fn) for each in parameters] == [(True, True, None)] * 2
    assert layer.weight.flatten().tolist() == list(range(12))
    assert layer.bias.tolist() == [1, 1, 1]
    assert_packed(parameters, table_of(rows, 2), bucket)
    layer(torch.ones(1, 4)).sum().backward()
    assert layer.weight.grad is not None
    must_raise(RuntimeError, "modified by an inplace operation", before.backward)


def test_opcheck() -> None:
    tensors = [torch.randn(4, 6), torch.randn(3)]
    rows = [Row(0, 0, torch.float32, [1, 2], [3, 4], [6, 1]), Row(1, 100, torch.bfloat16, [0], [3], [1])]
    arguments = torch.zeros(256, dtype=torch.uint8), tensors, table_of(rows, 2)
    torch.library.opcheck(torch.ops.epload.pack.default, arguments)
    torch.library.opcheck(torch.ops.epload.unpack.default, arguments)
    torch.library.opcheck(torch.ops.epload.coalesced_bcast.default, (tensors, 0, "", "", 64, "two_level"))


def test_a_broadcast_whose_tensors_are_not_used_again_is_compiled() -> None:
    called = []

    def keep(graph: Any, _: object) -> Any:
        called.extend(value for node in graph.graph.nodes for value in (node.target, *node.args))
        return make_boxed_func(graph.forward)

    def broadcast(x: Tensor) -> Tensor:
        ops.coalesced_bcast([x + 1], 0, "", "", 64, "two_level")
        return x * 2

    compiled = torch.compile(broadcast, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    assert compiled(torch.ones(4)).tolist() == [2.0] * 4
    assert torch.ops.epload.coalesced_bcast.default in called


INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)
GOOD = [0, 0, dtypes.code(torch.float32), 2, 1, 2, 3, 4, 6, 1]
"""A region of a float32 tensor of shape [4, 6] at the start of a bucket of 256 bytes."""
COLUMNS = ["tensor", "offset", "dtype", "ndim", "start0", "start1", "size0", "size1", "stride0", "stride1"]
UNMOVABLE = [12, 13, 14, 16, 17, 18, 19, 20, 21, 22, 30, 33, 36, 37, 40, 43]
"""Codes of quantized, bit and sub-byte dtypes: no Tensor.copy_ converts them."""
BAD_VALUES = {
    "tensor": [-1, 2, 2**32],
    "offset": [-1, -4, 256 - 60, 256, 2**40, INT64_MAX - 3],
    "dtype": [-1, 46, 47, 1000, 2**32 + 6, *UNMOVABLE],
    "ndim": [-1, 0, 1, 3, 2**32 + 2],
    "start0": [-1, 2, 4, INT64_MAX - 2],
    "start1": [-1, 3, 6, INT64_MAX - 3],
    "size0": [-1, 4, 5],
    "size1": [-1, 5, 7],
    "stride0": [-1, -6, 31, 64, 2**61, 2**62, INT64_MAX // 2 + 1, INT64_MAX // 4],
    "stride1": [-1, 18, 64, 2**61, 2**62, INT64_MAX // 3 + 1, INT64_MAX // 12],
}
PAIRS = (("start0", "size0"), ("stride0", "stride1"), ("offset", "stride0"), ("size0", "stride0"))


@pytest.mark.parametrize("unpack", [True, False], ids=["unpack", "pack"])
def test_bad_row_copies_nothing(unpack: bool) -> None:
    extremes = (INT64_MAX, INT64_MIN)
    changes = [{column: value} for column, values in BAD_VALUES.items() for value in (*values, *extremes)]
    changes += [dict.fromkeys(pair, value) for pair in PAIRS for value in (*extremes, 2**62)]
    for change in changes:
        bad = [1, *GOOD[1:]]
        for column, value in change.items():
            bad[COLUMNS.index(column)] = value
        refused(torch.tensor([GOOD, bad, GOOD]), unpack, "row 1 ")


def refused(table: Tensor, unpack: bool, match: str, bucket: Tensor | None = None) -> None:
    bucket = torch.arange(256, dtype=torch.uint8) if bucket is None else bucket
    tensors = [torch.full((4, 6), 7.0), torch.full((4, 6), 8.0)]
    before = [t.clone() for t in [bucket, *tensors]]
    with pytest.raises(ValueError, match=match):
        (ops.unpack if unpack else ops.pack)(bucket, tensors, table)
    for got, want in zip([bucket, *tensors], before, strict=True):
        assert torch.equal(got, want), "nothing was copied"


@pytest.mark.parametrize("unpack", [True, False], ids=["unpack", "pack"])
def test_bad_table_or_bucket_copies_nothing(unpack: bool) -> None:
    good = torch.tensor([GOOD])
    tables = [
        good.int(), good.double(), good[0], good[None],
        torch.nn.functional.pad(good, (0, 1)), good[:, :-1].contiguous(), good[:, :3].contiguous(), good[:, :7].contiguous(),
        torch.stack([good, good], dim=2)[:, :, 0], torch.tensor([GOOD, GOOD]).t().contiguous().t(),
    ]  # fmt: skip
    for table in tables:
        refused(table, unpack, "region_copy")
    raw = torch.zeros(512, dtype=torch.uint8)
    buckets = [
        raw[:256].to(torch.int8), raw[:256].view(torch.float32), raw[:256].bool(), raw[None, :256], raw[0], raw[::2],
        raw[:1].expand(256), raw[:63], raw[:0],
    ]  # fmt: skip
    for bucket in buckets:
        refused(good, unpack, "region_copy", bucket)


def test_row_that_just_fits() -> None:
    tensor = torch.zeros(4, 6)
    bucket = torch.arange(16, dtype=torch.float32).view(torch.uint8)
    ops.unpack(bucket, [tensor], torch.tensor([GOOD]))
    assert tensor[1:4, 2:6].tolist() == [[0, 1, 2, 3], [6, 7, 8, 9], [12, 13, 14, 15]]
    text = "row 0 reaches outside the bucket of 63 bytes"
    must_raise(ValueError, text, ops.unpack, bucket[:63], [tensor], torch.tensor([GOOD]))
    # More elements than can be counted, which the tensor and the bucket have in one.
    row, tensor = torch.tensor([[*GOOD[:4], 0, 0, 2**31, 2**31, 0, 0]]), torch.zeros(1).expand(2**31, 2**31)
    must_raise(ValueError, "row 0 has more bytes than fit in an int64", ops.unpack, bucket, [tensor], row)


@pytest.mark.parametrize("unpack", [True, False], ids=["unpack", "pack"])
@pytest.mark.parametrize("kind", ["meta", "meta bucket", "sparse"])
def test_tensors_without_plain_memory_are_refused(unpack: bool, kind: str) -> None:
    """A meta tensor among others must not turn the whole call into a silent no-op."""
    good = torch.full((4, 6), 7.0)
    other = {"meta": good.to("meta"), "meta bucket": good, "sparse": good.to_sparse()}[kind]
    bucket = torch.arange(256, dtype=torch.uint8, device="meta" if kind == "meta bucket" else "cpu")
    second = [1, *GOOD[1:]]
    op, table = ops.unpack if unpack else ops.pack, torch.tensor([GOOD, second])
    must_raise(ValueError, "region_copy", op, bucket, [good, other], table)
    assert bool((good == 7).all())


def write_to_freed_storage() -> None:
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="region_copy"):
        ops.unpack(torch.zeros(32, dtype=torch.uint8), [freed], torch.tensor([[0, 0, 6, 1, 0, 8, 1]]))


def test_freed_storage_is_refused() -> None:
    """FSDP frees an unsharded parameter so. Writing to it would end the process, which is one of its own here."""
    assert ranks.run_alone(write_to_freed_storage) == (0, "")


def _count_threads(rank: int, threads: int) -> int:
    """Returns the most threads that a copy of converting regions has."""
    torch.set_num_threads(threads)
    regions, elements = 4 * threads, 1 << 20
    bucket = torch.zeros(elements * 2 * regions, dtype=torch.uint8)
    targets = [torch.zeros(elements) for _ in range(regions)]
    rows = [Row(i, elements * 2 * i, torch.bfloat16, [0], [elements], [1]) for i in range(regions)]
    table, counts, done = table_of(rows, 1), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            counts.append(len(os.listdir("/proc/self/task")))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(3):
        ops.unpack(bucket, targets, table)
    done.set()
    watcher.join()
    return max(counts)


def test_conversions_have_no_more_threads_than_other_copies() -> None:
    """Each thread of a copy converts by torch's own operator, which takes threads of its own for large tensors."""
    (most,) = ranks.run(1, _count_threads, 16)
    assert 16 <= most < 64
