"""verl's ``fsdp2_load_full_state_dict``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from epload.compat.full_state import load_full


def fsdp2_load_full_state_dict(
    model: nn.Module, full_state: dict[str, Any], device_mesh: DeviceMesh | None = None, cpu_offload: Any = None
) -> None:
    """As verl's: loads rank 0's ``full_state`` into a model that is on meta on the other ranks.

    Buffers that no state dict holds come from rank 0. The model knows its meshes and where its parameters lie, so the last
    two arguments change nothing.
    """
    load_full(model, full_state, dist.get_rank() == 0)
