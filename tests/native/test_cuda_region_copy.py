"""The CUDA region copy without a GPU: the kernel's own code run on the host, lane by lane, and what nvcc makes of it."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import fakedev, ranks, sass
from support.fakedev import build
from support.region_copies import (
    Problem,
    Row,
    big_problem,
    check_conversions,
    check_equal,
    long_runs,
    packed,
    problems,
    table_of,
)

DEVICE = f"{fakedev.NAME}:0"
MANY = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), database=None)


pytestmark = pytest.mark.usefixtures("fake_device")


def alone(function: Callable[..., None], *args: Any) -> None:
    """Runs it in a process of its own, which then has the fake device."""
    assert ranks.run(1, in_process, function, *args, setup=fakedev.setup) == [None]


def in_process(rank: int, function: Callable[..., None], *args: Any) -> None:
    torch.ops.load_library(str(build.library()))
    function(*args)


def op(unpack: bool) -> Callable[..., None]:
    library = torch.ops.epload_test
    return library.unpack if unpack else library.pack  # type: ignore[no-any-return]


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


def every_conversion() -> None:
    check_conversions(op(False), op(True), DEVICE)


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
        with fakedev.holding(side):
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


def small_tables() -> None:
    """A table of few regions is an argument of its launch: nothing is copied for it, and it may go at once."""
    target = torch.zeros(100, 4, device=DEVICE)
    bucket = torch.arange(400, dtype=torch.float32).view(torch.uint8).to(DEVICE)
    # What the launch takes: records of 32 bytes, one a row here, but for the 4 KiB that are not all the table's.
    for rows, copies in ((1, 0), (62, 0), (100, 0), (124, 0), (125, 1), (200, 1)):
        table = table_of([Row(0, 8 * i, torch.float32, [i // 2, i % 2 * 2], [1, 2], [2, 1]) for i in range(rows)], 2)
        target.zero_()
        with fakedev.traced() as seen:
            op(True)(bucket, [target], table)
        names = [name for _, _, name in seen if name not in ("poison", "fill")]
        assert names == ["copy to device"] * copies + ["region copy"], (rows, names)
        assert torch.equal(target.cpu().view(-1)[: 2 * rows], torch.arange(2.0 * rows))
        assert not target.cpu().view(-1)[2 * rows :].any()


def test_small_tables_are_arguments() -> None:
    alone(small_tables)


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


def without_kernels() -> None:
    """What a driver that is too old for them, or a device that they have no code for, looks like."""
    os.environ["EPLOAD_TEST_NO_KERNELS"] = "1"
    library, reason = torch.ops.epload_test, "no kernel image is available for execution on the device"
    with tempfile.TemporaryFile() as stderr:  # of native code, which warns on standard error
        os.dup2(stderr.fileno(), 2)
        for turn in range(3):
            bucket = (torch.arange(40, dtype=torch.uint8) + turn).to(DEVICE)
            target = torch.zeros(10, device=DEVICE)
            library.unpack(bucket, [target], table_of([Row(0, 0, torch.float32, [0], [10], [1])], 1))
            assert torch.equal(target.cpu().view(torch.uint8), bucket.cpu()), "right all the same"
        assert library.cuda_obstacle(torch.device(DEVICE)) == reason
        stderr.seek(0)
        lines = [line for line in stderr.read().decode().splitlines() if "kernels" in line]
    assert len(lines) == 1, lines
    for part in (DEVICE, reason, "slow"):
        assert part in lines[0]


def with_kernels() -> None:
    library = torch.ops.epload_test
    assert library.cuda_obstacle(torch.device(DEVICE)) == ""
    assert library.cuda_obstacle(torch.device(f"{fakedev.NAME}:7")) == "torch finds no such device"


@pytest.mark.parametrize("case", [with_kernels, without_kernels])
def test_kernels_that_do_not_run_say_why_once(case: Callable[..., None]) -> None:
    alone(case)


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
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_machine_code(architecture: str, tmp_path: Path) -> None:
    known = subprocess.run(["nvcc", "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    if architecture not in known:
        pytest.skip(f"this nvcc has no {architecture}")
    kernels, log = cubin(tmp_path, architecture, KERNELS)
    assert log.count(" 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == len(kernels) == 4, log
    for name, instructions in kernels.items():
        assert not [i for i in instructions if i.startswith(("LDL", "STL"))], name
        assert not [i for i in instructions if i.startswith(("LD.", "ST."))], f"{name}: not known to be global"
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
    assert len(registers) == 4
    assert max(registers) <= 128, "two blocks of 256 threads a processor, of kernels that convert"
    assert sorted(registers)[1] <= 80, "three of those that do not"
    for inline in (False, True):
        plain = found(kernels, inline, converts=False)
        runs = [f"{name} x {len(list(group))}" for name, group in groupby(plain)]
        at = runs.index("LDG.128 x 8")
        assert runs[at + 1] == "STG.128 x 8", "eight loads in flight, then their stores"
        for width in (8, 16, 32, 64, 128):
            assert f"STG.{width} x 8" in runs, "for every width"
            assert f"STG.{width} x 4" in runs, "and four of what is strided"


def found(kernels: dict[str, list[str]], inline: bool, converts: bool) -> list[str]:
    names = [n for n in kernels if ("region_copy_inline" in n) is inline and ("ILb1E" in n) is converts]
    assert len(names) == 1, list(kernels)
    return kernels[names[0]]
