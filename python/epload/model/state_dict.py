"""Reads the state dict of a model, and refuses models of which a load could not fill every entry in place.

A module whose hooks or methods only rename its tensors is filled as any other. One that returns copies, or that changes values in
its ``load_state_dict``, is refused by name: writing to the entries would not fill the model as torch does. With a mapping of the
caller, which names the model's own tensors, it is filled by these names, provided that its state dict uses none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.lazy import LazyModuleMixin

from epload.core.pieces import is_extra_state
from epload.errors import ModelMismatch
from epload.model import dtensor
from epload.model.initialization import shown_names
from epload.model.memory import storage_of
from epload.model.modules import Modules, NamedModule
from epload.observe.render import list_first

NamedTensor = tuple[str, Tensor]

_HARMLESS_PACKAGES = ("torch", "transformers", "peft", "accelerate", "litgpt", "megatron", "transformer_engine")
"""Packages whose load hooks only rename keys of old checkpoints, handle sharding, which is done anyway, or take extra state."""
_ONLY_EXTRA_STATE = ("megatron", "transformer_engine")
"""Packages whose modules add no more than extra state to their state dict."""
_HARMLESS_HOOKS = "torch.distributed.fsdp._fully_shard.", "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
"""Modules whose hooks reshard, which is done anyway, or hide the wrappers of activation checkpointing, which are not in names."""
_STATE_METHODS = frozenset(("state_dict", "_save_to_state_dict", "get_extra_state"))
_LOAD_METHODS = ("load_state_dict", "_load_from_state_dict")
_OFFLOADING = "_hf_hook", "_diffusers_hook"
ATTRIBUTES = frozenset((*_STATE_METHODS, *_LOAD_METHODS, *_OFFLOADING))
"""Attributes by which a module may have a say in its state, besides its class and its hooks."""


def read_state(
    model: nn.Module, modules: Modules, filled: bool, own_names: bool
) -> tuple[list[NamedTensor], set[str], dict[str, Tensor], bool, ModelMismatch | None]:
    """Returns the tensors of a model's state dict, the names of its non-persistent buffers that have storage, the meta tensors
    that are not in the state dict, True if no module has custom loading or customizes its state dict, and, if ``filled``, why not
    all tensors can be filled.

    If no module customizes its state dict, takes the tensors from the modules directly, a fifth of the time of
    ``state_dict()``. With ``own_names``, a module whose state dict shows none of its tensors under its own name, but others, has
    its own. Raises ModelMismatch for a module or an entry that cannot be read.
    """
    for cls, prefix in modules.classes.items():
        _check_supported(prefix[:-1] or "the model", cls)
    own_state = {cls for cls in modules.classes if _has_own_state(cls)}
    customized: list[NamedModule] = []
    custom_loading: list[NamedModule] = []
    entries: list[NamedTensor] = []
    unsaved: list[NamedTensor] = []
    for prefix, module in modules.named:
        _check_not_offloaded(prefix[:-1] or "the model", module)
        dtensor.check_packed(prefix, module)
        shown = prefix.replace(_CHECKPOINT_PREFIX, "")  # activation checkpointing, whose wrappers do not show in names
        if has_state_hooks(module) or type(module) in own_state or not _STATE_METHODS.isdisjoint(vars(module)):
            customized.append((shown, module))
        if _custom_loading(module):
            custom_loading.append((shown, module))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                entries.append((shown + name, parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                entries.append((shown + name, buffer))
            elif buffer is not None:
                unsaved.append((prefix + name, buffer))
    plain, refusal = not customized and not custom_loading, None
    if not plain:
        # Asked with other tensors first: a hook may gather what it shows.
        names, custom = shown_names(model, modules) if own_names else None, [*customized, *custom_loading]
        hidden = _hide_own(names, entries, custom) if names is not None else ()
        if all(prefix.startswith(hidden) for prefix, _ in custom):
            returned = entries
        else:
            returned = tensor_entries(model)
            hidden = _hide_own([name for name, _ in returned], entries, custom)
        if own_names:
            returned = [entry for entry in returned if not entry[0].startswith(hidden)]
            returned += [entry for entry in entries if entry[0].startswith(hidden)]
            customized = [named for named in customized if not named[0].startswith(hidden)]
            custom_loading = [named for named in custom_loading if not named[0].startswith(hidden)]
        if filled:
            returned, refusal = _fillable(model, customized, custom_loading, returned, hidden)
        is_returned = storage_filter([tensor for _, tensor in returned])
        unsaved += [(name, tensor) for name, tensor in entries if tensor.is_meta and not is_returned(tensor)]
        entries = returned
    saved = {id(tensor) for _, tensor in entries} if unsaved else set()  # perhaps under another name
    unsaved_buffers = {name for name, tensor in unsaved if not tensor.is_meta}
    unsaved_meta = {name: tensor for name, tensor in unsaved if tensor.is_meta and id(tensor) not in saved}
    return entries, unsaved_buffers, unsaved_meta, plain, refusal


def has_state_hooks(module: nn.Module) -> bool:
    """Returns True if a hook may change what a module's state dict shows."""
    hooks = (*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values())
    return any(not (getattr(hook, "__module__", None) or "").startswith(_HARMLESS_HOOKS) for hook in hooks)


