"""The tensors that an engine's ``load_weights`` fills, identified by the memory that is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from epload.core.placement import Box, intersect
from epload.core.views import Loop, View, boxes_of_region
from epload.errors import LoadError, ModelMismatch
from epload.model import memory

MAX_VIEWS = 1 << 14
"""Maximum boxes of one write; a tensor that is written in more is transferred in full."""


class EngineTargets:
    """Plain tensors by name. Names of the same tensor are one target, under the first of them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ValueError or ModelMismatch if a tensor cannot be written box by box."""
        self.tensors: dict[str, Tensor] = {}
        self._by_storage: dict[int, list[str]] = {}
        self._before: list[tuple[Tensor, Tensor]] = []
        names: dict[tuple[object, ...], str] = {}
        for name, tensor in tensors.items():
            if tensor.layout != torch.strided or memory.has_internal_overlap(tensor):
                raise ValueError(f"expected targets that are dense, but {name} is not; leave it out")
            self._before.append((tensor, tensor.detach()))
            if tensor.numel() == 0:
                self.tensors[name] = tensor
            elif names.setdefault(_key(tensor), name) == name:
                self.tensors[name] = tensor
                self._by_storage.setdefault(storage_of(tensor), []).append(name)
        real = [(name, tensor) for name, tensor in self.tensors.items() if not tensor.is_meta]
        if pair := memory.find_overlap(real):
            text = f"the targets {pair[0]} and {pair[1]} share part of their memory; leave one of them out"
            raise ModelMismatch(text)
        self.device = next((tensor.device for _, tensor in real), torch.device("cpu"))

    def sharing(self, tensor: Tensor) -> Sequence[str]:
        """Returns the targets in the storage of a tensor."""
        return self._by_storage.get(storage_of(tensor), ())

    def locate(self, tensor: Tensor, origin: Tensor | None = None) -> tuple[str, list[View]] | None:
        """Returns the target of which a tensor is a region, and the boxes of the target that the region consists of.

        Args:
            tensor: in the storage of targets.
            origin: a tensor of the same shape. Each view is the region of its storage that fills the box. If there are more
                than ``MAX_VIEWS``, the rest is left out.

        Returns:
            None if it is not within one target, or has a dtype of another size.
        """
        others = (0,) * tensor.ndim if origin is None else origin.stride()
        loops = [Loop(*loop) for loop in zip(tensor.shape, tensor.stride(), others, strict=True)]
        first = 0 if origin is None else int(origin.storage_offset())
        for name in self.sharing(tensor):
            target = self.tensors[name]
            if tensor.element_size() != target.element_size():
                return None
            offset = int(tensor.storage_offset()) - int(target.storage_offset())
            try:
                views = boxes_of_region(tuple(target.shape), tuple(target.stride()), offset, loops, first)
                return name, list(views if origin is None else islice(views, MAX_VIEWS + 1))
            except ValueError:
                continue
        return None

    def restore(self) -> str:
        """Gives targets back the memory that they had at first; returns the name of one that had another, or an empty string."""
        moved = [(tensor, before) for tensor, before in self._before if _key(tensor) != _key(before)]
        for tensor, before in moved:
            tensor.data = before
        return next((name for name, tensor in self.tensors.items() if any(tensor is other for other, _ in moved)), "")


def storage_of(tensor: Tensor) -> int:
    """Identifies a storage that is alive, on meta, too."""
    return int(tensor.untyped_storage()._cdata)


def _key(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two tensors only if they are the same elements of one storage."""
    return storage_of(tensor), int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype


def whole_box(tensor: Tensor) -> Box:
    return (0,) * tensor.ndim, tuple(tensor.shape)


class WriteGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, an operation that would write to certain boxes of the targets raises LoadError instead.

    For an engine's own ``load_weights``, which may write more than a recording could see.
    """

    def __init__(self, targets: EngineTargets, boxes: Mapping[str, Sequence[Box]]) -> None:
        """``boxes``: by target, those that nothing may write."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._targets = targets
        self._boxes = boxes
        self.written: dict[str, list[Box]] = {}
        """Boxes that were written, by target. Writes from other threads are not seen."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for tensor in split_arguments(func, args, kwargs)[0]:
                self._check(tensor)
        return func(*args, **kwargs)

    def _check(self, tensor: Tensor) -> None:
        names = self._targets.sharing(tensor)
        located = self._targets.locate(tensor) if names else None
        boxes = {name: [whole_box(self._targets.tensors[name])] for name in names}
        if located is not None:
            boxes = {located[0]: [(view.start, view.size) for view in located[1]]}
        for name in boxes:
            for box in self._boxes.get(name, ()):
                if any(intersect(box, other) is not None for other in boxes[name]):
                    raise LoadError(
                        f"load_weights was to write other tensors alone, but it writes {name} at {list(box[0])}, where a "
                        "recorded tensor goes; do not record this engine"
                    )
        if len(boxes) == 1:
            ((name, written),) = boxes.items()
            self.written.setdefault(name, []).extend(written)


def split_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the tensors among an operation's arguments that it changes, and the others."""
    writes = _write_arguments(func)
    written: list[Tensor] = []
    others: list[Tensor] = []
    for key, value in (*enumerate(args), *kwargs.items()):
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        (written if key in writes else others).extend(tensors)
    return written, others


@cache
def _write_arguments(func: Any) -> frozenset[int | str]:
    """The position and the name of each argument that an operation changes."""
    arguments = enumerate(func._schema.arguments)
    changed = [(i, argument.name) for i, argument in arguments if argument.alias_info and argument.alias_info.is_write]
    return frozenset(key for pair in changed for key in pair)
