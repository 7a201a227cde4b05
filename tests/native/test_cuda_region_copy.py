"""The CUDA region copy without a GPU: the kernel's own code run on the host, lane by lane, and what nvcc makes of it."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fakedev
import ranks
import sass
from fakedev import build
from test_region_copy import Problem, Row, big_problem, check_equal, problems, random_values, table_of

DEVICE = f"{fakedev.NAME}:0"
NUMBERS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
"""The formats between which the kernel converts."""
MANY = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """Compiles what the processes load, once and outside their time limit."""
    build.library()


def alone(function: Callable[..., None], *args: Any) -> None:
    """Runs it in a process of its own, which then has the fake device."""
    assert ranks.run(1, in_process, function, *args, setup=fakedev.setup) == [None]


def in_process(rank: int, function: Callable[..., None], *args: Any) -> None:
    torch.ops.load_library(str(build.library()))
    function(*args)


def op(unpack: bool) -> Callable[..., None]:
    library = torch.ops.epload_test
    return library.unpack if unpack else library.pack  # type: ignore[no-any-return]


def in_range(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of all sizes that every format can hold; random bits for what is never converted."""
    if dtype not in NUMBERS:
        return random_values(count, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-20, 9, (count,), generator=generator)
    values = torch.rand(count, generator=generator, dtype=torch.float64) * torch.pow(2.0, exponent)
    return (values.clamp(max=440) * torch.where(exponent % 2 == 0, 1.0, -1.0)).to(dtype)


