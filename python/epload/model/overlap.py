"""Whether tensors share memory in a way that filling them one after the other would be wrong. For plain tensors with storage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_COUNTED = 1 << 20
"""Tensors of up to so many elements are looked at element by element where strides alone do not tell."""

Memory = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


def memory_of(tensor: Tensor) -> Memory:
    """Equal for two tensors only if they are one under two names: the same elements of the same storage, seen alike."""
    offset = int(tensor.storage_offset())
    return tensor.untyped_storage().data_ptr(), offset, tensor.shape, tensor.stride(), tensor.dtype


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two of its elements are the same memory, as in an expanded or unfolded tensor."""
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return not _all_distinct(tensor)
        reach += (size - 1) * stride
    return False


def overlapping(tensors: Sequence[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """The names of two tensors that share some of their memory; None if there are none."""
    spans: list[tuple[int, int, str, Tensor]] = []
    by_storage: dict[int, int] = {}
    for name, tensor in tensors:
        if tensor.numel():
            pointer = tensor.untyped_storage().data_ptr()
            by_storage[pointer] = by_storage.get(pointer, 0) + 1
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            spans.append((begin, begin + (last + 1) * tensor.element_size(), name, tensor))
    if len(by_storage) == len(spans):
        return None
    spans.sort(key=lambda span: span[:2])
    for at, (_, end, name, tensor) in enumerate(spans):
        for begin, _, other, second in spans[at + 1 :]:
            if begin >= end:
                break
            if _share_elements(tensor, second):
                return name, other
    return None


def _all_distinct(tensor: Tensor) -> bool:
    if tensor.numel() > _COUNTED:
        return False
    offsets = _offsets(tensor)
    return len(torch.unique(offsets)) == len(offsets)


def _share_elements(a: Tensor, b: Tensor) -> bool:
    """``a`` and ``b`` reach into each other's span of memory; columns of one matrix do that and share nothing."""
    if max(a.numel(), b.numel()) > _COUNTED or a.element_size() != b.element_size():
        return True
    first = _offsets(a) * a.element_size() + a.data_ptr()
    second = _offsets(b) * b.element_size() + b.data_ptr()
    return bool(torch.isin(first, second).any())


def _offsets(tensor: Tensor) -> Tensor:
    """Of each element from the first, in elements."""
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
    return offsets.reshape(-1)
