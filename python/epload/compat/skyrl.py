"""SkyRL's ``fsdp2_load_full_state_dict``."""

from __future__ import annotations

from typing import Any

from torch import nn

from epload.compat import verl


def fsdp2_load_full_state_dict(model: nn.Module, full_sd: dict[str, Any], cpu_offload: Any = None) -> nn.Module:
    """Drop-in for SkyRL's function, which is verl's without the mesh. Collective.

    Args:
        model: the model to fill in place.
        full_sd: full tensors by name. Only rank 0's is read.

    Returns:
        The model.

    Raises:
        ModelMismatch: as :func:`epload.compat.verl.fsdp2_load_full_state_dict`.
    """
    verl.fsdp2_load_full_state_dict(model, full_sd, cpu_offload=cpu_offload)
    return model
