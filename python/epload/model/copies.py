"""Copies of weights, on other devices and in other dtypes, which torch and frameworks make of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from epload.core import accelerator
from epload.model.megatron import MegatronChunks


def forget_casts(model: nn.Module) -> None:
    """Makes the next forward pass cast weights anew: ``torch.autocast`` keeps what it has cast until its region ends, torchao the
    scale that a training step has computed for the next pass, and Megatron fp8 weights for the microbatches of a step."""
    torch.clear_autocast_cache()
    for parameter in model.parameters() if "torchao" in sys.modules else ():
        local: Any = getattr(parameter, "_local_tensor", parameter)
        if getattr(local, "_precomputed_scale", None) is not None:
            local._precomputed_scale = None
    chunks: Iterable[Any] = model if isinstance(model, MegatronChunks) else ()
    for chunk in chunks:
        chunk.set_is_first_microbatch()


def wait_for_copies(tensors: Iterable[Tensor]) -> None:
    """Waits until the device has read the parameters that FSDP offloads to the CPU: its copies are asynchronous."""
    if accelerator.is_in_use() and any(
        isinstance(tensor, DTensor) and tensor.is_cpu and tensor.device_mesh.device_type != "cpu" for tensor in tensors
    ):
        torch.accelerator.synchronize()
