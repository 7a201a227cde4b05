"""A full state dict on rank 0 into a sharded model: what torch's, accelerate's, verl's and SkyRL's functions have in common."""

from __future__ import annotations

from collections.abc import Mapping as MappingType
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from epload.broadcast import coalesced_bcast
from epload.errors import ModelMismatch
from epload.loader import load
from epload.mapping.mapping import Mapping
from epload.mapping.wrappers import wrapper_aliases
from epload.model.state_entries import loads_itself
from epload.report import LoadReport


def load_full(model: nn.Module, full_state: dict[str, Any], *, strict: bool = True, keep_meta: bool) -> LoadReport:
    """Fills the model from rank 0's dict. Names are the model's own, with or without those of torch.compile and DDP.

    Args:
        keep_meta: what is on meta, and neither in the dict nor computed by the model itself, stays there for the caller to
            fill; else it is an error.

    Raises:
        ModelMismatch: the dict and the model do not fit, or a module wants to load its part itself; on every rank, nothing
            has moved.
    """
    if own := loading_of_its_own(model):
        raise ModelMismatch(
            f"{own}, which does not run when parameters are filled in place; call load_state_dict, or the framework's own "
            "function, for this model"
        )
    tensors = dict(chain(model.named_parameters(), model.named_buffers()))
    reads = not dist.is_initialized() or dist.get_rank() == 0
    return load(
        model,
        full_state if reads else None,
        mapping=Mapping(aliases=wrapper_aliases(model, tensors)),
        strict=strict,
        init_missing=_BackToMeta(tensors) if keep_meta else None,
        progress=False,
    )


def loading_of_its_own(model: nn.Module) -> str:
    """Says which module has loading of its own; empty if none has."""
    return next(filter(None, (loads_itself(path, module) for path, module in model.named_modules())), "")


class _BackToMeta:
    """The hook for tensors that nothing fills: puts them back where they were."""

    def __init__(self, tensors: MappingType[str, Tensor]) -> None:
        self._on_meta = {name for name, tensor in tensors.items() if tensor.is_meta}

    def __call__(self, module: nn.Module, path: str, names: tuple[str, ...]) -> None:
        for name in names:
            if (f"{path}.{name}" if path else name) not in self._on_meta:
                continue
            owner: Any = module
            while name not in owner._buffers and name not in owner._parameters:
                owner = owner._checkpoint_wrapped_module  # a wrapper that hides in names
            if name in owner._buffers:
                owner._buffers[name] = owner.get_buffer(name).to("meta")
            else:
                parameter = owner.get_parameter(name)
                owner._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def share_buffers(model: nn.Module) -> None:
    """All ranks get rank 0's non-persistent buffers, in one broadcast.

    Raises:
        ManifestMismatch: other names, shapes or dtypes on another rank.
    """
    unsaved = {
        id(buffer): buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set and not isinstance(buffer, DTensor)
    }
    coalesced_bcast(list(unsaved.values()), src=0)
