"""A full state dict on one rank into a sharded model: what accelerate's, verl's and SkyRL's functions have in common."""

from __future__ import annotations

from typing import Any

from torch import nn

from epload.loader import load
from epload.mapping import Mapping


def load_full(model: nn.Module, full_state: dict[str, Any] | None, reads: bool) -> None:
    """Fills the model from the reading rank's dict, which must be rank 0's. What the model has no place for is left out.

    Raises:
        ModelMismatch: the dict lacks a tensor of the model; on every rank, nothing has moved.
    """
    wanted = None
    if reads:
        names = model.state_dict().keys()
        wanted = {name: tensor for name, tensor in (full_state or {}).items() if name in names}
    load(model, wanted, mapping=Mapping.identity(), progress=False)
