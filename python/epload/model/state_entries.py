"""State-dict entries that are not the model's own storage: filling them would fill nothing.

A module may customize its state dict with hooks or overridden methods: one that stores a fused projection may give three tensors
cut from it. Such a module is filled as torch fills it: its entries are loaded into staging tensors, and these are passed to
the module's own ``load_state_dict``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.lazy import LazyModuleMixin

from epload.errors import LoadError, ModelMismatch
from epload.model import dtensor, memory_pattern


@dataclass(frozen=True)
class Staged:
    """A module whose state dict has entries that are copies."""

    prefix: str
    """Of its names in the model's state dict; ends in a dot, or is empty."""
    module: nn.Module
    names: tuple[str, ...]
    """The copies, by their names in the model's state dict."""

    def covers(self, name: str) -> bool:
        """Whether a tensor of the model is this module's or below it."""
        return name.startswith(self.prefix)

    def hand_over(self, staging: dict[str, Tensor]) -> None:
        """Fills the module from staging tensors, by its own ``load_state_dict``.

        Raises:
            LoadError: the module did not take them.
        """
        entries: dict[str, Any] = dict(self.module.state_dict())
        entries.update({name.removeprefix(self.prefix): staging[name] for name in self.names})
        try:
            with torch.no_grad():
                self.module.load_state_dict(entries)
        except Exception as error:
            raise LoadError(
                f"{self._spelled}.load_state_dict did not take its own state dict ({str(error)[:500]}); its tensors "
                f"{', '.join(self.names[:5])} have to go through it, as the module has state-dict hooks or methods of its own"
            ) from error

    def read_back(self, staging: dict[str, Tensor]) -> None:
        """Replaces what was handed over by what the module now holds, for a proof."""
        entries = dict(read(self.module, self.prefix))
        with torch.no_grad():
            for name in self.names:
                staging[name].copy_(entries[name])

    @property
    def _spelled(self) -> str:
        return f"{self.prefix[:-1] or 'the model'} ({type(self.module).__name__})"


def refuse(prefix: str, kind: type) -> None:
    """Raises ModelMismatch for modules that no load can fill: FSDP1, whose state dicts are copies that collectives make, and lazy
    modules."""
    if issubclass(kind, LazyModuleMixin):
        raise ModelMismatch(
            f"{prefix[:-1] or 'the model'} is a {kind.__name__}, whose parameters have no shape yet. Run the model once on an "
            "example, or build it with its sizes"
        )
    if issubclass(kind, FullyShardedDataParallel):
        raise ModelMismatch(
            f"{prefix[:-1] or 'the model'} is wrapped by FullyShardedDataParallel (FSDP1), whose flat parameters no load "
            "can fill by name. Shard the model with torch.distributed.fsdp.fully_shard (FSDP2), or load it before wrapping it"
        )


_HARMLESS = ("torch", "transformers", "peft", "accelerate")
"""Packages whose hooks for loading do nothing but rename keys of old checkpoints, or see to sharding, which is done anyway."""


def loads_itself(path: str, module: nn.Module) -> str:
    """Says how a module has loading of its own, by a hook or a method that might change values; empty if it has none."""
    what = _own_method(type(module))  # type: ignore[arg-type]  # a class is hashable
    before, after = module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
    if not what and (before or after):
        for hook in chain(before.values(), after.values()):
            function = getattr(hook, "hook", hook)  # torch wraps the one that it gives the module
            function = getattr(function, "func", function)
            if not _is_harmless(getattr(function, "__module__", "") or ""):
                what = f"a load_state_dict hook ({getattr(function, '__qualname__', type(function).__qualname__)})"
                break
    return f"{path or 'the model'} ({type(module).__name__}) has {what}" if what else ""


@cache
def _own_method(kind: type) -> str:
    for each in kind.__mro__:
        for method in ("load_state_dict", "_load_from_state_dict"):
            if method in each.__dict__ and not _is_harmless(each.__module__):
                return f"a {method} of its own"
    return ""


