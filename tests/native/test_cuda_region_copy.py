"""The CUDA region copy without a GPU: the kernel's own code run on the host, lane by lane."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import fakedev, ranks
from support.accelerator import DEVICE
from support.fakedev import build
from support.region_copies import Problem, Row, big_problem, check_conversions, check_equal, packed, problems, table_of

MANY = settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck), database=None)
pytestmark = pytest.mark.usefixtures("fake_device")


def in_process(rank: int, function: Callable[[], None]) -> None:
    torch.ops.load_library(str(build.library()))
    function()


def op(unpack: bool) -> Callable[..., None]:
    return getattr(torch.ops.epload_test, "unpack" if unpack else "pack")  # type: ignore[no-any-return]


@MANY
@given(problems(), st.booleans())
def check_problem(problem: Problem, unpack: bool) -> None:
    check_equal(problem, unpack, op(unpack), DEVICE)


def any_problem() -> None:
    check_problem()


def large_problem_and_every_conversion() -> None:
    for unpack in (False, True):
        check_equal(big_problem(), unpack, op(unpack), DEVICE)
    check_conversions(op(False), op(True), DEVICE)


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


def odd_regions() -> None:
    """Goes through ATen, in the same call, with what the kernel does not take: more dims than it counts, other conversions."""
    shape = [2] * 6 + [1]
    rows = [
        Row(0, 0, torch.int64, [0] * 7, shape, packed(shape)),
        Row(1, 1001, torch.float32, [3], [30], [1]),
        Row(2, 2000, torch.float32, [0], [7], [1]),
        Row(2, 2101, torch.bfloat16, [2], [3], [2]),
    ]
    strides = [3 ** (5 - d) * 2 for d in range(6)]
    turned = [strides[d] * 2 for d in (5, 3, 1, 0, 2, 4)] + [2]
    views = [(shape, turned, 0), ([40], [1], 0), ([7], [1], 0)]
    bases = [torch.arange(3**6 * 2), torch.arange(40), torch.arange(7.0)]
    check_equal(Problem(bases, views, rows, 2200, 0, 7), False, op(False), DEVICE)
    check_equal(Problem(bases, views, rows[:1] + rows[2:3], 2200, 0, 7), True, op(True), DEVICE)


def divisions() -> None:
    """The kernel divides by multiplying, which must be exact. Nothing is in its way here."""
    dice = random.Random(1)
    top = 2**31 - 1
    for divisor in [*range(1, 70), *(2**k + d for k in range(7, 31) for d in (-1, 0, 1)), top - 1, top]:
        last = top // divisor * divisor
        numbers = [0, 1, divisor - 1, divisor, top, top - 1, last, max(0, last - 1)]
        numbers += [dice.randrange(top + 1) for _ in range(200)]
        assert fakedev._native().divide(numbers, divisor) == [n // divisor for n in numbers], divisor
    obstacle = torch.ops.epload_test.cuda_obstacle
    assert obstacle(torch.device(DEVICE)) == ""
    assert obstacle(torch.device(f"{fakedev.NAME}:7")) == "torch finds no such device"


def without_kernels() -> None:
    """Looks like a driver that is too old for them, or a device that they have no code for."""
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


CASES = [any_problem, large_problem_and_every_conversion, one_launch, odd_regions, divisions, without_kernels]


@pytest.mark.parametrize("case", CASES)
def test_in_a_process_with_the_device(case: Callable[[], None]) -> None:
    assert ranks.run(1, in_process, case, setup=fakedev.setup) == [None]
