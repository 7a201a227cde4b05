"""The tensors that an engine's ``load_weights`` fills, found by the memory that is written, and boxes of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from epload.core.placement import Box
from epload.core.views import Loop, View, boxes_of_region, coalesced
from epload.errors import ModelMismatch
from epload.model.memory import find_overlap, has_internal_overlap, storage_of

_MAX_BOXES = 1 << 13
"""Maximum number of boxes of one write; a tensor that is written in more goes through ``load_weights``."""


class EngineTargets:
    """Plain tensors by name. Tensors with the same elements, such as a weight and a view of it that a kernel takes, are one
    target, under the first of their names."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ValueError or ModelMismatch if a tensor cannot be written box by box."""
        self.tensors: dict[str, Tensor] = {}
        self._by_storage: dict[int, list[str]] = {}
        names: dict[object, str] = {}
        for name, tensor in tensors.items():
            if tensor.layout != torch.strided or has_internal_overlap(tensor):
                raise ValueError(f"expected targets that are dense, but {name} is not; leave it out")
            storage = storage_of(tensor)
            loops = [Loop(size, stride, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
            key = storage, int(tensor.storage_offset()), tuple(coalesced(loops)), tensor.dtype
            if tensor.numel() and names.setdefault(key, name) == name:
                self.tensors[name] = tensor
                self._by_storage.setdefault(storage, []).append(name)
        real = [(name, tensor) for name, tensor in self.tensors.items() if not tensor.is_meta]
        if pair := find_overlap(real):
            raise ModelMismatch(f"the targets {pair[0]} and {pair[1]} share part of their memory; leave one of them out")
        self.device = real[0][1].device if real else torch.device("cpu")

    def share_storage(self, tensor: Tensor) -> bool:
        """Returns True if a tensor is in the storage of targets."""
        return tensor.numel() > 0 and storage_of(tensor) in self._by_storage

    def containing(self, tensor: Tensor) -> str | None:
        """Returns a target whose storage a tensor shares; None if it shares none, or that of several."""
        names = self._by_storage.get(storage_of(tensor), ())
        return names[0] if len(names) == 1 else None

    def locate(self, tensor: Tensor, origin: Tensor | None = None) -> tuple[str, list[View]] | None:
        """Returns the target of which a tensor is a region, and the boxes of the target that the region consists of.

        Args:
            origin: a tensor of the same shape. Each view is the region of its storage that fills the box.

        Returns:
            None if it is not within one target, has another dtype, or consists of too many boxes.
        """
        source = tensor if origin is None else origin
        loops = [Loop(*loop) for loop in zip(tensor.shape, tensor.stride(), source.stride(), strict=True)]
        for name in self._by_storage.get(storage_of(tensor), ()):
            target = self.tensors[name]
            offset = int(tensor.storage_offset()) - int(target.storage_offset())
            try:
                boxes = boxes_of_region(tuple(target.shape), tuple(target.stride()), offset, loops, int(source.storage_offset()))
                views = list(islice(boxes, _MAX_BOXES + 1))
            except ValueError:
                continue
            return (name, views) if len(views) <= _MAX_BOXES and tensor.dtype == target.dtype else None
        return None


class Cells:
    """The overlap grid of boxes: the cells into which their boundaries divide a tensor."""

    def __init__(self, shape: Sequence[int], boxes: Sequence[Box]) -> None:
        self._cuts = [
            sorted({0, length}.union(*((start[dim], start[dim] + size[dim]) for start, size in boxes)))
            for dim, length in enumerate(shape)
        ]
        self.last = torch.full([len(cuts) - 1 for cuts in self._cuts], -1, dtype=torch.int32)
        """Index of the last box that covers each cell; -1 if none does."""
        self.overlaps: list[tuple[int, int]] = []
        """Indices of boxes that cover a cell one after the other."""
        for i, box in enumerate(boxes):
            ends = zip(self._cuts, *box, strict=True)
            slices = (slice(bisect_left(cuts, start), bisect_left(cuts, start + size)) for cuts, start, size in ends)
            covered = self.last[tuple(slices)]
            self.overlaps += [(other, i) for other in torch.unique(covered).tolist() if other >= 0]
            covered.fill_(i)

    def covered(self) -> int:
        """Returns the number of elements in boxes."""
        sizes = torch.ones((), dtype=torch.int64)
        for cuts in self._cuts:
            sizes = sizes[..., None] * torch.tensor(cuts, dtype=torch.int64).diff()
        return int(sizes[self.last >= 0].sum())

    def boxes_of(self, index: int) -> list[Box]:
        """Returns the cells that a box covers last."""
        boxes = []
        for cell in (self.last == index).nonzero().tolist():
            ends = [(cuts[i], cuts[i + 1]) for cuts, i in zip(self._cuts, cell, strict=True)]
            boxes.append((tuple(a for a, _ in ends), tuple(b - a for a, b in ends)))
        return boxes


def covers(tensor: Tensor, boxes: Sequence[Box]) -> bool:
    """Returns True if boxes cover a tensor but for padding, which vLLM declares by the number of elements that it loads."""
    if 0 in tensor.shape:
        return True
    return Cells(tensor.shape, boxes).covered() >= getattr(tensor, "weight_loader_numel", tensor.numel())
