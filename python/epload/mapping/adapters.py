"""The file that PEFT saves for an adapter: its names lack the adapter's own, and the base model's weights are not in it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from epload.errors import ModelMismatch
from epload.mapping.wrappers import comes_from, compiled, parameters_on_meta, spelled

_PREFIX = "base_model.model."
Pairs = tuple[tuple[str, str], ...]
"""Checkpoint name and model name."""


def adapter_file(model: nn.Module, names: Collection[str], checkpoint: Sequence[str]) -> Pairs:
    """Where the tensors of an adapter's own file go; empty if the checkpoint is none, or the model has no adapter.

    The tensors are those of the active adapter, and where each is kept in the file is what PEFT says.

    Args:
        names: of the model's tensors.
        checkpoint: names of the checkpoint's tensors.

    Raises:
        ModelMismatch: it is an adapter's file, but several adapters are active, or base weights are still on meta.
    """
    if not checkpoint or not all(name.startswith(_PREFIX) for name in checkpoint):
        return ()
    path, adapted = next(
        ((path, m) for path, m in model.named_modules() if comes_from(m, "peft") and hasattr(m, "peft_config")),
        ("", None),
    )
    if adapted is None:
        return ()
    prefix = f"{path}." if path else ""
    own = {name[len(prefix) :]: name for name in names if name.startswith(prefix)}
    active = getattr(adapted, "active_adapters", None) or adapted.active_adapter
    active = [active] if isinstance(active, str) else list(active)
    saved: dict[str, str] = {}
    for adapter in active:
        saved.update(_saved_names(adapted, list(own), adapter))
    aliases = compiled(own)
    saved = {spelled(name, aliases): target for name, target in saved.items()}
    # A file that holds all of a PEFT model has the model's own names, adapters' names and all.
    if not any(name in saved and name not in own for name in (spelled(name, aliases) for name in checkpoint)):
        return ()
    if len(active) > 1:
        raise ModelMismatch(
            f"the checkpoint is the file of one adapter, but {len(active)} are active in the model "
            f"({', '.join(active)}); choose one with model.set_adapter(name)"
        )
    pairs = []
    for name in checkpoint:
        plain = spelled(name, aliases)
        target = saved.pop(plain, None) or (plain if plain in own else None)
        if target is not None:
            pairs.append((name, own[target]))
    # What the file should hold but does not: no checkpoint tensor is called this, so that it is reported as missing.
    pairs += [("", own[target]) for target in saved.values()]
    if absent := parameters_on_meta(model, [target for _, target in pairs]):
        raise ModelMismatch(
            f"the checkpoint is an adapter's file, which holds none of the base weights, but {len(absent)} of the model's "
            f"are on meta ({', '.join(absent[:3])}, ...); load the base checkpoint first, then the adapter"
        )
    return tuple(pairs)


def _saved_names(adapted: Any, names: Sequence[str], adapter: str) -> dict[str, str]:
    """The model's names of the tensors that PEFT saves for an adapter, by their names in the file."""
    from peft import get_peft_model_state_dict

    if adapted.peft_config[
        adapter
    ].is_prompt_learning:  # computed when it is saved, so that it is no tensor of the model
        return {}
    # PEFT renames whatever it is given, so that stand-ins tell what becomes of each name.
    stand_ins = {name: torch.empty(0, device="meta") for name in names}
    target_of = {id(tensor): name for name, tensor in stand_ins.items()}
    kept = get_peft_model_state_dict(adapted, state_dict=stand_ins, adapter_name=adapter, save_embedding_layers=False)
    return {name: target_of[id(tensor)] for name, tensor in kept.items() if id(tensor) in target_of}
