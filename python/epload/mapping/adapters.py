"""Adapter files of PEFT: their keys lack the adapter's name, and they hold no base weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from epload.errors import ModelMismatch
from epload.mapping.wrappers import compile_aliases, is_from_package, strip_wrappers
from epload.model.state_dict import tensor_entries

_PREFIX = "base_model.model."
NamePairs = tuple[tuple[str, str], ...]
"""Pairs of checkpoint key and model name."""


def adapter_pairs(model: nn.Module, names: Collection[str], checkpoint: Sequence[str]) -> NamePairs:
    """The model name for each key of an adapter file; empty if the checkpoint is not one, or the model has no adapter.

    The tensors are those of the active adapter. PEFT says under which key each is saved.

    Args:
        names: names of the model's tensors.
        checkpoint: names of the checkpoint's tensors.

    Raises:
        ModelMismatch: it is an adapter file, but several adapters are active, or base weights are still on meta.
    """
    if not checkpoint or not all(name.startswith(_PREFIX) for name in checkpoint):
        return ()
    path, adapted = next(
        ((path, m) for path, m in model.named_modules() if is_from_package(m, "peft") and hasattr(m, "peft_config")),
        ("", None),
    )
    if adapted is None:
        return ()
    prefix = f"{path}." if path else ""
    inner = {name[len(prefix) :]: name for name in names if name.startswith(prefix)}
    active = getattr(adapted, "active_adapters", None) or adapted.active_adapter
    active = [active] if isinstance(active, str) else list(active)
    aliases = compile_aliases(inner)
    saved: dict[str, str] = {}
    for adapter in active:
        for key, name in _saved_keys(adapted, list(inner), adapter).items():
            saved[strip_wrappers(key, aliases)] = name
    keys = {name: strip_wrappers(name, aliases) for name in checkpoint}
    # The file of a whole PEFT model has the model's own names, which include the adapter's.
    if not any(key in saved and key not in inner for key in keys.values()):
        return ()
    if len(active) > 1:
        raise ModelMismatch(
            f"the checkpoint is a file of one adapter, but {len(active)} adapters of the model are active "
            f"({', '.join(active)}); select one with model.set_adapter(name)"
        )
    pairs = []
    for name, key in keys.items():
        target = saved.pop(key, None) or (key if key in inner else None)
        if target is not None:
            pairs.append((name, inner[target]))
    # Tensors that the file lacks: no checkpoint key is empty, so they are reported as missing.
    pairs += [("", inner[target]) for target in saved.values()]
    filled = {target for _, target in pairs}
    if on_meta := [name for name, tensor in tensor_entries(model) if tensor.is_meta and name not in filled]:
        raise ModelMismatch(
            f"the checkpoint is an adapter file without base weights, but {len(on_meta)} base weights of the model are on meta "
            f"({', '.join(on_meta[:3])}, ...); load the base checkpoint first, then the adapter"
        )
    return tuple(pairs)


def _saved_keys(adapted: Any, names: Sequence[str], adapter: str) -> dict[str, str]:
    """The model's names of the tensors that PEFT saves for an adapter, by their keys in the file."""
    from peft import get_peft_model_state_dict

    if adapted.peft_config[adapter].is_prompt_learning:  # saved tensors are computed, and not in the model
        return {}
    # PEFT renames the state dict that it is given; placeholders show which key each name becomes.
    placeholders = {name: torch.empty(0, device="meta") for name in names}
    name_of = {id(tensor): name for name, tensor in placeholders.items()}
    saved = get_peft_model_state_dict(
        adapted, state_dict=placeholders, adapter_name=adapter, save_embedding_layers=False
    )
    return {key: name_of[id(tensor)] for key, tensor in saved.items() if id(tensor) in name_of}
