"""A full state dict on rank 0 into a sharded model: what torch's, accelerate's, verl's and SkyRL's functions have in common."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from epload.broadcast import coalesced_bcast
from epload.loader import load
from epload.mapping import Mapping, compiled
from epload.preparation import Strict
from epload.report import LoadReport


def load_full(model: nn.Module, full_state: dict[str, Any], *, strict: Strict = True, keep_meta: bool) -> LoadReport:
    """Fills the model from rank 0's dict. Names are the model's own, with or without those of torch.compile's wrappers.

    Args:
        keep_meta: non-persistent buffers that are on meta on all ranks, and that the model does not compute itself, stay
            there, for the caller to fill; else they are an error.

    Raises:
        ModelMismatch: the dict and the model do not fit; on every rank, nothing has moved.
    """
    names = [name for name, _ in chain(model.named_parameters(), model.named_buffers())]
    reads = not dist.is_initialized() or dist.get_rank() == 0
    return load(
        model,
        full_state if reads else None,
        mapping=Mapping(aliases=compiled(names)),
        strict=strict,
        init_missing=_back_to_meta if keep_meta else None,
        progress=False,
    )


def _back_to_meta(module: nn.Module, path: str, names: tuple[str, ...]) -> None:
    for name in names:
        if name in module._non_persistent_buffers_set:
            module._buffers[name] = module.get_buffer(name).to("meta")


def share_buffers(model: nn.Module) -> None:
    """All ranks get rank 0's non-persistent buffers, in one broadcast.

    Raises:
        ManifestMismatch: other names, shapes or dtypes on another rank.
    """
    saved = model.state_dict().keys()
    unsaved = [
        buffer for name, buffer in model.named_buffers() if name not in saved and not isinstance(buffer, DTensor)
    ]
    coalesced_bcast(unsaved, src=0)
