"""The tensors that an engine's ``load_weights`` fills, found by the memory that is written, and boxes of them."""

from __future__ import annotations

from bisect import bisect_left
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

_MAX_BOXES = 1 << 13
"""Maximum number of boxes of one write; a tensor that is written in more goes through ``load_weights``."""


class EngineTargets:
    """Plain tensors by name. Names of the same tensor are one target, under the first of them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ValueError or ModelMismatch if a tensor cannot be written box by box."""
        self.tensors: dict[str, Tensor] = {}
        self._by_storage: dict[int, list[str]] = {}
        self._before = [(name, tensor, tensor.detach()) for name, tensor in tensors.items()]
        names: dict[tuple[object, ...], str] = {}
        for name, tensor in tensors.items():
            if tensor.layout != torch.strided or memory.has_internal_overlap(tensor):
                raise ValueError(f"expected targets that are dense, but {name} is not; leave it out")
            if tensor.numel() == 0:
                self.tensors[name] = tensor
            elif names.setdefault(_same_memory(tensor), name) == name:
                self.tensors[name] = tensor
                self._by_storage.setdefault(storage_of(tensor), []).append(name)
        real = [(name, tensor) for name, tensor in self.tensors.items() if not tensor.is_meta]
        if pair := memory.find_overlap(real):
            raise ModelMismatch(f"the targets {pair[0]} and {pair[1]} share part of their memory; leave one of them out")
        self.device = real[0][1].device if real else torch.device("cpu")

    def sharing(self, tensor: Tensor) -> Sequence[str]:
        """Returns the targets in the storage of a tensor."""
        return self._by_storage.get(storage_of(tensor), ())

    def locate(self, tensor: Tensor, origin: Tensor | None = None) -> tuple[str, list[View]] | None:
        """Returns the target of which a tensor is a region, and the boxes of the target that the region consists of.

        Args:
            origin: a tensor of the same shape. Each view is the region of its storage that fills the box.

        Returns:
            None if it is not within one target, has a dtype of another size, or consists of too many boxes.
        """
        strides = (0,) * tensor.ndim if origin is None else origin.stride()
        loops = [Loop(*loop) for loop in zip(tensor.shape, tensor.stride(), strides, strict=True)]
        first = 0 if origin is None else int(origin.storage_offset())
        for name in self.sharing(tensor):
            target = self.tensors[name]
            offset = int(tensor.storage_offset()) - int(target.storage_offset())
            try:
                boxes = boxes_of_region(tuple(target.shape), tuple(target.stride()), offset, loops, first)
                views = list(islice(boxes, _MAX_BOXES + 1))
            except ValueError:
                continue
            return (name, views) if len(views) <= _MAX_BOXES and tensor.itemsize == target.itemsize else None
        return None

    def restore(self) -> str:
        """Gives targets back the memory that they had at first; returns the name of one that had another, or an empty string."""
        moved = [entry for entry in self._before if _same_memory(entry[1]) != _same_memory(entry[2])]
        for _, tensor, before in moved:
            tensor.data = before
        return moved[0][0] if moved else ""


def storage_of(tensor: Tensor) -> int:
    """Identifies a storage that is alive, on meta, too."""
    return int(tensor.untyped_storage()._cdata)


def _same_memory(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two tensors only if they are the same elements of one storage."""
    return storage_of(tensor), int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype


def whole_box(tensor: Tensor) -> Box:
    return (0,) * tensor.ndim, tuple(tensor.shape)


class Cells:
    """The cells into which the boundaries of boxes divide a tensor."""

    def __init__(self, shape: Sequence[int], boxes: Sequence[Box]) -> None:
        self._cuts = [
            sorted({0, length, *(start[dim] for start, _ in boxes), *(start[dim] + size[dim] for start, size in boxes)})
            for dim, length in enumerate(shape)
        ]
        self.last = torch.full([len(cuts) - 1 for cuts in self._cuts], -1, dtype=torch.int32)
        """Index of the last box that covers each cell; -1 if none does."""
        self.overlaps: list[tuple[int, int]] = []
        """Indices of boxes that cover a cell one after the other."""
        for i, (start, size) in enumerate(boxes):
            covered = self.last[
                tuple(
                    slice(bisect_left(cuts, begin), bisect_left(cuts, begin + length))
                    for cuts, begin, length in zip(self._cuts, start, size, strict=True)
                )
            ]
            if bool((covered >= 0).any()):
                self.overlaps += [(j, i) for j in covered.unique().tolist() if j >= 0]
            covered.fill_(i)

    def boxes_of(self, index: int) -> list[Box]:
        """Returns the cells that a box covers last."""
        found = (self.last == index).nonzero().tolist()
        starts = [tuple(cuts[i] for cuts, i in zip(self._cuts, cell, strict=True)) for cell in found]
        ends = [tuple(cuts[i + 1] for cuts, i in zip(self._cuts, cell, strict=True)) for cell in found]
        return [(start, tuple(map(int.__sub__, end, start))) for start, end in zip(starts, ends, strict=True)]


def covers(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Returns True if boxes cover a tensor."""
    return 0 in shape or bool((Cells(shape, boxes).last >= 0).all())


class WriteGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, notes what is written to targets; raises LoadError before a write to certain boxes of them.

    For an engine's own ``load_weights``, which may write more than a trace could see.
    """

    def __init__(self, targets: EngineTargets, protected: Mapping[str, Sequence[Box]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._targets = targets
        self._protected = protected
        self.written: dict[str, list[Box]] = {}
        """Boxes that were written, by target. Writes from other threads are not seen."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in split_arguments(func, args, kwargs or {})[0]:
            names = self._targets.sharing(tensor)
            written = {name: [whole_box(self._targets.tensors[name])] for name in names}
            if names and (located := self._targets.locate(tensor)) is not None:
                written = {located[0]: [(view.start, view.size) for view in located[1]]}
            for name, boxes in written.items():
                for box in self._protected.get(name, ()):
                    if any(intersect(box, other) is not None for other in boxes):
                        raise LoadError(
                            f"load_weights was to write other tensors alone, but it writes {name} at {list(box[0])}, where a "
                            "recorded tensor goes; do not record this engine"
                        )
                if len(written) == 1:
                    self.written.setdefault(name, []).extend(boxes)
        return func(*args, **(kwargs or {}))


def split_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the tensors among an operation's arguments that it changes, and the others."""
    changed = _changed_arguments(func)
    split: tuple[list[Tensor], list[Tensor]] = [], []
    for key, value in (*enumerate(args), *kwargs.items()):
        split[key not in changed].extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return split


@cache
def _changed_arguments(func: Any) -> frozenset[int | str]:
    """The position and the name of each argument that an operation changes."""
    arguments = enumerate(func._schema.arguments)
    return frozenset(
        key for i, arg in arguments if arg.alias_info and arg.alias_info.is_write for key in (i, arg.name)
    )
