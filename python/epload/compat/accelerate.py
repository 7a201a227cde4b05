"""accelerate's ``fsdp2_load_full_state_dict``."""

from __future__ import annotations

from typing import Any

from torch import nn

from epload.compat.full_state import load_full


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False
) -> nn.Module:
    """As accelerate's: loads the main process's ``full_sd`` and returns the model.

    Plain parameters and buffers are loaded like any other (accelerate#3898). Parameters stay where FSDP's offload policy has
    them, so ``cpu_offload`` changes nothing.
    """
    load_full(model, full_sd, bool(accelerator.is_main_process))
    return model
