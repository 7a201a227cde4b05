"""Region tables, which devices keep, and guards: on CPU, and with the kernel's own code on the fake accelerator."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from epload import HierarchicalLoader
from epload.native.region_tables import Guard, can_guard, can_guard_table, region_table, unpack_table
from support import accelerator, fakedev, ranks, small_model
from support import region_tables as contract
from support.region_copies import Problem, Row, big_problem, long_runs, problems, table_of
from support.region_tables import FEW, HEADER, MANY, Guarded, header

DEVICE = f"{fakedev.NAME}:0"
SOME = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
pytestmark = pytest.mark.usefixtures("fake_device")


def alone(function: Callable[..., None], *args: Any) -> None:
    """Runs it in a process of its own, which then has the fake device."""
    assert ranks.run(1, in_process, function, *args, setup=fakedev.setup) == [None]


def in_process(rank: int, function: Callable[..., None], *args: Any) -> None:
    fakedev.use_kernels()
    function(*args)


PROBLEMS = {"long_runs": long_runs, "problems": problems}


def equal(kind: str, device: str) -> None:
    SOME(given(PROBLEMS[kind]())(lambda problem: contract.check_table(problem, device)))()


@pytest.mark.parametrize("kind", PROBLEMS)
def test_equal_to_plain_torch(kind: str) -> None:
    alone(equal, kind, DEVICE)


@pytest.mark.parametrize("kind", PROBLEMS)
def test_equal_to_plain_torch_on_cpu(kind: str) -> None:
    equal(kind, "cpu")


def big_problem_agrees() -> None:
    tensors, rows, nbytes = big_problem()
    bases = [t.contiguous().view(-1) if t.is_contiguous() else t.t().reshape(-1) for t in tensors]
    views = [(list(t.shape), list(t.stride()), 0) for t in tensors]
    contract.check_table(Problem(bases, views, rows, nbytes, 0, 2), DEVICE)


def test_large_and_tiny_regions() -> None:
    alone(big_problem_agrees)


def work(seen: list[tuple[int, int, str]]) -> dict[str, int]:
    names = [name for _, _, name in seen]
    return {name: names.count(name) for name in ("copy to device", "region copy")}


def unpacked(count: int, uses: list[tuple[str, int]]) -> list[int]:
    """Uses one table with named buckets and one of several sets of targets; of each use, the tables that it has copied to the
    device. Every target must be right."""
    sets = [contract.strided_regions(count, DEVICE) for _ in range(3)]
    wide = [torch.zeros(1 + i % 9, 7, device=DEVICE)[:, ::3] for i in range(count)]  # other strides
    halves = [torch.zeros(1 + i % 9, 5, device=DEVICE, dtype=torch.float16)[:, ::2] for i in range(count)]
    targets = [*(made[0] for made in sets), wide, halves]
    _, copies, content = sets[0]
    values = content % 1000  # which float16 can hold
    found = torch.cat([torch.zeros(HEADER, dtype=torch.uint8), values.view(torch.uint8)])
    buckets = {name: found.to(DEVICE) for name in {name for name, _ in uses}}
    table = region_table(copies)
    copied = []
    for name, which in uses:
        with fakedev.traced() as seen:
            unpack_table(buckets[name], targets[which], table)
        assert work(seen)["region copy"] == 1
        copied.append(work(seen)["copy to device"])
        got = torch.cat([t.cpu().float().flatten() for t in targets[which]])
        assert torch.equal(got, values), (name, which)
        for target in targets[which]:
            target.zero_()
    return copied


def kept() -> None:
    again = [("a", 0)] * 3
    assert unpacked(MANY, again) == [1, 0, 0]
    assert unpacked(FEW, again) == [0, 0, 0], "a small table travels with the launch"
    assert unpacked(MANY, [("a", 0), ("b", 0), ("b", 0), ("a", 0)]) == [1, 1, 0, 1], "of the last bucket"
    assert unpacked(MANY, [("a", i) for i in (0, 1, 1, 0)]) == [1, 1, 0, 1], "and the last targets"


def test_tables_are_kept() -> None:
    alone(kept)


def same_memory_in_another_form() -> None:
    """The same address is not the same target."""
    base, narrow = torch.zeros(MANY, 4, device=DEVICE), torch.zeros(MANY, 4, dtype=torch.int32, device=DEVICE)
    bucket = torch.arange(MANY * 4, dtype=torch.int32).view(torch.uint8).to(DEVICE)
    # Rows long apart in the bucket, so that the table is large.
    copies = table_of([Row(0, 16 * i, torch.int32, [i, 0], [1, 4], [4, 1]) for i in range(MANY)], 2)
    table = region_table(copies)
    del base
    want = torch.arange(MANY * 4, dtype=torch.int32).view(MANY, 4)
    unpack_table(bucket, [narrow], table)
    assert torch.equal(narrow.cpu(), want)
    turned = narrow.view(-1).as_strided((MANY, 4), (1, MANY))
    unpack_table(bucket, [turned], table)
    assert torch.equal(turned.cpu(), want)
    floats = narrow.view(torch.float32)
    unpack_table(bucket, [floats], table)
    assert torch.equal(floats.cpu(), want.float())
    with pytest.raises(ValueError, match="outside tensor"):
        unpack_table(bucket, [narrow[:-1]], table)
    with pytest.raises(ValueError, match="outside the bucket"):
        unpack_table(bucket[:-1], [narrow], table)
    narrow.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="too few"):
        unpack_table(bucket, [narrow], table)


def test_same_memory_in_another_form() -> None:
    alone(same_memory_in_another_form)


def reused_while_held() -> None:
    """A table that is replaced, or used on another stream, before its launch has run."""
    targets, copies, content = contract.strided_regions(MANY, DEVICE)
    others = [torch.zeros_like(target) for target in targets]
    raw = torch.cat([torch.zeros(HEADER, dtype=torch.uint8), content.view(torch.uint8)])
    buckets = [raw.to(DEVICE) for _ in range(7)]
    held, side = torch.Stream(DEVICE), torch.Stream(DEVICE)
    torch.accelerator.synchronize()
    table = region_table(copies)
    with held, fakedev.holding(held):
        for bucket in buckets:
            unpack_table(bucket, targets, table)
        with side:
            unpack_table(buckets[-1], others, table)
            unpack_table(buckets[-1], targets, table)
            got = torch.cat([t.cpu().flatten() for t in others])
        assert torch.equal(got, content), "not the table that waits on another stream"
        del table
        fresh = [torch.full((1 << s,), 255, dtype=torch.uint8, device=DEVICE) for s in range(10, 22) for _ in range(3)]
        pinned = [torch.full((1 << s,), 255, dtype=torch.uint8, pin_memory=True) for s in range(10, 22)]
        with side:
            fresh += [torch.full((1 << s,), 255, dtype=torch.uint8, device=DEVICE) for s in range(10, 22)]
    torch.accelerator.synchronize()
    assert torch.equal(torch.cat([t.cpu().flatten() for t in targets]), content)
    assert len(fresh) + len(pinned) == 60


def test_reused_while_a_launch_waits() -> None:
    alone(reused_while_held)


def keeps_nothing_alive() -> None:
    targets, copies, content = contract.strided_regions(MANY, DEVICE)
    bucket = torch.cat([torch.zeros(HEADER, dtype=torch.uint8), content.view(torch.uint8)]).to(DEVICE)
    table = region_table(copies)
    unpack_table(bucket, targets, table)
    watched = [weakref.ref(tensor) for tensor in (bucket, *targets)]
    del bucket, targets
    assert not [tensor for tensor in watched if tensor() is not None]
    assert table is not None


def test_keeps_nothing_alive() -> None:
    alone(keeps_nothing_alive)


CHECKS = [contract.check_header, contract.check_sticky, contract.check_guard_alone, contract.check_refusals]


@pytest.mark.parametrize("check", CHECKS)
def test_guards(check: Callable[[str], None]) -> None:
    alone(check, DEVICE)


def decided_late() -> None:
    """The device decides when it comes to the bucket, and one launch after the other."""
    guarded, side = Guarded(DEVICE, MANY), torch.Stream(DEVICE)
    buckets = [guarded.bucket(header(index)) for index in (0, 1, 9, 3)]
    late = guarded.bucket(header(9))
    torch.accelerator.synchronize()
    with fakedev.traced() as seen, side:
        with fakedev.holding(side):
            late[:HEADER].copy_(buckets[1][:HEADER])
            for index, bucket in enumerate([buckets[0], late, *buckets[2:]]):
                guarded.unpack(header(index), bucket)
            assert guarded.flag.item() == 0
        side.synchronize()
    assert work(seen)["region copy"] == 4
    assert guarded.state() == (1, 3)


def test_decided_when_the_device_comes_to_it() -> None:
    alone(decided_late)


def guard_alone_is_one_launch() -> None:
    guarded = Guarded(DEVICE)
    bucket, table = guarded.bucket(header(0)), region_table(torch.zeros(0, 4, dtype=torch.int64))
    for guard, launches in ((Guard(header(0), guarded.stopped, guarded.flag), 1), (None, 0)):
        with fakedev.traced() as seen:
            unpack_table(bucket, [], table, guard)
        assert work(seen) == {"copy to device": 0, "region copy": launches}


def test_a_guard_alone_is_one_launch() -> None:
    alone(guard_alone_is_one_launch)


def without_kernels() -> None:
    os.environ["EPLOAD_TEST_NO_KERNELS"] = "1"
    assert not can_guard(torch.device(DEVICE))
    refused_without_kernels(DEVICE)


def refused_without_kernels(device: str) -> None:
    bucket, target = torch.arange(80, dtype=torch.uint8).to(device), torch.zeros(4, device=device)
    table = region_table(table_of([Row(0, 16, torch.float32, [0], [4], [1])], 1))
    assert not can_guard_table(bucket, [target], table)
    flag = torch.zeros(1, dtype=torch.int32, pin_memory=torch.accelerator.is_available())
    guard = Guard(bucket[:HEADER].cpu(), torch.zeros(1, dtype=torch.int32, device=device), flag)
    with pytest.raises(ValueError, match="unpack_table"):
        unpack_table(bucket, [target], table, guard)
    assert not target.any()
    for _ in range(2):
        unpack_table(bucket, [target], table)
        assert torch.equal(target.cpu().view(torch.uint8), bucket[16:32].cpu())
    with pytest.raises(ValueError, match="outside the bucket"):
        unpack_table(bucket[:31], [target], table)


def test_devices_without_kernels() -> None:
    alone(without_kernels)
    refused_without_kernels("cpu")
    assert not can_guard(torch.device("cpu"))
    assert not can_guard(torch.device("meta"))


def test_no_such_device() -> None:
    alone(no_such_device)


def no_such_device() -> None:
    assert can_guard(torch.device(DEVICE))
    assert not can_guard(torch.device(f"{fakedev.NAME}:7"))


def whole_load() -> None:
    """The loader's own buckets, on the fake device, unpacked by the kernel's code."""
    loader = HierarchicalLoader(bucket_bytes=small_model.BUCKET)
    model = accelerator.meta_net()
    with fakedev.traced() as seen:
        report = loader.load(model, small_model.state_for(1))
    assert accelerator.wrong(model, small_model.state_for(1)) == []
    assert work(seen)["region copy"] == report.buckets > 1


def test_a_load_runs_the_kernels() -> None:
    alone(whole_load)


@pytest.mark.parametrize("copies", [torch.zeros(2, 5, dtype=torch.int64), torch.zeros(1, 7), torch.zeros(7)])
def test_what_is_no_copy_table(copies: Tensor) -> None:
    with pytest.raises(ValueError, match="copy table"):
        region_table(copies)


def test_meta_holds_no_data() -> None:
    target, bucket = torch.zeros(4, device="meta"), torch.zeros(80, dtype=torch.uint8)
    table = region_table(table_of([Row(0, 16, torch.float32, [0], [4], [1])], 1))
    for tensors in ((bucket, [target]), (bucket.to("meta"), [target])):
        with pytest.raises(ValueError, match="meta"):
            unpack_table(*tensors, table)
