"""Reads the state dict of a model, and loads the entries that are not the model's own storage.

A module may customize its state dict with hooks or overridden methods: one that stores a fused projection may return
three tensors cut from it. Writing to those would not fill the model. Such a module is loaded as torch loads it: its
entries go to staging tensors, and these to the module's own ``load_state_dict``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.lazy import LazyModuleMixin

from epload.errors import LoadError, ModelMismatch
from epload.model import dtensor
from epload.model.poison import is_poisoned

NamedModule = tuple[str, nn.Module]
"""The prefix of a module's names in the state dict, which ends in a dot or is empty, and the module."""
NamedTensor = tuple[str, Tensor]

_HARMLESS_PACKAGES = ("torch", "transformers", "peft", "accelerate")
"""Packages whose load hooks only rename keys of old checkpoints, or handle sharding, which is done anyway."""


# ---- reading ----


@dataclass
class ModelState:
    """The tensors of a model, by whether and how a checkpoint can fill them."""

    entries: list[NamedTensor]
    """The tensors of ``model.state_dict(keep_vars=True)``."""
    unsaved_meta: dict[str, Tensor] = field(default_factory=dict)
    """See the fields of the same names of ``Targets``."""
    unsaved_buffers: set[str] = field(default_factory=set)
    staged_modules: tuple[StagedModule, ...] = ()
    staged_meta: dict[str, Tensor] = field(default_factory=dict)


def read_state(model: nn.Module, modules: Sequence[NamedModule]) -> ModelState:
    """Reads a model's state.

    If no module customizes its state, takes the tensors from the modules directly, which takes half the time of ``state_dict()``.

    Args:
        modules: all modules of the model, see :func:`walk_modules`.

    Raises:
        ModelMismatch: a module or an entry that cannot be loaded into.
    """
    is_custom_class: dict[type, bool] = {}
    entries: list[NamedTensor] = []
    state = ModelState(entries)
    use_state_dict = False
    custom_loading: list[NamedModule] = []
    for prefix, module in modules:
        cls = type(module)
        if cls not in is_custom_class:
            check_supported(prefix, cls)
            is_custom_class[cls] = customizes_state(module)
        if module._state_dict_hooks or is_custom_class[cls]:
            use_state_dict = True
        if describe_custom_loading("", module):
            custom_loading.append((prefix, module))
            use_state_dict = True
        for name, parameter in module._parameters.items():
            if parameter is not None:
                entries.append((prefix + name, parameter))
        if module._buffers:
            _read_buffers(state, prefix, module)
    if state.unsaved_meta:  # except those that the state dict has under another name
        saved = {id(tensor) for _, tensor in entries}
        state.unsaved_meta = {name: t for name, t in state.unsaved_meta.items() if id(t) not in saved}
    if not use_state_dict:
        return state
    state.entries = tensor_entries(model)
    customized = [(prefix, module) for prefix, module in modules if customizes_state(module)]
    state.staged_modules = _find_staged_modules(model, customized, custom_loading, state.entries)
    saved_storage = _storage_filter([tensor for _, tensor in state.entries])
    for name, tensor in entries:
        if tensor.is_meta and not saved_storage(tensor):
            is_staged = any(name.startswith(module.prefix) for module in state.staged_modules)
            (state.staged_meta if is_staged else state.unsaved_meta)[name] = tensor
    return state


def _read_buffers(state: ModelState, prefix: str, module: nn.Module) -> None:
    for name, buffer in module._buffers.items():
        if buffer is None:
            continue
        if name not in module._non_persistent_buffers_set:
            state.entries.append((prefix + name, buffer))
        elif buffer.is_meta:
            state.unsaved_meta[prefix + name] = buffer
        else:
            state.unsaved_buffers.add(prefix + name)


def walk_modules(model: nn.Module) -> list[NamedModule]:
    """All modules, each under every name it has, parents before children: the order of ``state_dict()``."""
    found = []
    stack = [("", model)]
    while stack:
        item = stack.pop()
        found.append(item)
        if children := item[1]._modules:
            prefix = item[0]
            stack += [(f"{prefix}{name}.", child) for name, child in reversed(children.items()) if child is not None]
    return found


