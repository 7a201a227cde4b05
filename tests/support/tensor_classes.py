"""Tensor subclasses that stand for those of libraries that quantize weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


class Wrapped(Tensor):
    """Stands for another tensor, as a weight does that FSDP casts to float8 before it is gathered."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        unwrapped, options = tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return func(*unwrapped, **options)

    def whole(self) -> Tensor:
        """Returns the tensor for operations that the class does not know."""
        return self.inner


class Halved(Wrapped):
    """Keeps half of its elements' values, and hands out the whole values, as a quantized weight does."""

    def whole(self) -> Tensor:
        return self.inner * 2


class Opaque(Wrapped):
    """Knows no operation that reads its elements."""

    def whole(self) -> Tensor:
        raise NotImplementedError


class Requantized(Halved):
    """Writes back what an op has changed of the values that it was given, all of them at a scale of the largest."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped: list[Tensor] = []

        def whole(tensor: Requantized) -> Tensor:
            unwrapped.append(tensor.whole())
            return unwrapped[-1]

        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        result = func(*tree_map_only(cls, whole, args), **(kwargs or {}))
        own = [tensor for tensor in tree_leaves(args) if isinstance(tensor, cls)]
        for tensor, values in zip(own, unwrapped, strict=True) if func._schema.is_mutable else ():
            scale = values.abs().max() / 8
            tensor.inner.copy_((values / scale).round() * scale / 2)
        return result