def _hide_own(shown: Iterable[str], own: Sequence[NamedTensor], customized: Iterable[NamedModule]) -> tuple[str, ...]:
    """Returns the prefixes of customized modules of which a state dict shows other tensors than they have, and none of these.

    Args:
        shown: names in the state dict.
        own: the model's own parameters and persistent buffers.
    """
    names, prefixes = {*shown}, {prefix for prefix, _ in customized}
    having, showing = set[str](), set[str]()
    for name, _ in own:
        path = name.split(".")
        around = prefixes.intersection("".join(f"{part}." for part in path[:depth]) for depth in range(len(path)))
        having |= around
        if name in names:
            showing |= around
    return tuple(sorted(having - showing))


def tensor_entries(model: nn.Module, prefix: str = "") -> list[NamedTensor]:
    """Returns the tensors of ``model.state_dict(keep_vars=True)``, without extra state.

    Raises ModelMismatch: an entry is a ShardedTensor, or neither a tensor nor extra state."""
    entries = []
    for name, value in model.state_dict(keep_vars=True).items():
        if is_extra_state(name):
            continue
        if type(value).__name__ == "ShardedTensor":
            raise ModelMismatch(
                f"{prefix}{name} is a ShardedTensor, which cannot be loaded into; use DTensor, as fully_shard does"
            )
        if isinstance(value, Tensor):
            entries.append((prefix + name, value))
        elif value is not None:
            raise ModelMismatch(
                f"{prefix}{name} is a {type(value).__name__} in the state dict and not a tensor, as of modules with packed "
                "weights, which cannot be loaded or saved tensor by tensor: use torch.save and load_state_dict for this model"
            )
    return entries


