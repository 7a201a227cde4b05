"""Models and checks for loads into the fake accelerator, runs of one function on CPU and there, and the GPU of tests on one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support import fakedev, ranks, small_model
from support.fakedev import build
from support.small_model import State

DEVICE = f"{fakedev.NAME}:0"
CUDA = "cuda:0"
SEMANTICS = pytest.mark.parametrize("semantics", fakedev.SEMANTICS)
NODES = {1: [[0]], 2: [[0], [1]], 3: [[0, 1], [2]], 4: [[0, 1], [2, 3]]}
WAYS = (
    ("one", "two_level"), ("one", "striped"), ("per_node", "two_level"), ("partitioned", "two_level"),
    ("partitioned", "striped"), ("every", "two_level"),
)  # fmt: skip
meta_net = partial(small_model.meta_net, where=DEVICE)
wrong = partial(small_model.wrong, where=DEVICE)


def run_on(place: str, world: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Calls ``function(rank, device, *args)`` on ranks whose device is the CPU, or with a semantics the fake accelerator."""
    if place == "cpu":
        return ranks.run(world, function, "cpu", *args, **options)
    build.library()  # outside the time limit of the ranks
    return ranks.run(world, function, DEVICE, *args, setup=partial(fakedev.setup, place), **options)


def for_readers(state: State, readers: str) -> State | None:
    return state if readers != "one" or dist.get_rank() == 0 else None


class ExternalStream:
    """Stands for torch_npu's class of that name: a stream that it did not make."""

    device = SimpleNamespace(type="npu")


def gloo() -> str:
    return "cpu:gloo,cuda:gloo"


def nccl() -> str:
    torch.cuda.set_device(0)
    return "cpu:gloo,cuda:nccl"
