"""Ties the output embedding to the input embedding if the model's config asks for it, as VeOmni does."""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from epload.model.modules import Modules

_log = logging.getLogger(__name__)


def find_tied_embeddings(model: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """Returns the input and output embeddings if the config ties them, else None.

    The config ties them if ``tie_word_embeddings`` is set on it or on its text config, and false on neither.

    Raises:
        RuntimeError: the config ties them, but the model does not return one of them.
    """
    config = getattr(model, "config", None)
    text_config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    owners = [owner for owner in (config, text_config) if hasattr(owner, "tie_word_embeddings")]
    if not owners or not all(owner.tie_word_embeddings for owner in owners):
        return None
    embeddings = []
    for which in ("input", "output"):
        try:
            module = getattr(model, f"get_{which}_embeddings")()
            while hasattr(module, "base_layer"):
                module = module.base_layer
            if module is None or hasattr(module, "original_module"):  # no head, or PEFT trains a copy of it
                return None
            assert module._parameters["weight"] is not None
        except Exception as error:
            raise RuntimeError(
                f"{type(model).__name__}'s config has tie_word_embeddings=True, but its {which} embedding cannot be found "
                f"({type(error).__name__}: {error}); set config.tie_word_embeddings=False if there is nothing to tie"
            ) from error
        embeddings.append(module)
    return embeddings[0], embeddings[1]


def tie(model: nn.Module, source: nn.Module, target: nn.Module) -> None:
    """Makes the weight of ``source`` the weight of ``target``, too.

    If FSDP shards them as two parameters, it would keep using its own copy of the second. That one gets the values instead.
    """
    tied, replaced = source._parameters["weight"], target._parameters["weight"]
    if tied is replaced or tied is None or replaced is None:
        return
    if not any(sharded.sharded_param is replaced for sharded in Modules(model).fsdp_parameters):
        target._parameters["weight"] = tied
        return
    if isinstance(tied, DTensor) and isinstance(replaced, DTensor):
        layouts = [(tensor.device_mesh, tensor.placements, tensor.shape) for tensor in (tied, replaced)]
        if layouts[0] == layouts[1]:
            with torch.no_grad():
                replaced.to_local().copy_(tied.to_local())
    _log.warning(
        "the config ties the embeddings, but FSDP shards them as two parameters: both are loaded, and training will update "
        "them separately; call model.tie_weights() before fully_shard"
    )
