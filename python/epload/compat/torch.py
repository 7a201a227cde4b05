"""``torch.distributed.checkpoint.state_dict.set_model_state_dict`` for full state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as original
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.module import _IncompatibleKeys

from epload.compat.full_state import load_full, loading_of_its_own
from epload.errors import ModelMismatch
from epload.mapping.wrappers import strip_wrappers, wrapper_aliases

_original = original.set_model_state_dict
_EXTRA = "_extra_state"


def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[Any, Any], *, options: StateDictOptions | None = None
) -> _IncompatibleKeys:
    """As torch's, for options with ``full_state_dict`` and ``broadcast_from_rank0``: rank 0's dict is loaded on all ranks.

    Other options go to torch's own function, which then acts on each rank by itself. So do FSDP1 models, modules that
    rename their keys by ``dsd_fqn_modifiers``, and those that load in a way of their own, by hooks or methods. Parameters
    stay where they are, so ``cpu_offload`` changes nothing; the remaining options change nothing in torch's function either.

    Non-persistent buffers that are on meta on some ranks are filled from another, where torch's function leaves them there.
    With ``strict=False``, tensors on meta that nobody has stay on meta. Extra state (``set_extra_state``) is rank 0's.

    Raises:
        ModelMismatch: a key is missing or unexpected (not with ``strict=False``) or of another shape, in torch's words; on
            every rank, nothing has moved. It is a RuntimeError, which is what torch raises.
    """
    if options is None or not (options.full_state_dict and options.broadcast_from_rank0) or _not_ours(model, options):
        return _original(model, model_state_dict, options=options)  # type: ignore[arg-type]
    reads = not dist.is_initialized() or dist.get_rank() == 0
    state = _by_name(model, model_state_dict) if reads else {}
    extra = _share_extra_state(model, state, options.strict)
    try:
        report = load_full(model, state, strict=options.strict, keep_meta=True)
    except ModelMismatch as error:
        if not (error.missing_keys or error.unexpected_keys or error.mismatched_keys):
            raise
        raise _in_torchs_words(model, error) from error
    for module, value in extra:
        module.set_extra_state(value)
    return _IncompatibleKeys(report.missing_keys, report.unexpected_keys)


def _not_ours(model: nn.Module, options: StateDictOptions) -> bool:
    """Whether names, layouts or values of the model are known to torch's function alone."""
    return bool(loading_of_its_own(model)) or any(
        isinstance(module, FullyShardedDataParallel) or hasattr(module, options.dsd_fqn_modifiers)
        for module in model.modules()
    )


def _by_name(model: nn.Module, state: Mapping[Any, Any]) -> dict[Any, Any]:
    """A new dict by names of the model; ``state`` may have modules for keys, each with a dict of its own."""
    flat: dict[Any, Any] = {}
    for key, value in state.items():
        if not isinstance(key, nn.Module):
            flat[key] = value
            continue
        paths = [path for path, module in model.named_modules(remove_duplicate=False) if module is key]
        if not paths:  # a stray key like others, so that every rank hears of it
            paths = [f"<{type(key).__name__}, which is no module of the model>"]
        for path in paths:
            flat.update({f"{path}.{name}" if path else name: part for name, part in value.items()})
    return flat


def _share_extra_state(model: nn.Module, state: dict[Any, Any], strict: bool) -> list[tuple[nn.Module, Any]]:
    """Takes the extra state of modules out of rank 0's dict, and gives each rank that of its modules.

    What else is no tensor, and so is for nothing in the model, becomes an empty tensor, to be told of by its key.

    Raises:
        ModelMismatch: some is missing (with ``strict``); on every rank.
    """
    modules = {
        f"{path}.{_EXTRA}" if path else _EXTRA: module
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
    aliases = wrapper_aliases(model, list(modules))
    by_name = {strip_wrappers(name, aliases): module for name, module in modules.items()}
    given = {}
    for key in list(state):
        if isinstance(key, str) and (name := strip_wrappers(key, aliases)) in by_name:
            given[name] = state.pop(key)
        elif not isinstance(state[key], Tensor):
            state[key] = Tensor()  # torch lets such an entry pass where keys may be unexpected
    if not by_name:
        return []
    if dist.is_initialized():
        shared = [given]
        dist.broadcast_object_list(shared, src=0)
        given = shared[0]
    if strict and (missing := [name for name in by_name if name not in given]):
        raise _in_torchs_words(model, ModelMismatch(missing_keys=missing))
    return [(module, given[name]) for name, module in by_name.items() if name in given]


def _in_torchs_words(model: nn.Module, error: ModelMismatch) -> ModelMismatch:
    """As ``nn.Module.load_state_dict`` says it, followed by what epload says."""
    said = []
    for title, keys in (("Missing", error.missing_keys), ("Unexpected", error.unexpected_keys)):
        if keys:
            said.append(f"{title} key(s) in state_dict: " + ", ".join(f'"{key}"' for key in keys) + ". ")
    said += [f"size mismatch for {name}: {text}." for name, text in error.mismatched_keys.items()]
    if str(error):
        said.append(str(error))
    made = ModelMismatch(f"Error(s) in loading state_dict for {type(model).__name__}:\n\t" + "\n\t".join(said))
    made.adopt(error)
    return made
