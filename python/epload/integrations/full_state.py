"""Loads a full state dict from rank 0 into a sharded model, for the drop-ins of torch, accelerate, verl and SkyRL."""

from __future__ import annotations

from collections.abc import Set
from functools import partial
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import nn

from epload.errors import ModelMismatch
from epload.loading.loader import HierarchicalLoader
from epload.mapping.mapping import Mapping
from epload.mapping.wrappers import wrapper_aliases
from epload.model.state_dict import describe_custom_loading
from epload.report import LoadReport


def load_full(model: nn.Module, full_state: dict[str, Any], *, strict: bool = True, keep_meta: bool) -> LoadReport:
    """Fills the model from rank 0's state dict. Keys are the model's names, with or without prefixes of torch.compile and DDP.

    Args:
        keep_meta: leave a tensor on meta if it is on meta, not in the dict and not computed by the model. Otherwise that is an
            error.

    Raises:
        ModelMismatch: the dict does not fit the model, or a module has custom loading code. On every rank, and nothing has
            moved.
    """
    if custom := find_custom_loading(model):
        raise ModelMismatch(
            f"{custom}, which does not run when parameters are filled in place; call load_state_dict, or the framework's own "
            "function, for this model"
        )
    tensors = dict(chain(model.named_parameters(), model.named_buffers()))
    on_meta = {name for name, tensor in tensors.items() if tensor.is_meta}
    reads = not dist.is_initialized() or dist.get_rank() == 0
    with HierarchicalLoader(progress=False) as loader:
        loader._as_pretrained = False
        return loader.load(
            model,
            full_state if reads else None,
            mapping=Mapping(aliases=wrapper_aliases(model, tensors)),
            strict=strict,
            init_missing=partial(_move_back_to_meta, on_meta) if keep_meta else None,
        )


def find_custom_loading(model: nn.Module) -> str:
    """Describes the first module that has custom loading code (hooks or methods). Empty if none has any."""
    return next(filter(None, (describe_custom_loading(path, module) for path, module in model.named_modules())), "")


def _move_back_to_meta(on_meta: Set[str], module: nn.Module, path: str, names: tuple[str, ...]) -> None:
    """An ``init_missing`` hook that moves tensors back to meta if they were ``on_meta``."""
    for name in names:
        if (f"{path}.{name}" if path else name) not in on_meta:
            continue
        owner: Any = module
        while name not in owner._buffers and name not in owner._parameters:
            owner = owner._checkpoint_wrapped_module  # a wrapper that does not show in names
        if name in owner._buffers:
            owner._buffers[name] = owner.get_buffer(name).to("meta")
        else:
            parameter = owner.get_parameter(name)
            owner._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
