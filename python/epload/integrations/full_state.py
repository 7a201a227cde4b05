"""Loads a full state dict from rank 0 into a sharded model, for the drop-ins of torch, accelerate, verl and SkyRL."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import nn

from epload.errors import ModelMismatch
from epload.loading.loader import HierarchicalLoader
from epload.mapping import mapping
from epload.mapping.wrappers import wrapper_aliases
from epload.model.state_dict import describe_custom_loading
from epload.report import LoadReport

_Holders = list[tuple[dict[str, Any], str]]
"""The dicts of modules that hold a tensor, each with its name there."""


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
    tensors = dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)))
    holders: dict[int, _Holders] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for leaf, tensor in held.items():
                holders.setdefault(id(tensor), []).append((held, leaf))
    on_meta = {name: holders[id(tensor)] for name, tensor in tensors.items() if tensor.is_meta}
    reads = not dist.is_initialized() or dist.get_rank() == 0
    with HierarchicalLoader(progress=False) as loader:
        loader._as_pretrained = False
        return loader.load(
            model,
            full_state if reads else None,
            mapping=mapping.Mapping(aliases=wrapper_aliases(model, tensors)),
            strict=strict,
            init_missing=partial(_move_back_to_meta, on_meta) if keep_meta else None,
        )


def find_custom_loading(model: nn.Module) -> str:
    """Describes the first module that has custom loading code (hooks or methods). Empty if none has any."""
    return next(filter(None, (describe_custom_loading(path, module) for path, module in model.named_modules())), "")


def _move_back_to_meta(on_meta: Mapping[str, _Holders], module: nn.Module, path: str, names: tuple[str, ...]) -> None:
    """An ``init_missing`` hook that moves tensors back to meta if they were ``on_meta``."""
    for name in names:
        meta = None
        for held, leaf in on_meta.get(f"{path}.{name}" if path else name, ()):
            if meta is None:
                tensor = held[leaf]
                meta = tensor.detach().to("meta")
                if isinstance(tensor, nn.Parameter):
                    meta = nn.Parameter(meta, tensor.requires_grad)
            held[leaf] = meta
