"""Small models that two jobs sync, with values that tell tensor, element and version."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

SHAPES = {
    "embed": (37, 16), "norm": (16,), "experts": (5, 12, 16), "head": (16, 41), "scale": (), "empty": (0, 4), "big": (600, 131),
}  # fmt: skip


def values(name: str, version: int) -> Tensor:
    shape = SHAPES[name]
    number = list(SHAPES).index(name)
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64).reshape(shape) + 1000.0 * number + 0.125 * version).float()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))


def build(layout: str, world: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = Plain().to(dtype)
    if layout == "fsdp":
        model.scale = nn.Parameter(model.scale.detach().reshape(1)[0:1].reshape(()).clone(), requires_grad=True)
        fully_shard(model, ignored_params={model.scale})
    elif layout in ("tp0", "tp1"):
        mesh = init_device_mesh("cpu", (world,))
        for name, parameter in list(model.named_parameters()):
            dim = 0 if layout == "tp0" else 1
            placement = Shard(dim) if parameter.dim() > dim else Replicate()
            sharded = distribute_tensor(parameter.detach(), mesh, [placement])
            setattr(model, name, nn.Parameter(sharded))
    return model


def write(model: nn.Module, version: int) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = values(name, version).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                full = distribute_tensor(full, parameter.device_mesh, parameter.placements).to_local()
                parameter.to_local().copy_(full)
            else:
                parameter.copy_(full)


def check(model: nn.Module, version: int, source: torch.dtype = torch.float32) -> None:
    for name, parameter in model.named_parameters():
        found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(found.detach(), values(name, version).to(source).to(parameter.dtype)), name
