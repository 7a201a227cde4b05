"""``torch.distributed.checkpoint.state_dict.set_model_state_dict`` for full state dicts."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as original
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.nn.modules.module import _IncompatibleKeys

from epload.loader import load
from epload.mapping import Mapping

_original = original.set_model_state_dict


def set_model_state_dict(
    model: nn.Module, model_state_dict: dict[str, Any], *, options: StateDictOptions | None = None
) -> _IncompatibleKeys:
    """As torch's. Rank 0's dict is what is loaded, with ``broadcast_from_rank0`` or without.

    A state dict that is not full (``full_state_dict`` not set: DTensors to be copied as they are) goes to torch's own.
    Parameters stay where they are, so ``cpu_offload`` changes nothing.
    """
    if options is None or not options.full_state_dict:
        return _original(model, model_state_dict, options=options)
    reads = not dist.is_initialized() or dist.get_rank() == 0
    report = load(
        model, model_state_dict if reads else None, mapping=Mapping.identity(), strict=options.strict, progress=False
    )
    return _IncompatibleKeys(report.missing_keys, report.unexpected_keys)
