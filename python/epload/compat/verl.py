"""verl's ``fsdp2_load_full_state_dict``."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from epload.compat.full_state import load_full, share_buffers


def fsdp2_load_full_state_dict(
    model: nn.Module, full_state: dict[str, Any], device_mesh: DeviceMesh | None = None, cpu_offload: Any = None
) -> None:
    """As verl's: loads rank 0's ``full_state`` into a model that is on meta on the other ranks.

    Buffers that no state dict holds are rank 0's on all ranks, whether the others had them or not. The model knows its
    meshes and where its parameters lie, so the last two arguments change nothing.

    Raises:
        ModelMismatch: a key is missing, unexpected or of another shape; on every rank, nothing has moved.
    """
    load_full(model, full_state, keep_meta=False)
    share_buffers(model)
