"""``torch.distributed.checkpoint.state_dict.set_model_state_dict`` for full state dicts."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.checkpoint import state_dict as original
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.nn.modules.module import _IncompatibleKeys

from epload.compat.full_state import load_full

_original = original.set_model_state_dict


def set_model_state_dict(
    model: nn.Module, model_state_dict: dict[str, Any], *, options: StateDictOptions | None = None
) -> _IncompatibleKeys:
    """As torch's. Rank 0's dict is what is loaded, with ``broadcast_from_rank0`` or without.

    A state dict that is not full (``full_state_dict`` not set: DTensors to be copied as they are) goes to torch's own.
    Parameters stay where they are, so ``cpu_offload`` changes nothing. Non-persistent buffers that are on meta on some ranks
    are filled from another, where torch's function leaves them there; it is only left to the caller what no rank has.

    Raises:
        ModelMismatch: a key is missing or unexpected (not with ``strict=False``) or of another shape; on every rank, nothing
            has moved.
    """
    if options is None or not options.full_state_dict:
        return _original(model, model_state_dict, options=options)
    report = load_full(model, model_state_dict, strict=options.strict or "shapes", keep_meta=True)
    return _IncompatibleKeys(report.missing_keys, report.unexpected_keys)
