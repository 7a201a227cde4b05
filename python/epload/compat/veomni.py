"""VeOmni's ``rank0_load_and_broadcast_weights``."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from epload.compat.converted import ConvertedCheckpoint
from epload.loader import load
from epload.mapping.mapping import Mapping
from epload.mapping.resolve import from_model
from epload.mapping.rules import Rename
from epload.mapping.wrappers import BASE_LAYER, PEFT_ALIASES, strip_wrappers, wrapper_aliases
from epload.model.expert_parallel import OuterShard
from epload.model.materialize import fsdp_parameters

_log = logging.getLogger(__name__)
_THEIRS = ("is_peft_model", "adapter_path", "fqn_to_index_mapping")
"""Keyword arguments of the original that are none of ``epload.load``."""


def rank0_load_and_broadcast_weights(
    model: nn.Module,
    weights_path: str,
    init_device: str = "cuda",
    dtensor_factory: Any = None,
    cpu_load_param_name: list[str] | None = None,
    max_load_broadcast_size: float = 20.0,
    **kwargs: Any,
) -> None:
    """As VeOmni's: rank 0 reads ``weights_path``, and every rank gets its part. Only rank 0 needs to have the files.

    Which tensors are one rank's experts is read from what VeOmni's parallel plan has left on the model. A model's
    ``_create_checkpoint_tensor_converter`` and ``_checkpoint_conversion_mapping`` are applied as there. Where the config
    ties the embeddings, the output embedding gets the input embedding's parameter. Parameters that the checkpoint lacks are
    initialized, as there, by the model (``_init_weights``) or the LoRA layer; they and unexpected keys are logged.

    The model knows where its tensors lie, no DTensor is made, no large tensor is treated apart, and what is for a later
    save is worked out there if need be: ``init_device``, ``dtensor_factory``, ``cpu_load_param_name``,
    ``max_load_broadcast_size`` and ``fqn_to_index_mapping`` are not looked at.

    Args:
        kwargs: further, options of :func:`epload.load`: ``init_missing``, ``strict``, ``outer_shards`` in place of the
            plan's, and so on.

    Raises:
        ValueError: ``adapter_path`` is given: an adapter is loaded by itself, afterwards.
        TypeError: the model's ``_create_checkpoint_tensor_converter`` makes no converter.
        CheckpointError: the converter failed, for instance because experts are missing; on every rank, nothing has moved.
        ModelMismatch: a tensor of another shape, or one that is missing and that the model cannot initialize; on every
            rank, nothing has moved.
        RuntimeError: the config ties the embeddings, but the model does not say which they are.
    """
    if kwargs.get("adapter_path") is not None:
        raise ValueError(
            f"expected adapter_path=None, got {kwargs['adapter_path']!r}: this loads base weights; load the adapter after them"
        )
    options = {name: value for name, value in kwargs.items() if name not in _THEIRS}
    options.setdefault("outer_shards", planned_shards(model))
    options.setdefault("strict", False)
    tie = _tied_embeddings(model)
    source = _converted(model, weights_path)
    options.setdefault("mapping", _mapping(model, bool(kwargs.get("is_peft_model")), source is not None, tie))
    try:
        report = load(
            model, weights_path if source is None else source, **{"readers": "one", "progress": False} | options
        )
    finally:
        if source is not None:
            source.close()
    if tie is not None:
        _tie(model, *tie)
    if not dist.is_initialized() or dist.get_rank() == 0:
        for what, names in (("missing, initialized", report.missing_keys), ("unexpected", report.unexpected_keys)):
            if names:
                _log.warning("%s: %d %s: %s", weights_path, len(names), what, ", ".join(names[:10]))


def _mapping(model: nn.Module, adapted: bool, converted: bool, tie: tuple[nn.Module, nn.Module] | None) -> Mapping:
    """``converted``: names are those that VeOmni has made, and no rule of the transformers library is for them."""
    names = [name for name, _ in chain(model.named_parameters(), model.named_buffers())]
    made = from_model(model, names)
    if converted:
        made = replace(made, renames=(), converts=())
    if adapted and not made.aliases:  # VeOmni's own LoRA has the names of PEFT, but not its classes
        bare = [
            re.escape(f"{path}.base_layer.weight".removeprefix("base_model.model."))
            for path, module in model.named_modules()
            if getattr(getattr(module, "base_layer", None), "_is_bare_param_holder", False)
        ]
        holders = (Rename(f"^(?=(?:{'|'.join(bare)})$)(.*)\\.base_layer\\.weight$", r"\1"),) if bare else ()
        made = replace(made, aliases=(*wrapper_aliases(model, names), PEFT_ALIASES[0], *holders, BASE_LAYER))
    if tie is not None:
        name_of = {id(tensor): name for name, tensor in model.named_parameters(remove_duplicate=False)}
        pair = [strip_wrappers(name_of[id(module.weight)], made.aliases) for module in tie]
        if pair[0] != pair[1]:
            made = replace(made, ties=(*made.ties, (pair[0], pair[1])))
    return made


def _converted(model: nn.Module, source: Any) -> ConvertedCheckpoint | None:
    """The checkpoint as the model's converter makes it, and under the names that the model's class declares for it; None if the
    model has neither.

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
        raise TypeError(
            f"expected {type(owner).__name__}._create_checkpoint_tensor_converter to be a function, got {factory!r}"
        )
    return ConvertedCheckpoint(
        source, lambda: None if factory is None else factory(owner), lambda name: _renamed(name, renames)
    )


