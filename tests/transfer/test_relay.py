"""The relay on real ranks: chains, rings and node chains, every byte in its place."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epload import _C
from epload.native import ops
from epload.planning.algorithms import STRIPE_ALIGNMENT
from support import ranks
from support.checks import all_fine
from support.failures import raised

SIZE = 10_007
CHUNKS = (1 << 20, 4099, 64)
Step = tuple[int, int, int, int, int, int]


def content(size: int = SIZE, salt: int = 0) -> Tensor:
    """No two runs of four bytes are alike."""
    return (torch.arange(size // 4 + 1, dtype=torch.int32) * 2654435 + salt * 97).view(torch.uint8)[:size].clone()


def name_of(group: dist.ProcessGroup) -> str:
    return str(group.group_name)


def table(steps: list[Step]) -> Tensor:
    return torch.tensor(steps, dtype=torch.int64).reshape(-1, 6)


def ring_step(rank: int, world: int, root: int, begin: int, end: int) -> Step:
    """Once around from the root to the rank before it."""
    source = -1 if rank == root else (rank - 1) % world
    to = (rank + 1) % world
    return begin, end, source, -1, -1 if to == root else to, -1


def check(
    what: str, rank: int, steps: list[Step], inter: str, intra: str, chunk: int, own: list[tuple[int, int]], salt: int
) -> list[str]:
    """One relay: this rank starts with its own ranges, and ends with what all steps together carry."""
    whole = content(salt=salt)
    bucket = torch.full((SIZE,), 0xEE, dtype=torch.uint8)
    expected = bucket.clone()
    for begin, end in own:
        bucket[begin:end] = whole[begin:end]
    for begin, end, *_ in steps:
        expected[begin:end] = whole[begin:end]
    ops.relay(bucket, table(steps), inter, intra, chunk)
    return [f"{what}: bytes {(bucket != expected).nonzero()[:9].flatten().tolist()} are wrong"] * (
        not bucket.equal(expected)
    )


def rings(rank: int, world: int) -> list[str]:
    group = dist.new_group(list(range(world)))
    problems, salt = [], 0
    for root in range(world):
        for chunk in CHUNKS:
            salt += 1
            what = f"ring from {root} in chunks of {chunk}"
            step = ring_step(rank, world, root, 5, SIZE - 3)
            problems += check(what, rank, [step], name_of(group), "", chunk, [step[:2]] if rank == root else [], salt)
    return problems + stripes_at_once(rank, world, group) + tiny_and_empty(rank, world, group)


def stripes_at_once(rank: int, world: int, group: dist.ProcessGroup) -> list[str]:
    """Every rank is the root of two stripes."""
    problems = []
    for chunk in (*CHUNKS, 331):
        steps, own = [], []
        for distance in range(world):
            root = (rank - distance) % world
            for number in (root, root + world):
                begin, end = _C.stripe(0, SIZE, 2 * world, number, STRIPE_ALIGNMENT)
                steps.append(ring_step(rank, world, root, begin, end))
                own += [(begin, end)] if root == rank else []
        problems += check(f"stripes in chunks of {chunk}", rank, steps, name_of(group), "", chunk, own, chunk)
    return problems


def tiny_and_empty(rank: int, world: int, group: dist.ProcessGroup) -> list[str]:
    """A byte at a time, and pieces of no bytes, for which nothing is sent."""
    cuts = [0, 0, 1, 1, 3, 40, 40, 40, 41]
    pieces = [ring_step(rank, world, 0, low, high) for low, high in pairwise(cuts)]
    own = [(0, 41)] if rank == 0 else []
    problems = check("byte by byte", rank, pieces, name_of(group), "", 1, own, 1)
    problems += check("only empty pieces", rank, [ring_step(rank, world, 0, 7, 7)] * 3, name_of(group), "", 1, [], 2)
    return problems + check("no piece", rank, [], name_of(group), "", 5, [], 3)


@pytest.mark.parametrize("world", [2, 3])
def test_rings(world: int) -> None:
    all_fine(ranks.run(world, rings, world))


# ---- wrong use ----


def wrong_arguments(rank: int) -> list[str]:
    group = dist.new_group([0, 1])
    pair = name_of(group)
    problems = []

    bucket, one = content(), (0, 10, -1, -1, -1, -1)
    wrong: list[tuple[str, Tensor, Tensor, dict[str, Any]]] = [
        ("step 1 covers bytes [0, 10008)", bucket, table([one, (0, SIZE + 1, -1, -1, -1, -1)]), {}),
        ("step 0 covers bytes [-1", bucket, table([(-1, 4, -1, -1, -1, -1)]), {}),
        ("step 0 covers bytes [9, 8)", bucket, table([(9, 8, -1, -1, -1, -1)]), {}),
        ("two ranks, 0 and 1", bucket, table([(0, 8, 0, 1, -1, -1)]), {}),
        ("chunk_bytes", bucket, table([one]), {"chunk": 0}),
        ("chunk_bytes", bucket, table([one]), {"chunk": -5}),
        ("uint8", content().view(torch.int8), table([one]), {}),
        ("1-D", content(10_000).reshape(100, 100), table([one]), {}),
        ("contiguous", content()[::2], table([one]), {}),
        ("steps of 6 numbers, got 5", bucket, torch.zeros(2, 5, dtype=torch.int64), {}),
        ("int64", bucket, torch.zeros(1, 6, dtype=torch.int32), {}),
        ("no such name", bucket, table([one]), {"inter": "no such name"}),
        ("2", bucket, table([(0, 8, -1, -1, 2, -1)]), {}),
        ("2", bucket, table([(0, 8, 2, -1, -1, -1)]), {}),
        ("1", bucket, table([(0, 8, -1, -1, 1, -1)]), {"inter": ""}),
    ]
    for text, target, steps, options in wrong:
        before = target.clone()
        call = partial(ops.relay, target, steps, options.get("inter", pair), "", options.get("chunk", 10))
        kind, message = raised(call)
        if kind != "ValueError" or text not in message or not torch.equal(target, before):
            problems.append(f"{text}: {kind} {message}")
    problems += check("afterwards", rank, [ring_step(rank, 2, 0, 0, SIZE)], pair, "", 999, [(0, SIZE)] * (rank == 0), 9)
    return problems


def test_wrong_arguments() -> None:
    all_fine(ranks.run(2, wrong_arguments))
