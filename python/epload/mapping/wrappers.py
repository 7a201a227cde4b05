"""Models inside other modules: torch.compile, DistributedDataParallel, PEFT. Checkpoints know nothing of these wrappers, so that
their part of each parameter name is left out before names are compared."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from epload.mapping.rules import Rename

BASE_LAYER = Rename(r"\.base_layer\.", ".")
"""A layer that an adapter wraps is one module deeper."""
ADAPTED = (Rename(r"^base_model\.model\.", ""), BASE_LAYER)
"""PEFT puts the whole model two modules deeper."""
_SAVED_COPY = re.compile(r"^(.*)\.modules_to_save\.[^.]+\.(.*)$")


class Unwrapped(NamedTuple):
    """The model inside all wrappers, and how to name its tensors as it does."""

    model: nn.Module
    aliases: tuple[Rename, ...]
    """From the wrapper's names to the names of the inner model."""
    ties: tuple[tuple[str, str], ...]
    """Tensors that a wrapper has copied from the inner model, each with its original; names without wrappers."""


def unwrap(model: nn.Module, names: Collection[str]) -> Unwrapped:
    """``names`` are those of the model's tensors."""
    inner: Any = model
    aliases, adapted = [*transparent(model, names)], False
    while True:
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif isinstance(inner, (DistributedDataParallel, nn.DataParallel)):
            inner = inner.module
        elif comes_from(inner, "peft"):
            base = inner.get_base_model()
            # Prompt tuning changes no layer, and puts the model one module deeper.
            aliases += [Rename(r"^base_model\.", "")] if inner.base_model is base else ADAPTED
            inner, adapted = base, True
        else:
            break
    if getattr(inner, "_hf_peft_config_loaded", False):  # an adapter that transformers has put in place
        aliases.append(BASE_LAYER)
        adapted = True
    ties: tuple[tuple[str, str], ...] = ()
    if adapted:
        ties = _copies(names, aliases)
        aliases.append(Rename(r"\.original_module\.", "."))
    return Unwrapped(inner, tuple(aliases), ties)


def transparent(model: nn.Module, names: Collection[str]) -> tuple[Rename, ...]:
    """Aliases for wrappers that change nothing but names: torch.compile and data parallelizm, around the model or around a
    module of it."""
    text = "\n".join(names)  # is searched faster than each name
    found = [*compiled(names)] if "_orig_mod." in text else []
    if "module." in text:
        for path, module in model.named_modules():
            if isinstance(module, (DistributedDataParallel, nn.DataParallel)):
                prefix = spelled(f"{path}." if path else "", found)
                found.append(Rename(f"^{re.escape(prefix)}module\\.", prefix))
    return tuple(found)


def compiled(names: Collection[str]) -> tuple[Rename, ...]:
    """Aliases for tensors of a model that torch.compile has wrapped, or has wrapped modules of."""
    # One rename takes one name out, and wrappers may lie within one another.
    depth = max((name.count("_orig_mod.") for name in names), default=0)
    return (Rename(r"(^|\.)_orig_mod\.", r"\1"),) * depth


def spelled(name: str, aliases: Iterable[Rename]) -> str:
    """One name without its wrappers."""
    for alias in aliases:
        (name,) = alias.apply([name])
    return name


def comes_from(model: object, package: str) -> bool:
    """Whether the class of ``model``, or one of its bases, is defined in ``package``."""
    return any(cls.__module__.split(".")[0] == package for cls in type(model).__mro__)


def _copies(names: Collection[str], aliases: Iterable[Rename]) -> tuple[tuple[str, str], ...]:
    """PEFT trains a copy of each module in ``modules_to_save``, which starts with the weights of the original."""
    known = set(names)
    pairs = []
    for name in names:
        if ".modules_to_save." in name and (match := _SAVED_COPY.match(name)):
            original = f"{match[1]}.original_module.{match[2]}"
            if original in known:
                pairs.append((f"{spelled(match[1], aliases)}.{match[2]}", spelled(name, aliases)))
    return tuple(pairs)


def parameters_on_meta(model: nn.Module, filled: Collection[str]) -> list[str]:
    """Names of the model's parameters and persistent buffers on meta, but for those that are to be ``filled``."""
    wanted = set(filled)
    return [
        name
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and tensor.is_meta and name not in wanted
    ]
