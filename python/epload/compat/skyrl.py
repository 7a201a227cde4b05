"""SkyRL's ``fsdp2_load_full_state_dict``."""

from __future__ import annotations

from typing import Any

from torch import nn

from epload.compat import verl


def fsdp2_load_full_state_dict(model: nn.Module, full_sd: dict[str, Any], cpu_offload: Any = None) -> nn.Module:
    """As SkyRL's, which is verl's without the mesh, and returns the model."""
    verl.fsdp2_load_full_state_dict(model, full_sd, cpu_offload=cpu_offload)
    return model
