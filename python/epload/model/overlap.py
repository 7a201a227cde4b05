"""Detects plain tensors with storage that overlap in memory, so that filling one element would overwrite another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MAX_COMPARED_ELEMENTS = 1 << 20
"""Maximum number of elements of tensors that are compared element by element where strides do not decide; larger ones count as
overlapping."""

StorageKey = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


def storage_key(tensor: Tensor) -> StorageKey:
    """Equal for two tensors only if they have the same elements of the same storage, with the same shape, strides and dtype."""
    offset = int(tensor.storage_offset())
    return tensor.untyped_storage().data_ptr(), offset, tensor.shape, tensor.stride(), tensor.dtype


def has_internal_overlap(tensor: Tensor) -> bool:
    """Returns True if two elements of a tensor share memory, as in an expanded or unfolded tensor."""
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    extent = 0
    for stride, size in dims:
        if stride <= extent:
            undecided = tensor.numel() > _MAX_COMPARED_ELEMENTS
            return undecided or len(torch.unique(_offsets(tensor))) < tensor.numel()
        extent += (size - 1) * stride
    return False


def find_overlap(tensors: Sequence[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """The names of two tensors that share memory, None if there are none."""
    spans: list[tuple[int, int, str, Tensor]] = []
    storages: set[int] = set()
    for name, tensor in tensors:
        if tensor.numel():
            storages.add(tensor.untyped_storage().data_ptr())
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            spans.append((begin, begin + (last + 1) * tensor.element_size(), name, tensor))
    if len(storages) == len(spans):
        return None
    spans.sort(key=lambda span: span[:2])
    for i, (_, end, name, tensor) in enumerate(spans):
        for begin, _, other_name, other in spans[i + 1 :]:
            if begin >= end:
                break
            if _share_elements(tensor, other):
                return name, other_name
    return None


def _share_elements(a: Tensor, b: Tensor) -> bool:
    """Returns True if tensors whose address ranges overlap share elements. Columns of one matrix do not."""
    if max(a.numel(), b.numel()) > _MAX_COMPARED_ELEMENTS or a.element_size() != b.element_size():
        return True
    addresses_a = _offsets(a) * a.element_size() + a.data_ptr()
    addresses_b = _offsets(b) * b.element_size() + b.data_ptr()
    return bool(torch.isin(addresses_a, addresses_b).any())


def _offsets(tensor: Tensor) -> Tensor:
    """The offset of each element from the first, in elements."""
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
    return offsets.reshape(-1)
