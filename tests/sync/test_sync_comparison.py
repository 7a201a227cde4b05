"""A sender's base becomes what it has compared: in all tensors of which it sends everything, and in no other."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from epload import Manifest
from epload.core.views import View
from epload.planning.exchange import plan_exchange
from epload.planning.holdings import Holdings, Share, full_holdings
from epload.planning.streams import ExchangePlan, Members
from epload.sync.comparison import Comparison, compare
from epload.transfer.shards import Shards
from support import fakedev
from support.ranks import run
from support.small_syncs import many_waves

HALF = torch.bfloat16
SHAPES = {"gate": (150, 40), "up": (150, 40), "embed": (500, 64), "head": (500, 64), "scale": ()}
LOCAL = [(300, 40), (500, 64), ()]
"""Gate and up are one tensor, embed and head are tied."""


def holdings(dtype: torch.dtype = HALF) -> Holdings:
    gate, up = (View((row, 0), (150, 40), 0, (40, 1)) for row in (0, 150))
    embed, scale = View.whole((500, 64)), View.whole(())
    shares = [
        Share(shape, ((0, view),), dtype) for shape, view in (((150, 40), gate), ((150, 40), up), ((500, 64), embed), ((), scale))
    ]
    return Holdings(torch.tensor([0, 1, 2, 2, 3]), tuple(shares), [(0,), (0,), (1,), (1,), (2,)])


def plan_of(own: Holdings, rank: int = 0, senders: int = 1, dtype: torch.dtype = HALF) -> ExchangePlan:
    """Returns a sender's plan, where a receiver has full tensors in bfloat16."""
    shapes = tuple(SHAPES.values())
    manifest = Manifest(tuple(SHAPES), shapes, (dtype,) * len(SHAPES), "a test")
    members = Members(tuple((sender,) for sender in range(senders)), ((senders,),))
    of_ranks = {**dict.fromkeys(range(senders), own), senders: full_holdings(shapes, (HALF,) * len(SHAPES))}
    with many_waves():
        return plan_exchange(manifest, members, of_ranks, rank, own, 20_000)


def compared(plan: ExchangePlan, new: list[Tensor], base: list[Tensor], verify: bool = False) -> Comparison:
    comparison = compare(plan, Shards(plan, new, verify, "", 1), Shards(plan, base, False, "", 1), verify, math.inf)
    assert comparison is not None
    return comparison


def first_version() -> list[Tensor]:
    return [torch.arange(math.prod(shape)).reshape(shape).to(HALF) for shape in LOCAL]


def changed(tensors: list[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.where(torch.rand(tensor.shape, generator=generator) < 0.1, tensor + 1, tensor) for tensor in tensors]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("senders", [1, 2, 3])
def test_the_base_becomes_what_was_compared(senders: int, verify: bool) -> None:
    own = holdings()
    sent: list[int] = []
    for rank in range(senders):
        plan, old = plan_of(own, rank, senders), first_version()
        new, base = changed(old, rank), first_version()
        comparison = compared(plan, new, base, verify)
        assert len(comparison.changed) == len(plan.buckets) > 1
        left_out = comparison.left_out(own)
        comparison.apply()
        for number, (found, before, after) in enumerate(zip(base, old, new, strict=True)):
            if number not in left_out:
                assert torch.equal(found, after)
                sent.append(number)
            else:  # a part of it may have been sent
                assert ((found == before) | (found == after)).all()
    if senders == 1:
        assert sent == [0, 1, 2]
    else:
        assert sent.count(2) == 1  # one rank sends a scalar, and several a large tensor
        assert len(sent) < 3 * senders


def test_what_is_sent_in_another_dtype_is_left_out() -> None:
    own = holdings(torch.float32)
    plan = plan_of(own, dtype=torch.float32)
    old, base = ([torch.zeros(shape) for shape in LOCAL] for _ in range(2))
    comparison = compared(plan, changed(old, 0), base)
    assert comparison.left_out(own) == [0, 1, 2]
    comparison.apply()
    assert not any(tensor.any() for tensor in base)


def compare_with_threads(rank: int, verify: bool) -> None:
    """Several threads compare what is on a device with a copy on the host: as they do on the host, one bucket like the other."""
    torch.set_num_threads(4)
    plan, old = plan_of(holdings()), first_version()
    assert len(plan.buckets) > 4
    for seed in range(20):
        new = changed(old, seed)
        outcomes = []
        for where in ("cpu", fakedev.NAME):
            base = [tensor.clone() for tensor in old]
            comparison = compared(plan, [tensor.to(where) for tensor in new], base, verify)
            outcomes.append((comparison.changed, [encoded.tolist() for encoded in comparison.encoded]))
            comparison.apply()
            assert all(map(torch.equal, base, new))
        assert outcomes[0] == outcomes[1]
        old = new


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.usefixtures("fake_device")
def test_threads_compare_what_is_on_a_device(verify: bool) -> None:
    run(1, compare_with_threads, verify, setup=partial(fakedev.setup, "nccl"))