@st.composite
def long_runs(draw: st.DrawFn) -> Problem:
    """Runs long enough to be cut into wide units, at every alignment, some of them converted."""
    bases, views, rows = [], [], []
    at = draw(st.integers(0, 17))
    for index in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from([*NUMBERS, torch.uint8, torch.int64]))
        inside = draw(st.sampled_from(NUMBERS)) if dtype in NUMBERS and draw(st.booleans()) else dtype
        outer = draw(st.lists(st.integers(1, 3), max_size=2))
        start, run = (
            draw(st.sampled_from([0, 1, 3, 8, 16])),
            draw(st.sampled_from([1, 7, 8, 15, 16, 31, 64, 256, 1000])),
        )
        shape, size = [*outer, start + run + draw(st.sampled_from([0, 1, 8, 16]))], [*outer, run]
        strides, bucket = packed(shape), packed([*outer, run + draw(st.sampled_from([0, 1, 8]))])
        front = draw(st.sampled_from([0, 1, 2, 8]))
        bases.append(in_range(front + strides[0] * shape[0], dtype, 7 + index))
        views.append((shape, strides, front))
        at = -(-at // 16) * 16 if draw(st.booleans()) else at
        rows.append(Row(index, at, inside, [0] * len(outer) + [start], size, bucket))
        at += rows[-1].span + draw(st.integers(0, 17))
    return Problem(bases, views, rows, at, draw(st.integers(0, 17)), 3, in_range)


def packed(shape: list[int]) -> list[int]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return strides


@MANY
@given(long_runs(), st.booleans())
def long_runs_agree(problem: Problem, unpack: bool) -> None:
    check_equal(problem, unpack, op(unpack), DEVICE)


@MANY
@given(problems(), st.booleans())
def small_problems_agree(problem: Problem, unpack: bool) -> None:
    check_equal(problem, unpack, op(unpack), DEVICE)


def big_problem_agrees() -> None:
    tensors, rows, nbytes = big_problem()
    bases = [t.contiguous().view(-1) if t.is_contiguous() else t.t().reshape(-1) for t in tensors]
    views = [(list(t.shape), list(t.stride()), 0) for t in tensors]
    for unpack in (False, True):
        check_equal(Problem(bases, views, rows, nbytes, 0, 2), unpack, op(unpack), DEVICE)


def call(name: str) -> None:
    globals()[name]()


@pytest.mark.parametrize("agree", ["long_runs_agree", "small_problems_agree", "big_problem_agrees"])
def test_equal_to_plain_torch(agree: str) -> None:
    alone(call, agree)


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
    noise = torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return torch.cat([*near, extremes.double(), noise * torch.exp2(torch.linspace(-160, 130, 100_000))]).to(dtype)


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


def every_conversion() -> None:
    check_conversions(op(False), op(True), DEVICE)


def same(got: Tensor, want: Tensor, what: str) -> None:
    """Equal bits, but any NaN equals any: which one a conversion gives differs between torch's own devices."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[want.itemsize]
    nan = want.float().isnan()
    assert torch.equal(got.float().isnan(), nan), what
    got, want = got.contiguous(), want.contiguous()
    assert torch.equal(got.view(bits)[~nan], want.view(bits)[~nan]), what


def test_conversion_is_that_of_copy() -> None:
    alone(every_conversion)


def one_launch() -> None:
    """Thousands of regions are one launch and one small copy to the device; on the current stream, the host not waiting."""
    tensors = [torch.zeros(1 + i % 9, 5, device=DEVICE)[:, ::2] for i in range(3000)]
    rows, at = [], 0
    for i, tensor in enumerate(tensors):
        rows.append(Row(i, at, torch.float32, [0, 0], list(tensor.shape), [3, 1]))
        at += tensor.numel() * 4
    content = torch.arange(at // 4, dtype=torch.float32)
    bucket, side = content.view(torch.uint8).to(DEVICE), torch.Stream(DEVICE)
    with fakedev.traced() as seen, side:
        with fakedev.held(side):
            op(True)(bucket, tensors, table_of(rows, 2))
            # What the call has allocated and let go of is asked for by others.
            others = [torch.zeros(1 << s, dtype=torch.uint8, pin_memory=True) for s in range(10, 24)]
            op(True)(bucket, tensors, table_of(rows, 2))
        side.synchronize()
    moved = [(stream, name) for _, stream, name in seen if name not in ("gate", "poison", "fill")]
    assert moved == [(side.stream_id, "copy to device"), (side.stream_id, "region copy")] * 2, moved
    assert len(others) == 14
    assert torch.equal(torch.cat([t.cpu().flatten() for t in tensors]), content)


def test_one_launch_a_bucket() -> None:
    alone(one_launch)


def odd_regions() -> None:
    """What the kernel does not take goes through ATen, in the same call: more dims than it counts, other conversions."""
    deep = (
        torch.arange(3**6 * 2).view([3] * 6 + [2])[..., ::2].permute(5, 3, 1, 0, 2, 4, 6)[::2, ::2, ::2, ::2, ::2, ::2]
    )
    tensors = [deep, torch.arange(40), torch.arange(7.0)]
    rows = [
        Row(0, 0, torch.int64, [0] * 7, list(deep.shape), packed(list(deep.shape))),
        Row(1, 1001, torch.float32, [3], [30], [1]),
        Row(2, 2000, torch.float32, [0], [7], [1]),
        Row(2, 2101, torch.bfloat16, [2], [3], [2]),
    ]
    strides = [3 ** (5 - d) * 2 for d in range(6)]
    turned = [strides[d] * 2 for d in (5, 3, 1, 0, 2, 4)] + [2]
    views = [(list(deep.shape), turned, 0), ([40], [1], 0), ([7], [1], 0)]
    bases = [torch.arange(3**6 * 2), tensors[1], tensors[2]]
    check_equal(Problem(bases, views, rows, 2200, 0, 7), False, op(False), DEVICE)
    check_equal(Problem(bases, views, rows[:1] + rows[2:3], 2200, 0, 7), True, op(True), DEVICE)


def test_regions_beyond_the_kernel() -> None:
    alone(odd_regions)


def divisions() -> None:
    dice = random.Random(1)
    top = 2**31 - 1
    for divisor in [*range(1, 70), *(2**k + d for k in range(7, 31) for d in (-1, 0, 1)), top - 1, top]:
        numbers = [
            0,
            1,
            divisor - 1,
            divisor,
            top,
            top - 1,
            top // divisor * divisor,
            max(0, top // divisor * divisor - 1),
        ]
        numbers += [dice.randrange(top + 1) for _ in range(200)]
        assert fakedev._native().divide(numbers, divisor) == [n // divisor for n in numbers], divisor


def test_division_by_multiplication_is_exact() -> None:
    alone(divisions)


KERNELS = build.CSRC / "cuda" / "region_copy.cu"
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH to compile the CUDA kernels with")


def cubin(folder: Path, architecture: str, source: Path) -> tuple[dict[str, list[str]], str]:
    """Each kernel's memory instructions, and what ptxas says of registers and spills."""
    output = folder / f"{architecture}.cubin"
    words = ["nvcc", "-O3", "-std=c++17", "-cubin", f"-arch={architecture}", "-Xptxas", "-v", "-I", str(KERNELS.parent)]
    done = subprocess.run(
        [*words, str(source), "-o", str(output)], capture_output=True, text=True, timeout=200, check=True
    )
    return sass.memory_instructions(output.read_bytes()), done.stderr


@needs_nvcc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_wide_accesses_and_no_spills(architecture: str, tmp_path: Path) -> None:
    kernels, said = cubin(tmp_path, architecture, KERNELS)
    assert said.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == len(kernels) == 2, said
    for name, instructions in kernels.items():
        assert not [i for i in instructions if i.startswith(("LDL", "STL"))], name
        assert not [i for i in instructions if i.startswith(("LD.", "ST."))], f"{name}: not known to be global"
    plain = next(found for name, found in kernels.items() if "ILb0E" in name)
    wide = [i for i in plain if i in ("LDG.128", "STG.128")]
    assert wide == ["LDG.128"] * 4 + ["STG.128"] * 4, "four loads in flight, then their stores"


@needs_nvcc
def test_spills_would_be_seen(tmp_path: Path) -> None:
    """So that the test above fails for its own reason: the same kernels with too few registers."""
    source = tmp_path / "tight.cu"
    source.write_text(KERNELS.read_text().replace("kBlocks = 2;", "kBlocks = 6;"))
    kernels, said = cubin(tmp_path, "sm_90", source)
    assert "0 bytes stack frame" not in said
    assert all({"LDL.32", "STL.32"} <= set(found) for found in kernels.values())
