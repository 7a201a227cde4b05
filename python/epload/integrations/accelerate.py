"""accelerate's ``fsdp2_load_full_state_dict``."""

from __future__ import annotations

from typing import Any

from torch import nn

from epload.integrations.full_state import load_full


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False
) -> nn.Module:
    """Drop-in for accelerate's function: loads the main process's state dict on all ranks. Collective.

    Keys that the model lacks are ignored. Plain parameters and buffers are loaded like sharded ones (accelerate#3898).
    Non-persistent buffers that are on meta on every rank stay there, because accelerate fills them afterwards. Parameters stay
    where FSDP's offload policy placed them, so ``cpu_offload`` is ignored.

    Args:
        accelerator: the Accelerator, whose main process is rank 0.
        model: the model to fill in place.
        full_sd: full tensors by name. Only the main process's is read.

    Returns:
        The model.

    Raises:
        ModelMismatch: a key of the model is missing or has another shape. On every rank, and nothing has moved.
    """
    state = {}
    if accelerator.is_main_process:
        names = model.state_dict().keys()
        state = {name: tensor for name, tensor in full_sd.items() if name in names}
    load_full(model, state, keep_meta=True)
    return model
