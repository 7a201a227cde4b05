"""The contract of the region copy, for CPU and for devices: problems, and plain torch as the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from epload.core import dtypes
from support.checks import as_bytes

DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.float16,
    torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz, torch.float8_e8m0fnu,
]  # fmt: skip
NUMBERS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
"""The formats between which values are converted."""


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
    """Numbers of all sizes that every format can hold where values may be converted, else random bits."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if dtype not in NUMBERS:
        return torch.randint(0, 256, (count * dtype.itemsize,), generator=generator).to(torch.uint8).view(dtype)
    exponent = torch.randint(-20, 9, (count,), generator=generator)
    values = torch.rand(count, generator=generator, dtype=torch.float64) * torch.pow(2.0, exponent)
    return (values.clamp(max=440) * torch.where(exponent % 2 == 0, 1.0, -1.0)).to(dtype)


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

    def tensors(self, bases: list[Tensor]) -> list[Tensor]:
        return [b.as_strided(*view) for b, view in zip(bases, self.views, strict=True)]

    def bucket(self) -> Tensor:
        raw = random_values(self.front + self.nbytes, torch.uint8, 5)[self.front :]
        for row in self.rows:
            if 0 not in row.size:
                values = random_values(row.span // row.dtype.itemsize, row.dtype, row.offset)
                raw[row.offset : row.offset + row.span] = values.view(torch.uint8)
        return raw


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Tensors of any strides, regions at any alignment, some converted; some runs long enough to be cut into wide units."""
    bases, views, rows = [], [], []
    at = draw(st.integers(0, 17))
    for index in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from([*DTYPES, *NUMBERS]))
        shape = draw(st.lists(st.integers(0, 6), max_size=3))
        if draw(st.booleans()):
            shape.append(draw(st.sampled_from([1, 7, 8, 15, 16, 31, 64, 256, 1000])))
        step = [draw(st.integers(1, 2)) if n < 7 else 1 for n in shape]
        strides, inner = [0] * len(shape), 1
        order = list(range(len(shape)))[::-1]
        for dim in order if draw(st.booleans()) else draw(st.permutations(order)):
            strides[dim] = inner * step[dim]
            inner *= step[dim] * max(1, shape[dim])
        front = draw(st.sampled_from([0, 1, 2, 5, 8]))
        bases.append(random_values(front + inner + draw(st.integers(0, 5)), dtype, 100 + index))
        views.append((shape, strides, front))
        for start, size in draw(boxes(shape)):
            inside = draw(st.sampled_from(NUMBERS)) if dtype in NUMBERS and draw(st.booleans()) else dtype
            stride, inner = [0] * len(size), 1
            order = list(range(len(size)))[::-1]
            for dim in order if draw(st.booleans()) else draw(st.permutations(order)):
                inner *= draw(st.integers(1, 2)) if draw(st.booleans()) else 1
                stride[dim] = inner
                inner *= max(1, size[dim])
            alignment = draw(st.sampled_from([1, inside.itemsize, 16]))
            at = -(-at // alignment) * alignment
            rows.append(Row(index, at, inside, start, size, stride))
            at += rows[-1].span + draw(st.integers(0, 3))
    dims = max((len(row.size) for row in rows), default=0) + draw(st.integers(0, 2))
    return Problem(bases, views, draw(st.permutations(rows)), at, draw(st.integers(0, 17)), dims)


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
        assert torch.equal(as_bytes(got), as_bytes(want)), f"tensor {i} or the memory around it"


def big_problem() -> Problem:
    """A large tensor in two regions, one transposed, one converted, and thousands of tiny ones: 9 MiB."""
    large = torch.arange(3 << 19, dtype=torch.int32)
    turned = torch.arange(3 << 18, dtype=torch.int32) * 3
    bases = [large, turned, torch.randn(1 << 17, generator=torch.Generator().manual_seed(1))]
    views = [([384, 4096], [4096, 1], 0), ([1024, 768], [1, 1024], 0), ([1 << 17], [1], 0)]
    rows = [
        Row(0, 0, torch.int32, [0, 0], [100, 4096], [4096, 1]),
        Row(0, 100 * 4096 * 4, torch.int32, [100, 0], [284, 4096], [1, 284]),
        Row(1, 6 << 20, torch.int32, [0, 0], [1024, 768], [768, 1]),
        Row(2, 9 << 20, torch.bfloat16, [0], [1 << 17], [1]),
    ]
    at = (9 << 20) + (1 << 18) + 1
    for i in range(4000):
        count = 1 + i % 7
        bases.append(torch.arange(count, dtype=torch.int64) + 1000 * i)
        views.append(([count], [1], 0))
        rows.append(Row(3 + i, at, torch.int64, [0], [count], [1]))
        at += 8 * count + i % 3
    return Problem(bases, views, rows, at, 0, 2)


def packed(shape: list[int]) -> list[int]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return strides


def every_code(dtype: torch.dtype) -> Tensor:
    """Every value of a format of 8 or 16 bits; of a wider one those near every value, bound and tie of the narrow ones."""
    if dtype.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(dtype)
    near = []
    for small in NUMBERS:
        if small.itemsize <= 2:
            values = every_code(small).float()
            values = values[values.isfinite()].unique()
            ties = (values[1:].double() + values[:-1].double()) / 2
            for exact in (values.double(), ties):
                near += [exact, *(exact.float().nextafter(torch.tensor(to)).double() for to in (-1e38, 1e38))]
    extremes = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 3.4e38, 1e300, -1e300, 1e-300])
    noise = torch.randn(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return torch.cat([*near, extremes.double(), noise * torch.exp2(torch.linspace(-160, 130, 10_000))]).to(dtype)


def check_conversions(pack: Callable[..., None], unpack: Callable[..., None], device: str) -> None:
    """Rounding, overflow, subnormals and NaN as in Tensor.copy_, in wide units and one by one, packing and unpacking."""
    for source in NUMBERS:
        values = every_code(source)
        for target in NUMBERS:
            want = torch.empty(len(values), dtype=target).copy_(values)
            for step in (1, 3):
                row = Row(0, 0, target, [0], [len(values)], [1])
                bucket = torch.zeros(want.nbytes, dtype=torch.uint8, device=device)
                spread = torch.zeros(len(values) * step, dtype=source)
                spread[::step] = values
                pack(bucket, [spread.to(device)[::step]], table_of([row], 1))
                same(bucket.cpu().view(target), want, f"pack {source} to {target}")
                row.dtype = source
                got = torch.zeros(len(values) * step, dtype=target, device=device)
                unpack(values.view(torch.uint8).to(device), [got[::step]], table_of([row], 1))
                same(got.cpu()[::step], want, f"unpack {source} to {target}")


def same(got: Tensor, want: Tensor, what: str) -> None:
    """Equal bits, but any NaN equals any: which one a conversion gives differs between torch's own devices."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[want.itemsize]
    nan = want.float().isnan()
    assert torch.equal(got.float().isnan(), nan), what
    got, want = got.contiguous(), want.contiguous()
    assert torch.equal(got.view(bits)[~nan], want.view(bits)[~nan]), what