def tensor_entries(model: nn.Module, prefix: str = "") -> list[NamedTensor]:
    """The tensors of ``model.state_dict(keep_vars=True)``.

    Raises:
        ModelMismatch: an entry is a ShardedTensor.
    """
    found = []
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            found.append((prefix + name, value))
        elif type(value).__name__ == "ShardedTensor":
            raise ModelMismatch(
                f"{prefix}{name} is a ShardedTensor, which cannot be loaded into; use DTensor, as fully_shard does"
            )
    return found


def tensor_at(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer with this path of modules, which may differ from its name in the state dict."""
    path, _, leaf = name.rpartition(".")
    module = model
    for child in filter(None, path.split(".")):
        found = module._modules[child]
        assert found is not None
        module = found
    tensor: Tensor | None = module._parameters.get(leaf)
    if tensor is None:
        tensor = module._buffers[leaf]
    assert tensor is not None
    return tensor


# ---- modules that need special treatment ----


def check_supported(prefix: str, cls: type) -> None:
    """Raises ModelMismatch for modules that cannot be loaded into: lazy modules, and FSDP1, whose state dict is copies made by
    collectives."""
    if issubclass(cls, LazyModuleMixin):
        raise ModelMismatch(
            f"{prefix[:-1] or 'the model'} is a {cls.__name__}, whose parameters have no shape yet. Run the model once on an "
            "example, or build it with its sizes"
        )
    if issubclass(cls, FullyShardedDataParallel):
        raise ModelMismatch(
            f"{prefix[:-1] or 'the model'} is wrapped by FullyShardedDataParallel (FSDP1), whose flat parameters cannot be "
            "loaded by name. Shard the model with torch.distributed.fsdp.fully_shard (FSDP2), or load it before wrapping it"
        )


def customizes_state(module: nn.Module) -> bool:
    """Whether a module may change the names and tensors of its state dict."""
    cls = type(module)
    return bool(module._state_dict_hooks) or not (
        cls.state_dict is nn.Module.state_dict
        and cls._save_to_state_dict is nn.Module._save_to_state_dict
        and cls.get_extra_state is nn.Module.get_extra_state
    )


def describe_custom_loading(path: str, module: nn.Module) -> str:
    """Describes the hook or the method by which a module might change values when it is loaded; empty if there is none."""
    custom = _custom_load_method(type(module))  # type: ignore[arg-type]  # a class is hashable
    pre_hooks, post_hooks = module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
    if not custom and (pre_hooks or post_hooks):
        for hook in chain(pre_hooks.values(), post_hooks.values()):
            function = getattr(hook, "hook", hook)  # torch wraps the hooks that take the module
            function = getattr(function, "func", function)
            if not _is_harmless(getattr(function, "__module__", "") or ""):
                custom = f"a load_state_dict hook ({getattr(function, '__qualname__', type(function).__qualname__)})"
                break
    return f"{path or 'the model'} ({type(module).__name__}) has {custom}" if custom else ""


@cache
def _custom_load_method(cls: type) -> str:
    for base in cls.__mro__:
        for method in ("load_state_dict", "_load_from_state_dict"):
            if method in base.__dict__ and not _is_harmless(base.__module__):
                return f"a {method} of its own"
    return ""


def _is_harmless(module: str) -> bool:
    return module.partition(".")[0] in _HARMLESS_PACKAGES


# ---- staged modules ----


@dataclass(frozen=True)
class StagedModule:
    """A module that is loaded through staging tensors and its own ``load_state_dict``."""

    prefix: str
    """See ``NamedModule``."""
    module: nn.Module
    names: tuple[str, ...]
    """The entries that go through staging tensors, by their names in the model's state dict."""

    def load_staging(self, staging: dict[str, Tensor]) -> None:
        """Loads the staging tensors, given by name, into the module.

        Raises:
            LoadError: the module's ``load_state_dict`` failed.
        """
        entries: dict[str, Any] = dict(self.module.state_dict())
        entries.update({name.removeprefix(self.prefix): staging[name] for name in self.names})
        try:
            with torch.no_grad():
                self.module.load_state_dict(entries)
        except Exception as error:
            raise LoadError(
                f"{self.label}.load_state_dict rejected the module's own state dict ({str(error)[:500]}); the checkpoint's "
                f"tensors for {', '.join(self.names[:5])} must pass through it, since the module has custom state-dict hooks or "
                "methods"
            ) from error

    def read_back(self, staging: dict[str, Tensor]) -> None:
        """Overwrites the staging tensors with the module's present entries, for verification."""
        entries = dict(tensor_entries(self.module, self.prefix))
        with torch.no_grad():
            for name in self.names:
                staging[name].copy_(entries[name])

    @property
    def label(self) -> str:
        """For messages: path and class."""
        return f"{self.prefix[:-1] or 'the model'} ({type(self.module).__name__})"


def _find_staged_modules(
    model: nn.Module,
    customized: Sequence[NamedModule],
    custom_loading: Sequence[NamedModule],
    entries: Sequence[NamedTensor],
) -> tuple[StagedModule, ...]:
    """The modules with custom loading, and those whose entries are copies.

    Args:
        customized: modules that customize their state, parents first.
        custom_loading: modules with custom loading, parents first.
        entries: of the whole model, each name once.

    Raises:
        ModelMismatch: a DTensor would have to be staged, or no module returns a copy.
    """
    is_owned = _storage_filter([*model.parameters(), *model.buffers()])
    found: list[StagedModule] = []
    rest = dict(entries)
    for prefix, module in custom_loading:
        names = tuple(name for name in rest if name.startswith(prefix))
        for name in names:
            if isinstance(rest.pop(name), DTensor):
                raise ModelMismatch(
                    f"{describe_custom_loading(prefix[:-1], module)}, which does not run when a DTensor such as {name} is filled "
                    "in place. Load the model before it is sharded, or remove the hook for the load"
                )
        if names:
            found.append(StagedModule(prefix, module, names))
    copies = {name: tensor for name, tensor in rest.items() if not is_owned(tensor)}
    for prefix, module in reversed(customized):
        if not any(name.startswith(prefix) for name in copies):
            continue
        returned = tensor_entries(module, prefix)
        staged = StagedModule(prefix, module, tuple(n for n, t in returned if n in copies and not is_owned(t)))
        for name in staged.names:
            if isinstance(copies.pop(name), DTensor):
                raise ModelMismatch(
                    f"{name} in the model's state dict is a copy of a DTensor, made by a hook of {staged.label}, and filling a "
                    "copy would not fill the model. Load the model before it is sharded, or remove the hook for the load"
                )
        if staged.names:
            found.append(staged)
    if copies:
        raise ModelMismatch(
            f"{', '.join(list(copies)[:5])} in the model's state dict do not share storage with any parameter or buffer, and no "
            "module with state-dict hooks returns them; filling them would not fill the model"
        )
    return tuple(found)


def check_staged_filled(tensors: Sequence[Tensor], modules: Sequence[StagedModule]) -> None:
    """Raises LoadError if one of these tensors, poisoned before the load, has not been written."""
    if any(map(is_poisoned, tensors)):
        raise LoadError(
            f"load_state_dict of {', '.join(module.label for module in modules)} left parameters uninitialized that are not in "
            "its state_dict; initialize them before the load"
        )


def _storage_filter(tensors: Sequence[Tensor]) -> Callable[[Tensor], bool]:
    """A predicate: whether a tensor, which may be on meta, shares storage with one of these."""
    known = {_storage_id(tensor) for tensor in tensors}
    return lambda tensor: _storage_id(tensor) in known


def _storage_id(tensor: Tensor) -> int:
    (local,) = dtensor.local_tensors([tensor])
    return int(local.untyped_storage()._cdata)
