"""The batched region copy: equal to plain torch views and copy_."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import operator_schemas

from epload.core import dtypes
from epload.native import ops

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.bool,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
    torch.float8_e5m2fnuz,
    torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@dataclass
class Row:
    """One region, with the dtype and the strides (elements) that it has in the bucket."""

    tensor: int
    offset: int
    dtype: torch.dtype
    start: list[int]
    size: list[int]
    stride: list[int]

    @property
    def span(self) -> int:
        """Bytes from its first to its last one in the bucket."""
        if 0 in self.size:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize


def table_of(rows: list[Row], dims: int) -> Tensor:
    """Entries past a row's ndim hold a number that must be ignored."""

    def padded(values: list[int]) -> list[int]:
        return values + [-7] * (dims - len(values))

    lines = [
        [r.tensor, r.offset, dtypes.code(r.dtype), len(r.size), *padded(r.start), *padded(r.size), *padded(r.stride)]
        for r in rows
    ]
    return torch.tensor(lines, dtype=torch.int64).reshape(len(rows), 4 + 3 * dims)


def reference(bucket: Tensor, tensors: list[Tensor], rows: list[Row], unpack: bool) -> None:
    for row in rows:
        if 0 in row.size:
            continue
        theirs = tensors[row.tensor]
        for dim, (start, size) in enumerate(zip(row.start, row.size, strict=True)):
            theirs = theirs.narrow(dim, start, size)
        raw = bucket[row.offset : row.offset + row.span]
        aligned = raw.clone()
        ours = aligned.view(row.dtype).as_strided(row.size, row.stride)
        if unpack:
            theirs.copy_(ours)
        else:
            ours.copy_(theirs)
            raw.copy_(aligned)