def _renamed(name: str, renames: dict[str, str]) -> str:
    """By the first of the patterns that is found; groups and a caret in what replaces it stand for nothing."""
    for pattern, replacement in renames.items():
        made, count = re.subn(pattern, re.sub(r"\(.*\)", "", replacement.lstrip("^")), name)
        if count:
            return made
    return name


def _tied_embeddings(model: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """The input and output embeddings if the config ties them: it says so, or the text model's does, and neither denies it.

    Raises:
        RuntimeError: the model does not say which they are.
    """
    config = getattr(model, "config", None)
    if config is None:
        return None
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    said = [x.tie_word_embeddings for x in (config, text) if hasattr(x, "tie_word_embeddings")]
    if not said or not all(said):
        return None
    ends = []
    for which in ("input", "output"):
        try:
            module = getattr(model, f"get_{which}_embeddings")()
            while hasattr(module, "base_layer"):
                module = module.base_layer
            if module is None or hasattr(module, "original_module"):  # no head, or one that is trained by itself
                return None
            assert module._parameters["weight"] is not None
        except Exception as error:
            raise RuntimeError(
                f"{type(model).__name__}'s config has tie_word_embeddings=True, but its {which} embedding cannot be found "
                f"({type(error).__name__}: {error}); set config.tie_word_embeddings=False if there is nothing to tie"
            ) from error
        ends.append(module)
    return ends[0], ends[1]


def _tie(model: nn.Module, source: nn.Module, target: nn.Module) -> None:
    """Gives the output embedding the input embedding's parameter.

    Not if FSDP shards them as two parameters: it would go on with its own copy of the second. That one gets the values.
    """
    ours, theirs = source._parameters["weight"], target._parameters["weight"]
    if ours is theirs or ours is None or theirs is None:
        return
    if not any(sharded.sharded_param is theirs for sharded in fsdp_parameters(model)):
        target._parameters["weight"] = ours
        return
    if isinstance(ours, DTensor) and isinstance(theirs, DTensor) and _same_layout(ours, theirs):
        with torch.no_grad():
            theirs.to_local().copy_(ours.to_local())
    _log.warning(
        "the config ties the embeddings, but FSDP shards them as two parameters: both are loaded, and will be trained apart; "
        "call model.tie_weights() before fully_shard"
    )


def _same_layout(a: DTensor, b: DTensor) -> bool:
    return (a.device_mesh, a.placements, a.shape) == (b.device_mesh, b.placements, b.shape)


def planned_shards(model: nn.Module) -> list[OuterShard]:
    """One for each mesh and dim of the parameters that VeOmni's plan has cut before FSDP did.

    The plan leaves ``model._fqn2spec_info``: for each name a ``placement`` and, if it is a shard, the ``para_mesh`` it is on.
    """
    cut: dict[tuple[DeviceMesh, int], list[str]] = {}
    for name, spec in getattr(model, "_fqn2spec_info", {}).items():
        if (dim := getattr(spec.placement, "dim", None)) is not None and spec.para_mesh is not None:
            cut.setdefault((spec.para_mesh, dim), []).append(name)
    return [OuterShard(f"^({'|'.join(map(re.escape, names))})$", mesh, dim) for (mesh, dim), names in cut.items()]
