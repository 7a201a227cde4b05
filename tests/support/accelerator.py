"""Models and checks for loads into the fake accelerator."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from support import fakedev, small_model
from support.small_model import State

DEVICE = f"{fakedev.NAME}:0"
SEMANTICS = pytest.mark.parametrize("semantics", fakedev.SEMANTICS)
NODES = {1: [[0]], 2: [[0], [1]], 3: [[0, 1], [2]], 4: [[0, 1], [2, 3]]}
WAYS = (
    ("one", "two_level"),
    ("one", "striped"),
    ("per_node", "two_level"),
    ("partitioned", "two_level"),
    ("partitioned", "striped"),
    ("every", "two_level"),
)
meta_net = partial(small_model.meta_net, where=DEVICE)
wrong = partial(small_model.wrong, where=DEVICE)


def for_readers(state: State, readers: str) -> State | None:
    return state if readers != "one" or dist.get_rank() == 0 else None


class Odd(nn.Module):
    """Ties, 0-d, empty, uneven, larger than a bucket, computed buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 5)])
        self.head, self.tail = nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)
        self.head.weight = self.tail.weight
        self.large = nn.Parameter(torch.empty(37, 53))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("scalar", torch.zeros(()))
        self.register_buffer("angles", torch.arange(4.0), persistent=False)


def odd_state(number: int) -> State:
    shapes = {"layers.0.weight": (5, 7), "layers.0.bias": (5,), "large": (37, 53), "empty": (0, 3), "scalar": ()}
    shapes["tail.weight"] = (5, 3)
    return {
        name: torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 3000 * i + 20_000 * number
        for i, (name, shape) in enumerate(shapes.items())
    }


def aborted_into(model: nn.Module) -> list[str]:
    """Names that hold a part of the error's text."""
    locals_ = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}
    return [name for name, local in locals_.items() if b"on fire" in bytes(local.cpu().flatten().view(torch.uint8))]


class ExternalStream:
    """As torch_npu's class of that name: a stream that it did not make."""

    device = SimpleNamespace(type="npu")
