"""The fake accelerator itself: what it must get wrong for wrong programs, so that the tests on it mean something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

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


def other_ops_stay_in_order() -> None:
    x = torch.arange(12.0, device=DEVICE).view(3, 4)
    assert (x.t() @ x).sum().item() == (torch.arange(12.0).view(3, 4).t() @ torch.arange(12.0).view(3, 4)).sum().item()
    other = x.to(f"{fakedev.NAME}:1")
    assert other.device.index == 1
    assert torch.equal(other.cpu(), x.cpu())
    assert x.view(torch.uint8)[0, ::2].cpu().tolist() == torch.arange(4.0).view(torch.uint8)[::2].tolist()
    assert torch.tensor([1 + 2j], device=DEVICE).conj().clone().cpu().tolist() == [1 - 2j]


@pytest.mark.parametrize(
    "check",
    [order_between_streams, poison, copies_from_and_to_the_host, other_ops_stay_in_order],
    ids=lambda f: f.__name__,
)
def test_device(check: Callable[[], None]) -> None:
    assert ranks.run(1, alone, check, setup=fakedev.setup, limit=40) == [None]


def alone(rank: int, check: Callable[[], None]) -> None:
    check()


def failing_collective(rank: int) -> str:
    """Rank 1 does not come. The error arises on the stream's thread and is raised where the host waits for it."""
    group = dist.new_group(backend=fakedev.BACKENDS, timeout=timedelta(seconds=1))
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(4, device=DEVICE), group=group)
            torch.accelerator.synchronize()
        except RuntimeError as error:
            return str(error)
    return ""


def collectives(rank: int) -> list[bool]:
    def filled(value: float, count: int = 4) -> Tensor:
        return torch.full((count,), value, device=DEVICE)

    x, total, gathered, part = filled(rank), filled(rank + 1), filled(0, 8), filled(0, 2)
    dist.broadcast(x, 1)
    dist.all_reduce(total)
    dist.all_gather_into_tensor(gathered, filled(rank))
    dist.reduce_scatter_tensor(part, filled(rank + 1))
    work = dist.broadcast(late := filled(rank), 1, async_op=True)
    work.wait()
    return [
        x.tolist() == [1] * 4,
        total.tolist() == [3] * 4,
        gathered.tolist() == [0] * 4 + [1] * 4,
        part.tolist() == [3] * 2,
        late.tolist() == [1] * 4,
    ]


def test_collectives() -> None:
    assert ranks.run(2, collectives, setup=fakedev.setup, limit=40) == [[True] * 5] * 2


def test_an_error_on_a_stream_is_raised_where_the_host_waits() -> None:
    results = ranks.run(2, failing_collective, setup=fakedev.setup, limit=40)
    assert "fakedev: work on stream" in results[0]


def test_a_held_stream_does_not_keep_the_process() -> None:
    assert ranks.run(1, left_held, setup=fakedev.setup, limit=40) == [None]


def left_held(rank: int) -> None:
    stream = torch.Stream(DEVICE)
    fakedev.hold(stream)
    with stream:
        torch.zeros(1 << 20, device=DEVICE).fill_(1)
