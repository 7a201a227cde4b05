"""The fake accelerator itself: what it must get wrong for wrong programs, so that the tests on it mean something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from support import fakedev, ranks

DEVICE = f"{fakedev.NAME}:0"


pytestmark = pytest.mark.usefixtures("fake_device")


@contextmanager
def two_streams() -> Iterator[tuple[torch.Stream, torch.Stream]]:
    yield torch.Stream(DEVICE), torch.Stream(DEVICE)
    torch.accelerator.synchronize()


def order_between_streams() -> None:
    """Without an event a stream overtakes a held one; with one it waits."""
    with two_streams() as (first, second):
        x = torch.zeros(3, device=DEVICE)
        torch.accelerator.synchronize()
        with fakedev.holding(first):
            with first:
                x.fill_(5)
                done = first.record_event()
            with second:
                early = x.clone()
            second.synchronize()
            second.wait_event(done)
            with second:
                late = x.clone()
            assert not second.query()
            assert not done.query()
        second.synchronize()
        assert done.query()
        assert early.tolist() == [0] * 3
        assert late.tolist() == [5] * 3


def poison() -> None:
    """Memory given back is not what it was, for a stream that still reads it; nor is fresh memory zero."""
    with two_streams() as (_, second):
        x = torch.ones(1000, device=DEVICE)
        y, z = torch.zeros(1000, device=DEVICE), torch.zeros(1000, device=DEVICE)
        torch.accelerator.synchronize()
        with fakedev.holding(second):
            with second:
                y.copy_(x)
            del x
            torch.accelerator.current_stream(DEVICE).synchronize()
        assert not bool((y == 1).any())
        x = torch.ones(1000, device=DEVICE)
        torch.accelerator.synchronize()
        with fakedev.holding(second):
            with second:
                z.copy_(x)
            x.record_stream(second)
            del x
            again = torch.ones(1000, device=DEVICE)
        second.synchronize()
        assert bool((z == 1).all()), "a recorded stream keeps it"
        assert bool((again == 1).all())
        assert torch.empty(10, device=DEVICE, dtype=torch.uint8).tolist() != [0] * 10


def copies_from_and_to_the_host() -> None:
    """Pinned and non_blocking: the host goes on. Else it waits, and so would hang on a held stream."""
    with two_streams() as (stream, _), stream:
        pinned, plain = torch.ones(4).pin_memory(), torch.ones(4)
        assert pinned.is_pinned()
        assert not plain.is_pinned()
        x = torch.zeros(4, device=DEVICE)
        back = torch.zeros(4).pin_memory()
        stream.synchronize()
        with fakedev.holding(stream):
            x.copy_(pinned, non_blocking=True)
            back.copy_(x, non_blocking=True)
            assert not stream.query()
            assert back.tolist() == [0] * 4
        stream.synchronize()
        assert back.tolist() == [1] * 4
        with fakedev.traced() as seen:
            x.copy_(plain, non_blocking=True)
            assert stream.query(), "the host has waited"
        assert [name for *_, name in seen] == ["copy to device"]


@pytest.mark.parametrize(
    "check",
    [order_between_streams, poison, copies_from_and_to_the_host],
    ids=lambda f: f.__name__,
)
def test_device(check: Callable[[], None]) -> None:
    assert ranks.run(1, alone, check, setup=fakedev.setup, limit=40) == [None]


def alone(rank: int, check: Callable[[], None]) -> None:
    check()
