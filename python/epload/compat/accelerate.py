"""accelerate's ``fsdp2_load_full_state_dict``."""

from __future__ import annotations

from typing import Any

from torch import nn

from epload.compat.full_state import load_full


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False
) -> nn.Module:
    """As accelerate's: loads the main process's ``full_sd``, which is rank 0's, and returns the model.

    What the model has no place for is not looked at. Plain parameters and buffers are loaded like any other
    (accelerate#3898). Non-persistent buffers that are on meta everywhere are left to the caller, which is how accelerate
    prepares a model. Parameters stay where FSDP's offload policy has them, so ``cpu_offload`` changes nothing.

    Raises:
        ModelMismatch: a key of the model is missing or of another shape; on every rank, nothing has moved.
    """
    wanted = {}
    if accelerator.is_main_process:
        names = model.state_dict().keys()
        wanted = {name: tensor for name, tensor in full_sd.items() if name in names}
    load_full(model, wanted, keep_meta=True)
    return model
