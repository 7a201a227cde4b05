"""The loaders that epload is compared with, each as one function: (model, checkpoint, rank) -> None, from meta or reloading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

Loader = Callable[[nn.Module, Path, int], None]


def _materialise(model: nn.Module) -> None:
    if next(model.parameters()).is_meta:
        model.to_empty(device="cpu")


def per_parameter(model: nn.Module, checkpoint: Path, rank: int) -> None:
    """One broadcast of the full tensor and one distribute_tensor for each parameter."""
    _materialise(model)
    source = safe_open(checkpoint, "pt") if rank == 0 else None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            full = source.get_tensor(name) if source else torch.empty(parameter.shape, dtype=parameter.dtype)
            dist.broadcast(full, 0)
            parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements))


def torch_state_dict(model: nn.Module, checkpoint: Path, rank: int) -> None:
    """torch.distributed.checkpoint.state_dict.set_model_state_dict with broadcast_from_rank0."""
    _materialise(model)
    full = load_file(checkpoint) if rank == 0 else {}
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def safe_open_slices(model: nn.Module, checkpoint: Path, rank: int) -> None:
    """Every rank reads its own slice of each parameter, for parameters sharded on dim 0 as FSDP2 does."""
    _materialise(model)
    with torch.no_grad(), safe_open(checkpoint, "pt") as source:
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            local = parameter.to_local()
            each = -(-parameter.shape[0] // parameter.device_mesh.size())
            begin = parameter.device_mesh.get_local_rank() * each
            if local.numel():
                local.copy_(source.get_slice(name)[begin : begin + local.shape[0]])


PEERS: dict[str, Loader] = {
    "per_parameter": per_parameter,
    "torch_set_model_state_dict": torch_state_dict,
    "safe_open_slices": safe_open_slices,
}
