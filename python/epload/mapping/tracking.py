"""Runs torch operations on tensors without data, and follows which elements of which source each result has.

A tensor on meta has an :class:`Assembly` as its attribute ``assembly``. Operations that only move elements make results that have
one, too; all others are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from epload.core import views
from epload.core.views import Assembly

_aten = torch.ops.aten


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
        rule = _RULES.get(func.overloadpacket)
        if rule is None:
            raise ValueError("it computes values, which a mapping cannot do")
        result: Any = func(*args, **(kwargs or {}))
        source, *options = args
        tracked = rule(result, [t.assembly for t in source] if isinstance(source, list) else source.assembly, *options)
        if isinstance(tracked, Assembly):
            result.assembly = tracked
        else:
            for tensor, assembly in zip(result, tracked, strict=True):
                tensor.assembly = assembly
        return result


def _reshape(result: Tensor, source: Assembly, *_: object) -> Assembly:
    return views.reshape(source, result.shape)


def _concatenate(_: Tensor, sources: Sequence[Assembly], dim: int = 0) -> Assembly:
    return views.concatenate(sources, dim)


def _stack(_: Tensor, sources: Sequence[Assembly], dim: int = 0) -> Assembly:
    return views.stack(sources, dim)


def _transpose(_: Tensor, source: Assembly, dim0: int, dim1: int) -> Assembly:
    return views.transpose(source, dim0, dim1)


def _split(result: Sequence[Tensor], source: Assembly, _: object, dim: int = 0) -> list[Assembly]:
    return views.split(source, dim, [part.shape[dim] for part in result])


def _unbind(_: Sequence[Tensor], source: Assembly, dim: int = 0) -> list[Assembly]:
    return views.unstack(source, dim)


def _slice(
    result: Tensor, source: Assembly, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Assembly:
    if step != 1:
        raise ValueError(f"it takes every {step}th element, which a mapping cannot do")
    first, length = slice(start, end).indices(source.shape[dim])[0], result.shape[dim]
    return views.split(source, dim, [first, length, source.shape[dim] - first - length])[1]


_RULES: dict[Any, Callable[..., Any]] = {
    _aten.alias: _reshape,
    _aten.clone: _reshape,
    _aten.detach: _reshape,
    _aten.squeeze: _reshape,
    _aten.unsqueeze: _reshape,
    _aten.view: _reshape,
    _aten._unsafe_view: _reshape,
    _aten._reshape_alias: _reshape,
    _aten.cat: _concatenate,
    _aten.stack: _stack,
    _aten.transpose: _transpose,
    _aten.split: _split,
    _aten.split_with_sizes: _split,
    _aten.unbind: _unbind,
    _aten.slice: _slice,
}
"""Functions of an operation's result, of its source's assembly, and of its other arguments."""
