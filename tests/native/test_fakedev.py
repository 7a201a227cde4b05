"""The fake accelerator itself: what it must get wrong for programs that free memory too early."""

from __future__ import annotations

import pytest
import torch

from support import fakedev, ranks
from support.accelerator import DEVICE

pytestmark = pytest.mark.usefixtures("fake_device")


def poison(rank: int) -> None:
    """Memory given back is not what it was, for a stream that still reads it; nor is fresh memory zero."""
    second = torch.Stream(DEVICE)
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
    torch.accelerator.synchronize()


def test_freed_memory_is_poisoned() -> None:
    assert ranks.run(1, poison, setup=fakedev.setup, limit=60) == [None]