def random_values(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits where every bit pattern is a value; numbers of all sizes where values may be converted."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if dtype in FLOATS:
        exponent = torch.randint(-30, 30, (count,), generator=generator)
        values = torch.randn(count, generator=generator, dtype=torch.float64) * torch.pow(2.0, exponent)
        values[::7] = torch.tensor(float("inf"))
        values[3::11] = -0.0
        return values.to(dtype)
    return torch.randint(0, 256, (count * dtype.itemsize,), generator=generator).to(torch.uint8).view(dtype)


@dataclass
class Problem:
    bases: list[Tensor]
    """1-D: the tensors' memory with what lies around them."""
    views: list[tuple[list[int], list[int], int]]
    """Shape, strides and storage offset of each tensor in its base."""
    rows: list[Row]
    nbytes: int
    """Of the bucket."""
    front: int
    """Bytes before the bucket in its storage."""
    dims: int
    values: Callable[[int, torch.dtype, int], Tensor] = random_values
    """What the bucket holds: (count, dtype, seed) -> 1-D."""

    def tensors(self, bases: list[Tensor]) -> list[Tensor]:
        return [b.as_strided(*view) for b, view in zip(bases, self.views, strict=True)]

    def bucket(self) -> Tensor:
        """Random bytes, which read as finite numbers in every float dtype that may be converted."""
        raw = random_values(self.front + self.nbytes, torch.uint8, 5)[self.front :]
        for row in self.rows:
            if 0 not in row.size:
                raw[row.offset : row.offset + row.span] = self.values(
                    row.span // row.dtype.itemsize, row.dtype, row.offset
                ).view(torch.uint8)
        return raw


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    bases, views, rows = [], [], []
    at = draw(st.integers(0, 9))
    for index in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.integers(0, 6), max_size=4))
        step = draw(st.lists(st.integers(1, 2), min_size=len(shape), max_size=len(shape)))
        strides, inner = [0] * len(shape), 1
        for dim in draw(st.permutations(range(len(shape)))):
            strides[dim] = inner * step[dim]
            inner *= step[dim] * max(1, shape[dim])
        front = draw(st.integers(0, 5))
        bases.append(random_values(front + inner + draw(st.integers(0, 5)), dtype, 100 + index))
        views.append((shape, strides, front))
        for start, size in draw(boxes(shape)):
            kept = draw(st.booleans()) or dtype not in FLOATS
            inside = dtype if kept else draw(st.sampled_from(FLOATS))
            stride, inner = [0] * len(size), 1
            order = range(len(size))[::-1] if draw(st.booleans()) else draw(st.permutations(range(len(size))))
            for dim in order:
                inner *= draw(st.integers(1, 2)) if draw(st.booleans()) else 1
                stride[dim] = inner
                inner *= max(1, size[dim])
            if draw(st.booleans()):
                at = -(-at // inside.itemsize) * inside.itemsize
            row = Row(index, at, inside, start, size, stride)
            rows.append(row)
            at += row.span + draw(st.integers(0, 3))
    dims = max((len(row.size) for row in rows), default=0) + draw(st.integers(0, 2))
    return Problem(bases, views, draw(st.permutations(rows)), at, draw(st.integers(0, 3)), dims)


@st.composite
def boxes(draw: st.DrawFn, shape: list[int]) -> list[tuple[list[int], list[int]]]:
    """No box, one, or two that touch along one dim."""
    start = [draw(st.integers(0, n)) for n in shape]
    size = [draw(st.integers(0, n - s)) for n, s in zip(shape, start, strict=True)]
    if draw(st.booleans()):
        start, size = [0] * len(shape), list(shape)
    count = draw(st.integers(0, 2 if shape else 1))
    if count < 2:
        return [(start, size)] * count
    dim = draw(st.integers(0, len(shape) - 1))
    cut = draw(st.integers(0, size[dim]))
    first, second, then = list(size), list(size), list(start)
    first[dim], second[dim], then[dim] = cut, size[dim] - cut, start[dim] + cut
    return [(start, first), (then, second)]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def check_equal(problem: Problem, unpack: bool, op: Callable[..., None], device: str = "cpu") -> None:
    """``op``, pack or unpack, does to a problem on ``device`` what plain torch does on CPU, to the byte."""
    expected_bucket, expected = problem.bucket(), [base.clone() for base in problem.bases]
    bucket = problem.bucket()
    whole = torch.cat([torch.zeros(problem.front, dtype=torch.uint8), bucket]).to(device)
    bases = [base.to(device, copy=True) for base in problem.bases]
    op(whole[problem.front :], problem.tensors(bases), table_of(problem.rows, problem.dims))
    reference(expected_bucket, problem.tensors(expected), problem.rows, unpack)
    assert torch.equal(whole[problem.front :].cpu(), expected_bucket)
    for i, (got, want) in enumerate(zip(bases, expected, strict=True)):
        assert torch.equal(as_bytes(got.cpu()), as_bytes(want)), f"tensor {i} or the memory around it"


@settings(max_examples=400, deadline=None)
@given(problems(), st.booleans())
def test_equal_to_plain_torch(problem: Problem, unpack: bool) -> None:
    check_equal(problem, unpack, ops.unpack if unpack else ops.pack)


def unpack_bound(bucket: Tensor, tensors: list[Tensor], copies: Tensor) -> None:
    """Bound among others and in another order; used for these, after it was for others of equal layouts."""
    others = [torch.empty(t.untyped_storage().nbytes() // t.itemsize, dtype=t.dtype) for t in tensors]
    others = [o.as_strided(t.shape, t.stride(), t.storage_offset()) for o, t in zip(others, tensors, strict=True)]
    more = torch.zeros(3)
    gathered, *_ = ops.gather([*others[::-1], more])
    regions = ops.bind_copies(gathered, range(len(tensors))[::-1], copies, bucket.numel())
    ops.unpack_bound(bucket, gathered, regions)
    backwards = [*tensors[::-1], more]
    again, _ = ops.gather(backwards, ops.layouts(gathered))
    ops.unpack_bound(bucket, again, regions)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_what_is_bound_is_equal_to_plain_torch(problem: Problem) -> None:
    check_equal(problem, True, unpack_bound)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_unpack_undoes_pack(problem: Problem) -> None:
    """Bit for bit, where no dtype is converted."""
    rows = [row for row in problem.rows if row.dtype == problem.bases[row.tensor].dtype]
    bucket = problem.bucket()
    ops.pack(bucket, problem.tensors(problem.bases), table_of(rows, problem.dims))
    bases = [base.clone() for base in problem.bases]
    for row in rows:
        shape, strides, front = problem.views[row.tensor]
        bytes_of = as_bytes(bases[row.tensor]).view(-1, row.dtype.itemsize)
        ids = torch.arange(len(bytes_of)).as_strided(shape, strides, front)
        for dim, (start, size) in enumerate(zip(row.start, row.size, strict=True)):
            ids = ids.narrow(dim, start, size)
        bytes_of[ids.reshape(-1)] = 0
    ops.unpack(bucket, problem.tensors(bases), table_of(rows, problem.dims))
    for got, want in zip(bases, problem.bases, strict=True):
        assert torch.equal(as_bytes(got), as_bytes(want))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 16])
def test_every_dtype_and_bit_pattern(dtype: torch.dtype, offset: int) -> None:
    """All 256 byte values move unchanged, NaNs too."""
    values = torch.arange(256, dtype=torch.uint8)
    values = (values % 2 if dtype is torch.bool else values).view(dtype)
    row = Row(0, offset, dtype, [0], [len(values)], [1])
    bucket = torch.zeros(offset + 256, dtype=torch.uint8)
    ops.pack(bucket, [values], table_of([row], 1))
    assert torch.equal(bucket[offset:], as_bytes(values))
    target = torch.zeros(256, dtype=torch.uint8).view(dtype)
    ops.unpack(bucket, [target], table_of([row], 1))
    assert torch.equal(as_bytes(target), as_bytes(values))


@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_conversion_is_that_of_copy(source: torch.dtype, target: torch.dtype, offset: int) -> None:
    values = random_values(60, source, 3).view(4, 15)
    values[0, 0] = float("nan")
    rows = [Row(0, offset, source, [1, 0], [3, 15], [15, 1]), Row(0, offset + 45 * 8, source, [0, 0], [1, 15], [1, 1])]
    bucket = torch.full((offset + 60 * 8 + 1,), 0xA5, dtype=torch.uint8)
    ops.pack(bucket, [values], table_of(rows, 2))
    got = torch.zeros(15, 4, dtype=target).t()
    ops.unpack(bucket, [got], table_of(rows, 2))
    want = torch.empty(4, 15, dtype=target).copy_(values)
    torch.testing.assert_close(got.contiguous(), want, rtol=0, atol=0, equal_nan=True)

    rows = [Row(0, offset, source, [0, 0], [4, 15], [1, 4])]
    converted = torch.full_like(bucket, 0x5A)
    ops.pack(converted, [want], table_of(rows, 2))
    raw = converted[offset : offset + 60 * source.itemsize].clone().view(source).view(15, 4).t()
    torch.testing.assert_close(raw, torch.empty_like(raw).copy_(want), rtol=0, atol=0, equal_nan=True)
    assert set(converted[:offset].tolist()) <= {0x5A}
    assert set(converted[offset + 60 * source.itemsize :].tolist()) == {0x5A}


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


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def big_problem() -> tuple[list[Tensor], list[Row], int]:
    """A huge tensor in two regions, one transposed, one converted, and thousands of tiny ones: 90 MiB."""
    huge = torch.arange(12 << 20, dtype=torch.int32).view(3072, 4096)
    turned = (torch.arange(6 << 20, dtype=torch.int32) * 3).view(2048, 3072).t()
    wide = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
    tensors = [huge, turned, wide]
    rows = [
        Row(0, 0, torch.int32, [0, 0], [1000, 4096], [4096, 1]),
        Row(0, 1000 * 4096 * 4, torch.int32, [1000, 0], [2072, 4096], [1, 2072]),
        Row(1, 48 << 20, torch.int32, [0, 0], [3072, 2048], [2048, 1]),
        Row(2, 72 << 20, torch.bfloat16, [0], [1 << 20], [1]),
    ]
    at = (74 << 20) + 1
    for i in range(4000):
        tensors.append(torch.arange(1 + i % 7, dtype=torch.int64) + 1000 * i)
        rows.append(Row(3 + i, at, torch.int64, [0], [1 + i % 7], [1]))
        at += 8 * (1 + i % 7) + i % 3
    return tensors, rows, at


def test_two_threads_equal_one(two_threads: None) -> None:
    tensors, rows, nbytes = big_problem()
    table = table_of(rows, 2)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        bucket = torch.zeros(nbytes, dtype=torch.uint8)
        ops.pack(bucket, tensors, table)
        targets = [torch.zeros_like(t) for t in tensors]
        ops.unpack(bucket, targets, table)
        results.append((bucket, targets))
    assert torch.equal(results[0][0], results[1][0])
    for index, tensor in enumerate(tensors):
        want = tensor.bfloat16().float() if index == 2 else tensor
        assert torch.equal(results[0][1][index], want)
        assert torch.equal(results[1][1][index], want)


MEGABYTES = 9 << 20
"""Of each of two regions: enough for two threads."""


@pytest.mark.parametrize("run", [1, 100, 1023, 1024, 1025, 1087, 1088, 5003])
@pytest.mark.parametrize("shift", [0, 1, 33])
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


@pytest.fixture
def stream_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads schemas by evaluating their type names and does not know this one."""
    monkeypatch.setitem(operator_schemas._type_eval_globals, "Stream", torch.Stream)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(stream_type: None, requires_grad: bool) -> None:
    tensors = [torch.randn(4, 6, requires_grad=requires_grad), torch.randn(3)]
    rows = [Row(0, 0, torch.float32, [1, 2], [3, 4], [6, 1]), Row(1, 100, torch.bfloat16, [0], [3], [1])]
    table = table_of(rows, 2)
    bucket = torch.zeros(256, dtype=torch.uint8)
    torch.library.opcheck(torch.ops.epload.pack.default, (bucket, tensors, table))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    # A leaf that requires grad cannot be changed in place inside a traced graph.
    extra = () if requires_grad else ("test_aot_dispatch_dynamic",)
    torch.library.opcheck(torch.ops.epload.unpack.default, (bucket, tensors, table), test_utils=tests + extra)
    torch.library.opcheck(
        torch.ops.epload.coalesced_bcast.default, (tensors, 0, "", "", 64, "two_level"), test_utils=tests + extra
    )


def test_reference_bytes() -> None:
    """The table's columns, spelled out once without the helpers of this file."""
    bucket = torch.tensor([9, 9, 1, 2, 3, 4, 5, 6], dtype=torch.uint8)
    target = torch.zeros(3, 2, dtype=torch.uint8)
    ops.unpack(bucket, [target], torch.tensor([[0, 2, 0, 2, 1, 0, 2, 2, 3, 1]]))
    assert target.tolist() == [[0, 0], [1, 2], [4, 5]]
