"""Runs torch operations on tensors without data, and follows which elements of which source each result has.

A tensor on meta has an :class:`Assembly` as its attribute ``assembly``. Operations that only move elements make results that have
one, too; all others are errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from epload.core import views
from epload.core.views import Assembly

_aten = torch.ops.aten
_KEEP_ORDER = {
    _aten.alias.default, _aten.clone.default, _aten.detach.default, _aten.squeeze.default, _aten.squeeze.dim,
    _aten.squeeze.dims, _aten.unsqueeze.default, _aten.view.default, _aten._unsafe_view.default,
    _aten._reshape_alias.default,
}  # fmt: skip
"""Operations whose results have the same elements in the same order, perhaps in another shape."""
_SYMBOLIC: dict[Any, Callable[..., Any]] = {
    _aten.cat.default: views.concatenate,
    _aten.stack.default: views.stack,
    _aten.transpose.int: views.transpose,
    _aten.t.default: lambda source, _: views.transpose(source, 0, -1),
    _aten.permute.default: views.permute,
    _aten.select.int: lambda source, dim, index: views.unstack(source, dim)[index],
    _aten.unbind.int: views.unstack,
}
_SPLITS = {_aten.split.Tensor, _aten.split_with_sizes.default}


def track(assembly: Assembly) -> Any:
    """Returns a tensor on meta that stands for an assembly."""
    tensor: Any = torch.empty(assembly.shape, device="meta")
    tensor.assembly = assembly
    return tensor


class ElementTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the results of operations their assemblies. Raises ValueError for operations that compute values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _KEEP_ORDER | _SYMBOLIC.keys() | _SPLITS | {_aten.slice.Tensor}:
            raise ValueError(f"it computes values ({func}), which a mapping cannot do")
        result: Any = func(*args, **(kwargs or {}))
        first, *options = args
        source: Any = [tensor.assembly for tensor in first] if isinstance(first, list) else first.assembly
        if func in _KEEP_ORDER:
            result.assembly = views.reshape(source, result.shape)
        elif func is _aten.slice.Tensor:
            result.assembly = _slice(result, source, *options)
        elif func in _SPLITS:
            dim = options[1] if len(options) > 1 else 0
            _set_assemblies(result, views.split(source, dim, [part.shape[dim] for part in result]))
        else:
            _set_assemblies(result, _SYMBOLIC[func](source, *(options or [0])))
        return result


def _set_assemblies(results: Any, assemblies: Any) -> None:
    pairs = [(results, assemblies)] if isinstance(assemblies, Assembly) else zip(results, assemblies, strict=True)
    for tensor, assembly in pairs:
        tensor.assembly = assembly


def _slice(
    result: Tensor, source: Assembly, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Assembly:
    if step != 1:
        raise ValueError(f"it takes every {step}th element, which a mapping cannot do")
    first, length = slice(start, end).indices(source.shape[dim])[0], result.shape[dim]
    return views.split(source, dim, [first, length, source.shape[dim] - first - length])[1]
