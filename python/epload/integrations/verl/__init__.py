"""verl's ``fsdp2_load_full_state_dict``."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from epload.broadcast import coalesced_bcast
from epload.integrations.full_state import load_full


def fsdp2_load_full_state_dict(
    model: nn.Module, full_state: dict[str, Any], device_mesh: DeviceMesh | None = None, cpu_offload: Any = None
) -> None:
    """Drop-in for verl's function: loads rank 0's state dict into a model that may be on meta on other ranks. Collective.

    Non-persistent buffers are then broadcast from rank 0. ``device_mesh`` and ``cpu_offload`` are ignored, because the model's
    parameters have their meshes and devices.

    Args:
        model: the model to fill in place.
        full_state: full tensors by name. Only rank 0's is read.

    Raises:
        ModelMismatch: a key is missing, unexpected or has another shape. On every rank, and nothing has moved.
        ManifestMismatch: the ranks' non-persistent buffers differ in shape or dtype.
    """
    load_full(model, full_state, keep_meta=False)
    buffers = {
        id(buffer): buffer
        for module in model.modules()
        for name, buffer in sorted(module._buffers.items())  # made in another order on each rank where a class goes by a set
        if buffer is not None and name in module._non_persistent_buffers_set and not isinstance(buffer, DTensor)
    }
    coalesced_bcast(list(buffers.values()), src=0)
