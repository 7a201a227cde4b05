"""Small models of every kind of parameter and buffer, and ways to parallelize them. Plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

Shape = tuple[int, ...]
Spec = dict[str, Shape | tuple[Shape, torch.dtype]]
"""Shapes by name; float32 where no dtype is given."""


class Block(nn.Module):
    """Parameters and buffers of given shapes."""

    def __init__(self, parameters: Spec, buffers: Spec | None = None) -> None:
        super().__init__()
        for name, tensor in empty(parameters):
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
        for name, tensor in empty(buffers or {}):
            self.register_buffer(name, tensor)


def empty(spec: Spec) -> Iterator[tuple[str, Tensor]]:
    for name, entry in spec.items():
        if entry and isinstance(entry[-1], torch.dtype):
            shape, dtype = entry
        else:
            shape, dtype = entry, torch.float32
        yield name, torch.empty(shape, dtype=dtype)


class Stack(nn.Module):
    """Layers below a root with parameters of its own, as fully_shard is usually applied."""

    def __init__(self, layers: Sequence[Spec], root: Spec | None = None, buffers: Spec | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(layer, buffers) for layer in layers)
        self.top = Block(root or {})


class Tied(nn.Module):
    """An embedding whose weight is also the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.inner = nn.Linear(3, 5)
        self.head = nn.Linear(3, 7)
        self.head.weight = self.embed.weight


class Mlp(nn.Module):
    """A model for tensor parallelism; sizes from the case, so that they may be uneven."""

    def __init__(self, vocabulary: int, hidden: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, width)
        self.down = nn.Linear(width, hidden)


class Experts(nn.Module):
    """A layer with a stack of experts and a dense part."""

    def __init__(self, experts: int, dense: Spec) -> None:
        super().__init__()
        self.experts = Block({"gate_up": (experts, 4, 6), "down": (experts, 6, 2)})
        self.dense = Block(dense, {"count": ((), torch.int64)})


_device = torch.device("cpu")
"""The models' device, in this rank's process."""


def device() -> torch.device:
    return _device


def use_device(name: str) -> None:
    global _device
    _device = torch.device(name)


@cache
def mesh(*axes: tuple[str, int]) -> DeviceMesh:
    """Returns a mesh of the models' device, which is to be set before."""
    return init_device_mesh(_device.type, tuple(n for _, n in axes), mesh_dim_names=tuple(name for name, _ in axes))


def fsdp(model: nn.Module, axes: Sequence[tuple[str, int]]) -> None:
    """Two axes are HSDP."""
    on = mesh(*axes)
    for layer in getattr(model, "layers", ()):
        fully_shard(layer, mesh=on)
    fully_shard(model, mesh=on)


def tp(model: nn.Module, on: DeviceMesh) -> None:
    plan = {"embed": RowwiseParallel(), "norm": SequenceParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, on, plan)


def tp_then_fsdp(model: nn.Module, axes: Sequence[tuple[str, int]]) -> None:
    """The last axis is TP's; one before it is FSDP's, two are HSDP's."""
    on = mesh(*axes)
    tp(model, on["tp"])
    fully_shard(model, mesh=on[tuple(name for name, _ in axes[:-1])])


def place(block: nn.Module, on: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Makes every parameter of a block a DTensor."""
    for name, parameter in list(block.named_parameters(recurse=False)):
        made = distribute_tensor(parameter.detach(), on, placements, src_data_rank=None)
        block.register_parameter(name, nn.Parameter(made, requires_grad=parameter.requires_grad))


def placed(model: nn.Module, axes: Sequence[tuple[str, int]], placements: Sequence[Placement]) -> None:
    place(model, mesh(*axes), placements)


def nothing(model: nn.Module) -> None:
    """Plain tensors: the whole model on every rank."""


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


class Rotary(nn.Module):
    """A bf16 weight, and an fp32 buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(6, 4, dtype=torch.bfloat16))
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(5) / 5), persistent=False)
