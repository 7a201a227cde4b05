"""The tensors that an engine's ``load_weights`` fills, found by the memory that is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from epload.core.placement import Box
from epload.core.views import Loop, Shape, boxes_of_region
from epload.errors import ModelMismatch
from epload.model import memory
from epload.recording.provenance import Region


@dataclass(frozen=True)
class Destination:
    """A region of one target."""

    name: str
    shape: Shape
    """Shape of the target."""
    strides: Shape
    """Strides of the target."""
    region: Region
    """Its offset is relative to the target."""
    same_dtype: bool
    """True if it is written in the target's dtype."""

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        loops = [Loop(*loop, 0) for loop in zip(self.region.size, self.region.strides, strict=True)]
        return tuple(
            (view.start, view.size) for view in boxes_of_region(self.shape, self.strides, self.region.offset, loops)
        )


class EngineTargets:
    """Plain tensors by name. Names of the same tensor are one target, under the first of them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ValueError or ModelMismatch if a tensor cannot be written box by box."""
        self.tensors: dict[str, Tensor] = {}
        self._by_storage: dict[int, list[str]] = {}
        self._before: list[tuple[Tensor, Tensor]] = []
        known: dict[tuple[object, ...], str] = {}
        for name, tensor in tensors.items():
            if tensor.layout != torch.strided or memory.has_internal_overlap(tensor):
                raise ValueError(f"expected targets that are dense, but {name} is not; leave it out")
            self._before.append((tensor, tensor.detach()))
            if tensor.numel() == 0:
                self.tensors[name] = tensor
            elif known.setdefault(_key(tensor), name) == name:
                self.tensors[name] = tensor
                self._by_storage.setdefault(storage_of(tensor), []).append(name)
        real = [(name, tensor) for name, tensor in self.tensors.items() if not tensor.is_meta]
        if pair := memory.find_overlap(real):
            text = f"the targets {pair[0]} and {pair[1]} share part of their memory; leave one of them out"
            raise ModelMismatch(text)
        self.device = next((tensor.device for _, tensor in real), torch.device("cpu"))

    def __contains__(self, storage: int) -> bool:
        """Returns True if a storage, given as by :func:`storage_of`, holds targets."""
        return storage in self._by_storage

    def find(self, tensor: Tensor) -> Destination | None:
        """The place of a tensor whose storage holds targets; None if it is not within one of them."""
        for name in self._by_storage[storage_of(tensor)]:
            target = self.tensors[name]
            size, scale = tensor.element_size(), target.element_size()
            if size != scale:
                whole = Region(tuple(target.shape), tuple(target.stride()), 0)
                return Destination(name, whole.size, whole.strides, whole, False)
            offset = int(tensor.storage_offset()) - int(target.storage_offset())
            region = Region(tuple(tensor.shape), tuple(tensor.stride()), offset)
            place = Destination(name, tuple(target.shape), tuple(target.stride()), region, tensor.dtype == target.dtype)
            try:
                _ = place.boxes
            except ValueError:
                continue
            return place
        return None

    def restore(self) -> str:
        """The name of a target that has another memory than at first, which it gets back; empty if none has."""
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
