"""SkyRL's ``fsdp2_load_full_state_dict``."""

from __future__ import annotations

from typing import Any

from torch import nn

from epload.compat import verl


def fsdp2_load_full_state_dict(model: nn.Module, full_sd: dict[str, Any], cpu_offload: Any = None) -> None:
    """As SkyRL's, which is verl's without the mesh."""
    verl.fsdp2_load_full_state_dict(model, full_sd, cpu_offload=cpu_offload)
