"""Checkpoints that torch.distributed.checkpoint saves, of models in several layouts, and the models that they are loaded into."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from support.checks import full_values
from support.layout_cases import MIXED_BUFFERS, UNEVEN
from support.models import Block, Experts, Mlp, Stack, fsdp, mesh, nothing, place, tp_then_fsdp

BF16 = torch.bfloat16


class Moe(nn.Module):
    """Experts on one axis, attention in tensor parallelism on the same ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Mlp(12, 8, 16)
        self.moe = Experts(6, {"w": (5, 3), "b": ((7,), BF16)})


def _sizes(world: int) -> tuple[int, int]:
    return (2, world // 2) if world % 2 == 0 else (1, world)


def _hsdp(model: nn.Module) -> None:
    outer, inner = _sizes(dist.get_world_size())
    fsdp(model, [("replicate", outer), ("shard", inner)])


def _fsdp(model: nn.Module) -> None:
    fsdp(model, [("fsdp", dist.get_world_size())])


def _tp_by_fsdp(model: nn.Module) -> None:
    outer, inner = _sizes(dist.get_world_size())
    tp_then_fsdp(model, [("dp", outer), ("tp", inner)])


def _moe(model: nn.Module) -> None:
    """TP x FSDP, and experts by their first dim, each of which FSDP cuts."""
    assert isinstance(model, Moe)
    outer, inner = _sizes(dist.get_world_size())
    _tp_by_fsdp(model.attention)
    on = mesh(("dp", outer), ("tp", inner))
    place(model.moe.experts, on["tp"], [Shard(0)])
    fully_shard(model.moe, mesh=on["dp"])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], None]]] = {
    "fsdp": (partial(Stack, [*UNEVEN, {"w": ((6, 5), BF16)}], {"w": (5,)}, MIXED_BUFFERS), _fsdp),
    "hsdp": (partial(Stack, UNEVEN, {"w": (5,)}), _hsdp),
    "tp x fsdp": (partial(Mlp, 7, 5, 6), _tp_by_fsdp),
    "moe": (Moe, _moe),
    "plain": (partial(Block, {"w": (3, 4), "zero_d": (), "none": (0, 3)}), nothing),
}
FORMATS = ("torch", "safetensors", "shards")
"""How the tensors are stored: by torch.save, in safetensors files with ``.metadata``, in a safetensors file of each rank."""


def folder_of(folder: Path, model: str, form: str) -> Path:
    return folder / model.replace(" ", "-") / form


def sharded(name: str, values: bool, on: str = "cpu", salt: int = 0) -> nn.Module:
    """A model of this job, with its values or on meta."""
    make, parallelize = MODELS[name]
    with torch.device(on):
        model = make()
    if values:
        full = full_values(model, salt)
        with torch.no_grad():
            for key, tensor in model.state_dict(keep_vars=True).items():
                tensor.copy_(full[key])
    parallelize(model)
    return model


def save_all(rank: int, folder: Path) -> None:
    """Each model in each format. Beside the model there is what a job saves with it."""
    for name in MODELS:
        state = sharded(name, values=True).state_dict()
        path = folder_of(folder, name, "torch")
        nested = {"model": state, "optim": {"step": 7, "model": torch.ones(3)}, "epoch": 3}
        dcp.save(nested, storage_writer=FileSystemWriter(path, single_file_per_rank=rank % 2 == 0))
        tensors = {key: value for key, value in state.items() if value.numel()}  # DCP cannot save empty ones so
        path = folder_of(folder, name, "safetensors")
        writer = FileSystemWriter(path, serialization_format=SerializationFormat.SAFETENSORS)
        dcp.save({"app": {"model": tensors}}, storage_writer=writer)
        path = folder_of(folder, name, "shards")
        dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(path), save_distributed=True))
