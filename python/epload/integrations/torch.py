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

from epload.errors import ModelMismatch
from epload.integrations.full_state import find_custom_loading, load_full
from epload.mapping.wrappers import strip_wrappers, wrapper_aliases

_original = original.set_model_state_dict
_EXTRA = "_extra_state"


def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[Any, Any], *, options: StateDictOptions | None = None
) -> _IncompatibleKeys:
    """Drop-in for torch's function with ``full_state_dict=True`` and ``broadcast_from_rank0=True``. Collective.

    Torch's own function is called for other options, for FSDP1 models, and for models with a module that renames its keys by
    ``dsd_fqn_modifiers`` or has custom loading code (hooks or methods). ``cpu_offload`` is ignored, because parameters stay
    on their device. The remaining options have no effect in torch's function either. Modules as keys, which are deprecated in
    torch, are unexpected keys.

    Non-persistent buffers that are on meta on some ranks are filled from a rank that has them, where torch leaves them on meta.
    With ``strict=False``, tensors on meta that no rank has stay on meta. Extra state (``set_extra_state``) comes from rank 0.

    Args:
        model: the model to fill in place.
        model_state_dict: full tensors by name. Only rank 0's is read.
        options: torch's options.

    Returns:
        The missing and unexpected keys.

    Raises:
        ModelMismatch: a key is missing or unexpected (unless ``strict=False``) or has another shape. The message has torch's
            text, and ModelMismatch is a RuntimeError, which torch raises. On every rank, and nothing has moved.
    """
    if (
        options is None
        or not (options.full_state_dict and options.broadcast_from_rank0)
        or find_custom_loading(model)
        or any(
            isinstance(module, FullyShardedDataParallel) or hasattr(module, options.dsd_fqn_modifiers)
            for module in model.modules()
        )
    ):
        return _original(model, model_state_dict, options=options)  # type: ignore[arg-type]
    reads = not dist.is_initialized() or dist.get_rank() == 0
    state = {_text(key): value for key, value in model_state_dict.items()} if reads else {}
    extra = _broadcast_extra_state(model, state, options.strict)
    try:
        report = load_full(model, state, strict=options.strict, keep_meta=True)
    except ModelMismatch as error:
        if not (error.missing_keys or error.unexpected_keys or error.mismatched_keys):
            raise
        raise _with_torch_text(model, error) from error
    for module, value in extra:
        module.set_extra_state(value)
    return _IncompatibleKeys(report.missing_keys, report.unexpected_keys)


def _text(key: Any) -> Any:
    return f"<{type(key).__name__}, which is a module and not a name>" if isinstance(key, nn.Module) else key


def _broadcast_extra_state(model: nn.Module, state: dict[Any, Any], strict: bool) -> list[tuple[nn.Module, Any]]:
    """Removes extra state from rank 0's dict and broadcasts it. Returns each module of this rank with its extra state.

    Other entries that are not tensors are replaced by empty tensors, so that they are reported as unexpected keys.

    Raises:
        ModelMismatch: extra state is missing and ``strict`` is set. On every rank.
    """
    modules = {
        f"{path}.{_EXTRA}" if path else _EXTRA: module
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
    aliases = wrapper_aliases(model, list(modules))
    by_name = {strip_wrappers(name, aliases): module for name, module in modules.items()}
    values = {}
    for key in list(state):
        if isinstance(key, str) and (name := strip_wrappers(key, aliases)) in by_name:
            values[name] = state.pop(key)
        elif not isinstance(state[key], Tensor):
            state[key] = Tensor()  # torch ignores such an entry with strict=False
    if not by_name:
        return []
    if dist.is_initialized():
        shared = [values]
        dist.broadcast_object_list(shared, src=0)
        values = shared[0]
    if strict and (missing := [name for name in by_name if name not in values]):
        raise _with_torch_text(model, ModelMismatch(missing_keys=missing))
    return [(module, values[name]) for name, module in by_name.items() if name in values]


def _with_torch_text(model: nn.Module, error: ModelMismatch) -> ModelMismatch:
    """Returns the error with the text of ``nn.Module.load_state_dict``, followed by epload's."""
    lines = []
    for title, keys in (("Missing", error.missing_keys), ("Unexpected", error.unexpected_keys)):
        if keys:
            lines.append(f"{title} key(s) in state_dict: " + ", ".join(f'"{key}"' for key in keys) + ". ")
    lines += [f"size mismatch for {name}: {text}." for name, text in error.mismatched_keys.items()]
    lines += [str(error)] if str(error) else []
    combined = ModelMismatch(f"Error(s) in loading state_dict for {type(model).__name__}:\n\t" + "\n\t".join(lines))
    combined.copy_keys(error)
    return combined
