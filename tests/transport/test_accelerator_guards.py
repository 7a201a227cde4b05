"""Headers that are checked on the device: a bucket that aborts the transfer, and what comes after it, never reaches a tensor,
whether or not all ranks can check there, and all ranks move the same buckets. On a fake accelerator, by the kernels' code."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from epload.native import region_tables
from epload.staging import device
from epload.transport import sinks
from epload.transport.framing import Framing
from epload.transport.movers import Collective
from support import fakedev, ranks
from support.aborts import BUCKETS, WHO, Moved, Scene, at_each_bucket, none_differs
from support.accelerator import DEVICE
from support.checks import all_fine

pytestmark = pytest.mark.usefixtures("fake_device")


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize(
    ("readers", "algorithm"),
    [
        ("one", "two_level"),
        ("one", "striped"),
        ("one", "flat"),
        ("partitioned", "two_level"),
        ("partitioned", "striped"),
    ],
)
def test_all_ranks_end_at_one_bucket_and_none_unpacks_it(readers: str, algorithm: str, who: str) -> None:
    none_differs(ranks.run(4, at_each_bucket, readers, algorithm, who, DEVICE, setup=fakedev.setup))


def _not_sticky(rank: int) -> list[bool]:
    """What the bucket after an aborted one would do to a rank whose device forgets."""
    scene, made = Scene("partitioned", "two_level", "all guard", DEVICE), []
    scene.load(1)

    def forgetful(expected: Tensor, stopped: Tensor, flag: Tensor) -> region_tables.Guard:
        made.append(torch.zeros_like(stopped))
        return region_tables.Guard(expected, made[-1], flag)

    with mock.patch.object(sinks, "Guard", forgetful):
        scene.load(2, 3, after=0.5)  # the next has been read by then
    return [scene.holds(number, 1) for number in range(BUCKETS)]


def test_what_comes_after_an_aborted_bucket_is_refused_too() -> None:
    """The next one is another reader's, and in order: nothing but the memory of the first keeps it out."""
    found = ranks.run(4, _not_sticky, setup=fakedev.setup)
    for rank in (1, 3):
        assert found[rank][3], "the aborted bucket itself"
        assert not found[rank][4], "this test shows nothing"


def _ahead(rank: int, who: str) -> tuple[int, int]:
    """How many buckets a receiver moves while its stream stands still, and its device buffers."""
    scene = Scene("one", "two_level", who, DEVICE)
    scene.load(1)
    staging = scene.loader._resources.device.staging
    assert staging is not None
    ahead, real = [0], Collective.move

    def move(self: Collective, wave: Any) -> None:
        if wave.index == 0 and rank == 3:
            fakedev.hold(staging.stream)
        real(self, wave)
        ahead[0] += 1

    def poll(event: torch.Event, check: Any) -> None:
        if rank == 3 and not event.query():  # the host is where it waits
            until = time.monotonic() + 0.2
            while time.monotonic() < until and not event.query():
                time.sleep(0.01)
            seen.append(ahead[0])
            fakedev.release(staging.stream)
        waits(event, check)

    seen: list[int] = []
    waits = device.wait_for
    with mock.patch.object(Collective, "move", move), mock.patch.object(device, "wait_for", poll):
        text = scene.load(2)
    assert not text, text
    assert all(scene.holds(number, 2) for number in range(BUCKETS))
    return (seen or [0])[0], len(staging.buckets)


@pytest.mark.parametrize(("who", "expected"), [("all guard", (2, 3)), ("none guards", (1, 2))])
def test_the_host_looks_two_buckets_later(who: str, expected: tuple[int, int]) -> None:
    assert ranks.run(4, _ahead, who, setup=fakedev.setup)[3] == expected


OFFSETS = {"magic": 0, "index": 8, "status": 12, "fingerprint": 33}
"""In a header."""


def _out_of_order(rank: int, case: str) -> list[str]:
    scene, problems = Scene("one", "two_level", "all guard", DEVICE), []
    scene.load(1)
    real = Framing.expected

    def expected(self: Framing, number: int) -> Tensor:
        header = real(self, number)
        if number == 3 and rank == 3:
            header[OFFSETS[case]] ^= 2
        return header

    with mock.patch.object(Framing, "expected", expected):
        text = scene.load(2)
    if "rank 3: fakedev:0 found the header of bucket" not in text or "memory of the device changes" not in text:
        problems.append(text)
    if rank == 3:
        problems += [f"{number} was unpacked" for number in range(3, BUCKETS) if not scene.holds(number, 1)]
    problems += [text] if (text := scene.load(3)) else []
    return problems + [f"{number}" for number in range(BUCKETS) if not scene.holds(number, 3)]


@pytest.mark.parametrize("case", OFFSETS)
def test_a_bucket_that_the_device_refuses_for_no_reason_is_an_error(case: str) -> None:
    """The host finds every header in order: a load that says nothing would leave old weights."""
    all_fine(ranks.run(4, _out_of_order, case, setup=fakedev.setup))


def _alone(rank: int) -> list[str]:
    """Nothing comes from another rank, so that nothing is refused, and the host need not wait for the device."""
    real = Framing.expected

    def wrong(self: Framing, number: int) -> Tensor:
        header = real(self, number)
        header[8] ^= 2
        return header

    with mock.patch.object(Framing, "expected", wrong):
        scene = Scene("one", "two_level", "all guard", DEVICE, [[0]])
        texts = [scene.load(salt) for salt in (1, 2)]
    return [text for text in texts if text] + [f"{number}" for number in range(BUCKETS) if not scene.holds(number, 2)]


def test_a_rank_alone_checks_no_headers() -> None:
    all_fine(ranks.run(1, _alone, setup=fakedev.setup))


def _no_memory(rank: int, op: str) -> list[str]:
    scene, problems = Scene("one", "two_level", "all guard", DEVICE), []
    scene.load(1)
    calls = 0
    real = getattr(region_tables, op)

    def fails(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise torch.OutOfMemoryError("no memory for a table")
        return real(*args)

    moved = Moved()
    with mock.patch.object(region_tables, op, fails if rank == 3 else real), moved.counted():
        text = scene.load(2)
    if "rank 3 could not unpack bucket 3 (rows.3" not in text or "no memory for a table" not in text:
        problems.append(text)
    # The reader may have sent all buckets before it heard of it.
    if moved.error and not moved.interrupted and "no memory for a table" not in moved.error:
        problems.append(f"ended by {moved.error}")
    problems += [text] if (text := scene.load(3)) else []
    return problems + [f"{number}" for number in range(BUCKETS) if not scene.holds(number, 3)]


@pytest.mark.parametrize("op", ["can_guard_table", "unpack_table"])
def test_a_rank_without_memory_keeps_receiving_until_a_reader_ends_the_load(op: str) -> None:
    all_fine(ranks.run(4, _no_memory, op, setup=fakedev.setup))
