"""Models inside wrappers: torch.compile, DistributedDataParallel, PEFT. Checkpoints lack the part of a parameter's name that a
wrapper adds, so aliases remove it before names are compared."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from epload.mapping.rules import Rename, apply_renames
from epload.model.initialization import is_adapter

BASE_LAYER = Rename(r"\.(?:base_layer\.)+(?!lora_)", ".")
"""An adapter moves the layer that it wraps one module deeper; several parameters of a layer, each with an adapter, several."""
TOKEN_LAYER = Rename(r"\.token_adapter\.base_layer\.", ".")
"""An adapter of single tokens moves the embedding two modules deeper."""
PEFT_ALIASES = (Rename(r"^base_model\.model\.", ""), TOKEN_LAYER, BASE_LAYER)
"""PEFT moves the whole model two modules deeper."""
_SAVED_COPY = re.compile(r"^(.*)\.modules_to_save\.[^.]+\.(.*)$")


class Unwrapped(NamedTuple):
    """The model inside all wrappers."""

    model: nn.Module
    aliases: tuple[Rename, ...]
    """Renames from the wrapped model's names to the inner model's."""
    ties: tuple[tuple[str, str], ...]
    """Tensors of the inner model and the copies that a wrapper has made of them, as pairs of names without wrappers."""


def unwrap(model: nn.Module, names: Collection[str]) -> Unwrapped:
    """Looks through all wrappers. ``names`` are those of the model's tensors."""
    inner: Any = model
    aliases, adapted = [*wrapper_aliases(model, names)], False
    while True:
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif isinstance(inner, (DistributedDataParallel, nn.DataParallel)):
            inner = inner.module
        elif is_from_package(inner, "peft"):
            base = inner.get_base_model()
            # Prompt tuning changes no layer, and moves the model one module deeper.
            aliases += [Rename(r"^base_model\.", "")] if inner.base_model is base else PEFT_ALIASES
            inner, adapted = base, True
        else:
            break
    if not adapted and _has_adapters(inner, names):  # added by transformers, or a PEFT model without its outer modules
        aliases += [TOKEN_LAYER, BASE_LAYER]
        adapted = True
    ties: tuple[tuple[str, str], ...] = ()
    if adapted:
        ties = _saved_copies(names, aliases)
        aliases.append(Rename(r"\.original_module\.", "."))
    return Unwrapped(inner, tuple(aliases), ties)


def _has_adapters(model: nn.Module, names: Collection[str]) -> bool:
    text = "\n".join(names)
    if ".base_layer." not in text and ".modules_to_save." not in text:
        return False
    return any(is_adapter(module) or is_from_package(module, "peft") for module in model.modules())


def wrapper_aliases(model: nn.Module, names: Collection[str]) -> tuple[Rename, ...]:
    """Aliases for torch.compile and data parallelism, around the model or around modules of it."""
    text = "\n".join(names)  # one search is faster than one for each name
    found = [*compile_aliases(names)] if "_orig_mod." in text else []
    if "module." in text:
        for path, module in model.named_modules():
            if isinstance(module, (DistributedDataParallel, nn.DataParallel)):
                prefix = strip_wrappers(f"{path}." if path else "", found)
                found.append(Rename(f"^{re.escape(prefix)}module\\.", prefix))
    return tuple(found)


def compile_aliases(names: Collection[str]) -> tuple[Rename, ...]:
    """Aliases for torch.compile, around the model or around modules of it."""
    # A rename removes one occurrence, and compiled modules may be nested.
    depth = max((name.count("_orig_mod.") for name in names), default=0)
    return (Rename(r"(^|\.)_orig_mod\.", r"\1"),) * depth


def strip_wrappers(name: str, aliases: Iterable[Rename]) -> str:
    """One name without its wrappers."""
    return apply_renames(aliases, [name])[0]


def is_from_package(model: object, package: str) -> bool:
    """Returns True if the class of ``model``, or one of its bases, is defined in ``package``."""
    return any(cls.__module__.split(".")[0] == package for cls in type(model).__mro__)


def _saved_copies(names: Collection[str], aliases: Iterable[Rename]) -> tuple[tuple[str, str], ...]:
    """PEFT trains a copy of each module in ``modules_to_save``, which starts from the weights of the original."""
    known = set(names)
    pairs = []
    for name in names:
        if ".modules_to_save." in name and (match := _SAVED_COPY.match(name)):
            original = f"{match[1]}.original_module.{match[2]}"
            if original in known:
                pairs.append((f"{strip_wrappers(match[1], aliases)}.{match[2]}", strip_wrappers(name, aliases)))
    return tuple(pairs)
