"""Small models that two jobs sync, with values that tell tensor, element and version."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from support import checks
from support.small_model import local_of

SHAPES = {
    "embed": (37, 16), "norm": (16,), "experts": (5, 12, 16), "head": (16, 41), "scale": (), "empty": (0, 4), "big": (600, 131),
}  # fmt: skip
LAYOUTS = ("plain", "fsdp", "tp0", "tp1")


def values(name: str, version: int, period: int = 1) -> Tensor:
    """``period``: an element changes in every so many versions."""
    shape = SHAPES[name]
    number = list(SHAPES).index(name)
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    changes = (version + index % period) // period
    return (index + 1000.0 * number + 0.125 * changes).float()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))


def build(layout: str, world: int, dtype: torch.dtype = torch.float32, where: str = "cpu") -> nn.Module:
    """A model of zeros. ``layout``: one of ``LAYOUTS``, over ``world`` ranks."""
    model = Plain().to(dtype).to(where)
    if layout == "plain":
        return model
    mesh = init_device_mesh(torch.device(where).type, (world,))
    if layout == "fsdp":
        return fully_shard(model, mesh=mesh, ignored_params={model.scale})
    dim = LAYOUTS.index(layout) - LAYOUTS.index("tp0")
    for name, parameter in list(model.named_parameters()):
        placement = Shard(dim) if parameter.dim() > dim else Replicate()
        sharded = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        setattr(model, name, nn.Parameter(sharded))
    return model


def write(model: nn.Module, version: int, period: int = 1) -> None:
    """Gives each element its value of a version."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = values(name, version, period).to(parameter.dtype)
            checks.local_of(parameter).copy_(local_of(full, parameter))


def check(model: nn.Module, version: int, source: torch.dtype = torch.float32, period: int = 1) -> None:
    """``source``: dtype of the sender's model."""
    for name, parameter in model.named_parameters():
        expected = values(name, version, period).to(source).to(parameter.dtype)
        found = checks.local_of(parameter.detach())
        assert torch.equal(found.cpu(), local_of(expected, parameter)), name


INTEGER_OF = {2: torch.int16, 4: torch.int32}
DENSITY = {1: 1.0, 2: 0.02, 3: 0.0, 4: 0.3, 5: 0.001, 6: 0.9, 7: 0.02}
"""The share of elements that each version changes."""


@cache
def tensor_of(name: str, version: int, dtype: torch.dtype) -> Tensor:
    """Random bits, NaN of every payload and -0.0 among them; of which a version changes some."""
    generator = torch.Generator().manual_seed(1000 * version + list(SHAPES).index(name))
    bits = INTEGER_OF[dtype.itemsize]
    limits = torch.iinfo(bits)
    count = torch.Size(SHAPES[name]).numel()
    fresh = torch.randint(limits.min, limits.max, (count,), dtype=bits, generator=generator)
    if version > 1:
        change = torch.rand(count, generator=generator) < DENSITY[version]
        fresh = torch.where(change, fresh, tensor_of(name, version - 1, dtype).view(bits).flatten())
    return fresh.view(dtype).reshape(SHAPES[name])


def write_bits(model: nn.Module, version: int) -> None:
    for name, parameter in model.named_parameters():
        local = checks.local_of(parameter.detach())
        local.copy_(local_of(tensor_of(name, version, local.dtype), parameter))


def check_bits(found: Any, version: int, source: torch.dtype | None = None) -> None:
    """``source``: the sender's dtype, of which casts keep no bits of NaN; that of what was found, a model or full tensors by
    name, if None."""
    for name, tensor in found.items() if isinstance(found, dict) else found.named_parameters():
        local = checks.local_of(tensor.detach()).cpu()
        bits = INTEGER_OF[local.dtype.itemsize]
        expected = local_of(tensor_of(name, version, source or local.dtype).to(local.dtype), tensor)
        if source not in (None, local.dtype):
            local, expected = (torch.where(each.isnan(), torch.nan, each) for each in (local, expected))
        assert torch.equal(local.view(bits), expected.view(bits)), name
