"""PEFT's adapters: their own files, whose keys lack the adapter's name and which hold no base weights; and what a checkpoint of
the adapted model has in their place."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from epload.errors import ModelMismatch
from epload.mapping.rules import Rename
from epload.mapping.wrappers import compile_aliases, is_from_package, strip_wrappers
from epload.model.initialization import is_adapter
from epload.model.modules import Modules
from epload.model.state_dict import tensor_entries

_PREFIX = "base_model.model."
TRAINED_COPY = Rename(r"\.modules_to_save\.[^.]+\.", ".")
"""PEFT trains a copy of each module in ``modules_to_save``, one for each adapter."""
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


def names_added_by_adapters(model: nn.Module, names: Collection[str]) -> frozenset[str]:
    """Returns which of a model's tensors a checkpoint of it lacks: those of adapters, and of modules in ``modules_to_save`` all
    but what the model computes with, which is the copy of the active adapter.

    Args:
        names: names of the model's tensors.

    Raises:
        ModelMismatch: an active adapter is not merged, so that the base weights are not what the model computes with.
    """
    modules = Modules(model)
    if not any(map(_may_add, modules.classes)):
        return frozenset()
    ordered = sorted(names)

    def below(prefix: str) -> list[str]:
        # No name has a character between "." and "/".
        return ordered[bisect_left(ordered, prefix) : bisect_left(ordered, f"{prefix[:-1]}/")] if prefix else ordered

    added: set[str] = set()
    for prefix, module in modules.named:
        if not _may_add(type(module)):
            continue
        path = prefix[:-1]
        if _is_prompt_tuned(module):
            raise ModelMismatch(
                f"{path or 'the model'} has a prompt that is trained, which its base weights lack; save it with "
                "save_pretrained(), and pass get_base_model() for the base weights"
            )
        if is_adapter(module):
            _check_merged(path, module)
            kept = f"{prefix}base_layer."
        elif _is_trained_in_copies(module):
            kept = f"{prefix}{_active_copy(path, module)}."
        elif _is_tuner(module):  # may have tensors that its layers share
            kept = f"{prefix}model."
        else:
            continue
        added |= {name for name in below(prefix) if not name.startswith(kept)}
    return frozenset(added)


def _may_add(kind: type) -> bool:
    return any(cls.__module__.split(".")[0] == "peft" for cls in kind.__mro__) or hasattr(kind, "reset_lora_parameters")


def _is_tuner(module: nn.Module) -> bool:
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and isinstance(module, tuners.BaseTuner)


def _is_prompt_tuned(module: Any) -> bool:
    if not is_from_package(module, "peft") or not hasattr(module, "peft_config"):
        return False
    configs = [module.peft_config[adapter] for adapter in _active(module) if adapter in module.peft_config]
    return any(config.is_prompt_learning or getattr(config, "is_adaption_prompt", False) for config in configs)


def _is_trained_in_copies(module: nn.Module) -> bool:
    return is_from_package(module, "peft") and isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict)


def _active(module: Any) -> list[str]:
    active = getattr(module, "active_adapters", None) or getattr(module, "active_adapter", [])
    return [active] if isinstance(active, str) else list(active)


def _check_merged(path: str, layer: Any) -> None:
    """Raises ModelMismatch unless a layer computes with its base weights as they are."""
    merged, disabled = set(getattr(layer, "merged_adapters", ())), getattr(layer, "disable_adapters", False)
    parts = [getattr(layer, name, None) for name in getattr(layer, "adapter_layer_names", ("lora_A",))]
    own = {name for part in parts if isinstance(part, nn.ModuleDict | nn.ParameterDict) for name in part}
    unmerged = [name for name in _active(layer) if name in own - merged]
    if disabled and merged:
        raise ModelMismatch(
            f"the adapters of {path} are merged into its base weights and disabled at once ({', '.join(sorted(merged))}); call "
            "unmerge_adapter() or enable them"
        )
    if unmerged and not disabled:
        raise ModelMismatch(
            f"{path} has an active adapter that is not merged ({', '.join(unmerged)}), so that its base weights are not what the "
            "model computes with; call merge_adapter() before and unmerge_adapter() after, or disable the adapters to get the "
            "base model; save_pretrained() saves the adapter itself"
        )


def _active_copy(path: str, wrapper: Any) -> str:
    """Returns where in a wrapper the module is that it computes with."""
    copies = [name for name in _active(wrapper) if name in wrapper.modules_to_save]
    if wrapper.disable_adapters or not copies:
        return "original_module"
    if len(copies) > 1:
        raise ModelMismatch(
            f"{path} has several active copies ({', '.join(copies)}); select one with set_adapter(name)"
        )
    return f"modules_to_save.{copies[0]}"


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
