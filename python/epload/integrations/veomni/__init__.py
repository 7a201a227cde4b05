"""VeOmni's ``rank0_load_and_broadcast_weights``."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import epload
from epload.core.log import logger
from epload.integrations.veomni.converted import ConvertedCheckpoint
from epload.mapping.mapping import Mapping, Rename
from epload.mapping.resolve import from_model
from epload.mapping.wrappers import BASE_LAYER, PEFT_ALIASES, strip_wrappers, wrapper_aliases
from epload.model.modules import Modules

_NOT_FOR_LOAD = ("is_peft_model", "adapter_path", "fqn_to_index_mapping")
"""Keyword arguments of the original that are not options of ``epload.load``."""


def rank0_load_and_broadcast_weights(
    model: nn.Module,
    weights_path: str,
    init_device: str = "cuda",
    dtensor_factory: Any = None,
    cpu_load_param_name: list[str] | None = None,
    max_load_broadcast_size: float = 20.0,
    **kwargs: Any,
) -> None:
    """Drop-in for VeOmni's function: rank 0 reads ``weights_path``, and only it needs the files. Collective.

    As in the original, expert shards come from VeOmni's parallel plan, the model's ``_create_checkpoint_tensor_converter`` and
    ``_checkpoint_conversion_mapping`` apply, and the output embedding is tied if the config ties it. Parameters that the
    checkpoint lacks are initialized by the model (``_init_weights``) or the LoRA layer. They and unexpected keys are logged.

    ``init_device``, ``dtensor_factory``, ``cpu_load_param_name``, ``max_load_broadcast_size`` and ``fqn_to_index_mapping`` are
    ignored: the model has the devices and layouts, and tensors of any size are sent in buckets.

    Args:
        model: the model, which may be on meta.
        weights_path: a checkpoint file or folder.
        kwargs: ``is_peft_model``, and arguments of :func:`epload.load`, e.g. ``init_missing``, ``strict`` or ``options``,
            which replace the defaults.

    Raises:
        ValueError: ``adapter_path`` is given. Load the adapter afterwards.
        TypeError: ``_create_checkpoint_tensor_converter`` cannot be called or does not return a converter.
        CheckpointError: the checkpoint cannot be read, or the converter failed. On every rank, and nothing has moved.
        ModelMismatch: a tensor has another shape, or is missing and the model cannot initialize it. On every rank, and nothing
            has moved.
        RuntimeError: the config ties the embeddings, but the model does not return one of them.
    """
    if kwargs.get("adapter_path") is not None:
        raise ValueError(
            f"expected adapter_path=None, got {kwargs['adapter_path']!r}: only base weights are loaded; load the adapter "
            "afterwards"
        )
    options: dict[str, Any] = {"readers": "one", "progress": False, "strict": False}
    options |= {name: value for name, value in kwargs.items() if name not in _NOT_FOR_LOAD}
    tied = _find_tied_embeddings(model)
    converted = _converted(model, weights_path)
    options.setdefault("mapping", _mapping(model, bool(kwargs.get("is_peft_model")), converted is not None, tied))
    try:
        report = epload.load(model, weights_path if converted is None else converted, **options)
    finally:
        if converted is not None:
            converted.close()
    if tied is not None:
        _tie(model, *tied)
    if not dist.is_initialized() or dist.get_rank() == 0:
        keys = (("missing keys, initialized", report.missing_keys), ("unexpected keys", report.unexpected_keys))
        for title, names in keys:
            if names:
                logger.warning("%s: %d %s: %s", weights_path, len(names), title, ", ".join(names[:10]))


def _mapping(model: nn.Module, is_peft_model: bool, converted: bool, tied: tuple[nn.Module, nn.Module] | None) -> Mapping:
    """``converted``: whether a converter or renames of VeOmni apply, which replace the rules of transformers."""
    names = [name for name, _ in chain(model.named_parameters(), model.named_buffers())]
    mapping = from_model(model, names)
    if converted:
        mapping = replace(mapping, renames=(), converts=())
    # VeOmni's own LoRA has the names of PEFT, but not its classes.
    if is_peft_model and PEFT_ALIASES[0] not in mapping.aliases:
        bare = [
            re.escape(f"{path}.base_layer.weight".removeprefix("base_model.model."))
            for path, module in model.named_modules()
            if getattr(getattr(module, "base_layer", None), "_is_bare_param_holder", False)
        ]
        holders = (Rename(f"^(?=(?:{'|'.join(bare)})$)(.*)\\.base_layer\\.weight$", r"\1"),) if bare else ()
        mapping = replace(mapping, aliases=(*wrapper_aliases(model, names), PEFT_ALIASES[0], *holders, BASE_LAYER))
    if tied is not None:
        name_of = {id(tensor): name for name, tensor in model.named_parameters(remove_duplicate=False)}
        source, target = (strip_wrappers(name_of[id(module.weight)], mapping.aliases) for module in tied)
        if source != target:
            mapping = replace(mapping, ties=(*mapping.ties, (source, target)))
    return mapping


def _converted(model: nn.Module, source: Any) -> ConvertedCheckpoint | None:
    """Returns the checkpoint with the model's converter and renames applied. None if the model has neither.

    Raises:
        TypeError: ``_create_checkpoint_tensor_converter`` cannot be called.
    """
    owner: Any = model
    while (factory := getattr(owner, "_create_checkpoint_tensor_converter", None)) is None:
        inner = owner.get_base_model() if hasattr(owner, "get_base_model") else getattr(owner, "module", None)
        if not isinstance(inner, nn.Module) or inner is owner:
            break
        owner = inner
    renames = getattr(model, "_checkpoint_conversion_mapping", None) or {}
    if factory is None and not renames:
        return None
    if factory is not None and not callable(factory):
        raise TypeError(f"expected {type(owner).__name__}._create_checkpoint_tensor_converter to be a function, got {factory!r}")
    return ConvertedCheckpoint(source, lambda: None if factory is None else factory(owner), lambda name: _rename(name, renames))


def _rename(name: str, renames: dict[str, str]) -> str:
    """Applies the first pattern that matches. As in VeOmni, groups and a leading ``^`` in the replacement are dropped."""
    for pattern, replacement in renames.items():
        renamed, count = re.subn(pattern, re.sub(r"\(.*\)", "", replacement.lstrip("^")), name)
        if count:
            return renamed
    return name


def _find_tied_embeddings(model: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """Returns the input and output embeddings if the config ties them, else None.

    The config ties them if ``tie_word_embeddings`` is set on it or on its text config, and false on neither.

    Raises:
        RuntimeError: the config ties them, but the model does not return one of them.
    """
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    ties = [c.tie_word_embeddings for c in (config, text_config) if hasattr(c, "tie_word_embeddings")]
    if not ties or not all(ties):
        return None
    embeddings = []
    for which in ("input", "output"):
        module = getattr(model, f"get_{which}_embeddings", lambda: nn.Module())()
        while hasattr(module, "base_layer"):
            module = module.base_layer
        if module is None or hasattr(module, "original_module"):  # no head, or PEFT trains a copy of it
            return None
        if getattr(module, "weight", None) is None:
            raise RuntimeError(
                f"{type(model).__name__}'s config has tie_word_embeddings=True, but its {which} embedding cannot be found; set "
                "config.tie_word_embeddings=False if there is nothing to tie"
            )
        embeddings.append(module)
    return embeddings[0], embeddings[1]


def _tie(model: nn.Module, source: nn.Module, target: nn.Module) -> None:
    """Makes the weight of ``source`` the weight of ``target``, too.

    If FSDP shards them as two parameters, it would keep using its own copy of the second. That one gets the values instead.
    """
    tied: Any = source.weight
    replaced: Any = target.weight
    if tied is replaced:
        return
    if not any(sharded.sharded_param is replaced for sharded in Modules(model).fsdp_parameters):
        target._parameters["weight"] = tied
        return
    if isinstance(tied, DTensor) and isinstance(replaced, DTensor):
        layouts = [(tensor.device_mesh, tensor.placements, tensor.shape) for tensor in (tied, replaced)]
        if layouts[0] == layouts[1]:
            with torch.no_grad():
                replaced.to_local().copy_(tied.to_local())
    logger.warning(
        "the config ties the embeddings, but FSDP shards them as two parameters: both are loaded, and training will update "
        "them separately; call model.tie_weights() before fully_shard"
    )