def _is_harmless(module: str) -> bool:
    return module.partition(".")[0] in _HARMLESS


def read(model: nn.Module, prefix: str = "") -> list[tuple[str, Tensor]]:
    """The tensors of ``model.state_dict(keep_vars=True)``.

    Raises:
        ModelMismatch: an entry is sharded in a way that no load can fill.
    """
    found = []
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            found.append((prefix + name, value))
        elif type(value).__name__ == "ShardedTensor":
            raise ModelMismatch(
                f"{prefix}{name} is a ShardedTensor, which no load can fill; use DTensor, as fully_shard does"
            )
    return found


def staged(
    model: nn.Module,
    customized: Sequence[tuple[str, nn.Module]],
    loading: Sequence[tuple[str, nn.Module]],
    entries: Sequence[tuple[str, Tensor]],
) -> tuple[Staged, ...]:
    """The modules whose entries are copies, and those that load themselves.

    Args:
        customized: modules that say themselves what their state is, each with its prefix, parents first.
        loading: modules with loading of their own, likewise.
        entries: of the whole model; names of none of them occur twice.

    Raises:
        ModelMismatch: a copy is a DTensor, or a module that loads itself has one.
    """
    own = _storages(_owned(model))
    found: list[Staged] = []
    rest = dict(entries)
    for prefix, module in loading:
        names = tuple(name for name in rest if name.startswith(prefix))
        for name in names:
            if isinstance(rest.pop(name), DTensor):
                raise ModelMismatch(
                    f"{loads_itself(prefix[:-1], module)}, which does not run when a DTensor such as {name} is filled in place. "
                    "Load the model before it is sharded, or remove the hook for the load"
                )
        if names:
            found.append(Staged(prefix, module, names))
    copies = {name: tensor for name, tensor in rest.items() if not own(tensor)}
    for prefix, module in reversed(customized):
        if not any(name.startswith(prefix) for name in copies):
            continue
        mine = tuple(name for name, tensor in read(module, prefix) if name in copies and not own(tensor))
        for name in mine:
            if isinstance(copies[name], DTensor):
                raise ModelMismatch(
                    f"{name} in the model's state dict is a copy that a hook of {prefix[:-1] or 'the model'} "
                    f"({type(module).__name__}) makes of a DTensor, and no load can fill a copy. Load the model before it is "
                    "sharded, or remove the hook for the load"
                )
            del copies[name]
        if mine:
            found.append(Staged(prefix, module, mine))
    if copies:
        raise ModelMismatch(
            f"{', '.join(list(copies)[:5])} in the model's state dict do not share storage with any parameter or buffer, and no "
            "module with state-dict hooks returns them; filling them would not fill the model"
        )
    return tuple(found)


def hidden(owned: Sequence[tuple[str, Tensor]], entries: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors on meta that no entry is the storage of."""
    in_entries = _storages([tensor for _, tensor in entries])
    return {name: tensor for name, tensor in owned if tensor.is_meta and not in_entries(tensor)}


def check_filled(tensors: Sequence[Tensor], modules: Sequence[Staged]) -> None:
    """Raises LoadError if some of these, marked before the load, have not been written."""
    if any(map(memory_pattern.is_marked, tensors)):
        raise LoadError(
            f"load_state_dict of {', '.join(each._spelled for each in modules)} left parameters uninitialized that are not in "
            "its state_dict; initialize them before the load"
        )


def _owned(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _storages(tensors: Sequence[Tensor]) -> Callable[[Tensor], bool]:
    """Whether a tensor shares storage with one of these, on meta too."""
    known = {_storage(tensor) for tensor in tensors}
    return lambda tensor: _storage(tensor) in known


def _storage(tensor: Tensor) -> int:
    (local,) = dtensor.local_tensors([tensor])
    return int(local.untyped_storage()._cdata)