def tensor_at(model: nn.Module, name: str) -> Tensor:
    """Returns the parameter or buffer with this path of modules, which may differ from its name in the state dict."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    tensor: Tensor = {**module._buffers, **module._parameters}[leaf]  # type: ignore[assignment]
    return tensor


def _check_supported(path: str, cls: type) -> None:
    """Raises ModelMismatch for lazy modules, and for FSDP1, whose state dict is copies made by collectives."""
    if issubclass(cls, LazyModuleMixin):
        raise ModelMismatch(
            f"{path} is a {cls.__name__}, whose parameters have no shape yet. Run the model once on an example, or build it with "
            "its sizes"
        )
    if issubclass(cls, FullyShardedDataParallel):
        raise ModelMismatch(
            f"{path} is wrapped by FullyShardedDataParallel (FSDP1), whose flat parameters cannot be loaded by name. Shard the "
            "model with torch.distributed.fsdp.fully_shard (FSDP2), or load it before wrapping it"
        )


def _check_not_offloaded(path: str, module: nn.Module) -> None:
    """Raises ModelMismatch for modules whose weights accelerate or diffusers keeps elsewhere between forward passes."""
    hook, registry = map(vars(module).get, _OFFLOADING)
    if hook is None and registry is None:
        return
    offloaded = [getattr(part, "offload", False) for part in getattr(hook, "hooks", (hook,))]
    groups = [getattr(part, "group", None) for part in getattr(registry, "hooks", {}).values()]
    offloaded += [getattr(group, "offload_to_disk_path", None) is not None for group in groups]
    if any(offloaded):
        raise ModelMismatch(
            f"{path} is offloaded by accelerate or diffusers: its weights are elsewhere, and what is loaded would be replaced in "
            "the next forward pass. Offload the model after the load, or remove the hooks first, as "
            "accelerate.hooks.remove_hook_from_submodules(model) does"
        )


def _has_own_state(cls: type[nn.Module]) -> bool:
    owners = (next(base for base in cls.__mro__ if method in base.__dict__) for method in _STATE_METHODS)
    return any(owner is not nn.Module and owner.__module__.partition(".")[0] not in _ONLY_EXTRA_STATE for owner in owners)


def describe_custom_loading(path: str, module: nn.Module) -> str:
    """Describes the hook or the method by which a module might change values when it is loaded; empty if there is none."""
    custom = _custom_loading(module)
    return f"{path or 'the model'} ({type(module).__name__}) has {custom}" if custom else ""


def _custom_loading(module: nn.Module) -> str:
    for method in _LOAD_METHODS:
        if method in vars(module) and not _is_harmless(getattr(vars(module)[method], "__module__", None)):
            return f"a {method} of its own"
    if custom := _custom_load_method(type(module)):  # type: ignore[arg-type]  # a class is hashable
        return custom
    for hooks in (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks):
        for hook in hooks.values():
            function: Any = getattr(hook, "hook", hook)  # torch wraps the hooks that take the module
            function = getattr(function, "func", function)
            if not _is_harmless(getattr(function, "__module__", None)):
                return f"a load_state_dict hook ({getattr(function, '__qualname__', type(function).__qualname__)})"
    return ""


@cache
def _custom_load_method(cls: type) -> str:
    for base in cls.__mro__:
        for method in _LOAD_METHODS:  # which another package may have replaced
            own = base.__dict__.get(method)
            if own is not None and not _is_harmless(getattr(own, "__module__", base.__module__)):
                return f"a {method} of its own"
    return ""


@cache
def _is_harmless(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _HARMLESS_PACKAGES


def _fillable(
    model: nn.Module,
    customized: Sequence[NamedModule],
    custom_loading: Sequence[NamedModule],
    entries: Sequence[NamedTensor],
    hidden: tuple[str, ...],
) -> tuple[list[NamedTensor], ModelMismatch | None]:
    """Returns the entries that are the model's own storage, and an error if a module has custom loading, or others are not.
    Lists of modules have parents first.

    Args:
        hidden: prefixes of modules that a mapping of the caller can fill.
    """
    is_owned = storage_filter([*model.parameters(), *model.buffers()])
    owned = [(name, tensor) for name, tensor in entries if is_owned(tensor)]
    for prefix, module in custom_loading:
        if names := [name for name, _ in entries if name.startswith(prefix)]:
            custom = describe_custom_loading(prefix[:-1], module)
            problem = f"{custom}, which does not run when tensors are filled in place"
            return owned, _not_fillable(problem, names, prefix, prefix.startswith(hidden))
    copies = {name for name, tensor in entries if not is_owned(tensor)}
    for prefix, module in reversed(customized) if copies else ():  # the innermost module first
        copied = [(name, tensor) for name, tensor in tensor_entries(module, prefix) if name in copies]
        if names := [name for name, tensor in copied if not is_owned(tensor)]:
            problem = f"{prefix[:-1] or 'the model'} ({type(module).__name__}) returns copies in its state dict"
            problem += ", and filling a copy would not fill the model"
            return owned, _not_fillable(problem, names, prefix, prefix.startswith(hidden))
    return owned, _not_fillable("the model returns copies in its state dict", sorted(copies), "") if copies else None


def _not_fillable(problem: str, names: Sequence[str], prefix: str, is_hidden: bool = False) -> ModelMismatch:
    way = "Replace the module by torch.nn.Identity() for the load, with strict=False, and call its own load_state_dict"
    remove = "" if is_hidden else "remove the hook or method for the load, and "
    return ModelMismatch(
        f"{problem}: {list_first(names)}. {way if prefix else 'Call its own load_state_dict'}; or {remove}"
        "map the checkpoint's names to those of the parameters with mapping="
    )


def storage_filter(tensors: Iterable[Tensor]) -> Callable[[Tensor], bool]:
    """Returns a predicate: True if a tensor, which may be on meta, shares storage with one of these, or is sparse."""
    storages = {storage_of(dtensor.with_memory(tensor)) for tensor in tensors if tensor.layout == torch.strided}
    return lambda tensor: tensor.layout != torch.strided or storage_of(dtensor.with_memory(tensor)) in storages
