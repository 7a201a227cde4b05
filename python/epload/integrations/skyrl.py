"""SkyRL's ``fsdp2_load_full_state_dict``."""

from __future__ import annotations

from typing import Any

from torch import nn

from epload.integrations import verl


def fsdp2_load_full_state_dict(model: nn.Module, full_sd: dict[str, Any], cpu_offload: Any = None) -> nn.Module:
    """Drop-in for SkyRL's function. Like :func:`epload.integrations.verl.fsdp2_load_full_state_dict`, but returns the model."""
    verl.fsdp2_load_full_state_dict(model, full_sd, cpu_offload=cpu_offload)
    return model
