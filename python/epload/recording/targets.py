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
from epload.model import overlap
from epload.recording.provenance import Region


@dataclass(frozen=True)
class Place:
    """A region of one target."""

    name: str
    shape: Shape
    """Of the target."""
    strides: Shape
    """Of the target."""
    region: Region
    """Its offset is relative to the target."""
    same_dtype: bool
    """Whether it is written in the target's dtype."""

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
        known: dict[overlap.StorageKey, str] = {}
        for name, tensor in tensors.items():
            if tensor.layout != torch.strided or tensor.is_meta or overlap.has_internal_overlap(tensor):
                raise ValueError(f"expected targets that are dense and have storage, but {name} is not; leave it out")
            self._before.append((tensor, tensor.detach()))
            if tensor.numel() and known.setdefault(overlap.storage_key(tensor), name) != name:
                continue
            self.tensors[name] = tensor
            self._by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
        self._by_storage.pop(0, None)
        if pair := overlap.find_overlap(list(self.tensors.items())):
            raise ModelMismatch(
                f"the targets {pair[0]} and {pair[1]} share part of their memory; leave one of them out"
            )
        self.device = next((tensor.device for tensor in self.tensors.values()), torch.device("cpu"))

    def __contains__(self, storage: int) -> bool:
        """Whether a storage, given by its address, holds targets."""
        return storage in self._by_storage

    def find(self, tensor: Tensor) -> Place | None:
        """The place of a tensor whose storage holds targets; None if it is not within one of them."""
        for name in self._by_storage[tensor.untyped_storage().data_ptr()]:
            target = self.tensors[name]
            size, scale = tensor.element_size(), target.element_size()
            if size != scale:
                whole = Region(tuple(target.shape), tuple(target.stride()), 0)
                return Place(name, whole.size, whole.strides, whole, False)
            offset = int(tensor.storage_offset()) - int(target.storage_offset())
            region = Region(tuple(tensor.shape), tuple(tensor.stride()), offset)
            place = Place(name, tuple(target.shape), tuple(target.stride()), region, tensor.dtype == target.dtype)
            try:
                _ = place.boxes
            except ValueError:
                continue
            return place
        return None

    def restore(self) -> str:
        """The name of a target that has another memory than at first, which it gets back; empty if none has."""
        names = [
            tensor for tensor, before in self._before if overlap.storage_key(tensor) != overlap.storage_key(before)
        ]
        for tensor, before in self._before:
            if overlap.storage_key(tensor) != overlap.storage_key(before):
                tensor.data = before
        return next((name for name, tensor in self.tensors.items() if any(tensor is t for t in names)), "")
