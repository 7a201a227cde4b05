"""Looks at the memory of tensors: elements that share it, elements that nothing has written since they were poisoned, and tensors
that have none.

Version counters would miss writes through ``tensor.data``, and comparing values would require the right ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epload.native import ops

_MAX_COMPARED_ELEMENTS = 1 << 20
"""Elements of the largest tensors that are compared one by one where strides do not decide; larger ones count as overlapping."""
_FLOAT_BYTE, _OTHER_BYTE = 0xFF, 0xA5
"""The byte of the poison. In every floating-point format all ones is a NaN, and not one that arithmetic produces."""
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def storage_of(tensor: Tensor) -> int:
    """Identifies a storage that is alive, on meta, too."""
    return int(tensor.untyped_storage()._cdata)


def has_internal_overlap(tensor: Tensor) -> bool:
    """Returns True if two elements of a tensor share memory, as in an expanded or unfolded tensor."""
    extent = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= extent:
            undecided = tensor.numel() > _MAX_COMPARED_ELEMENTS
            return undecided or len(torch.unique(_addresses(tensor))) < tensor.numel()
        extent += (size - 1) * stride
    return False


def may_overlap(described: Tensor) -> bool:
    """Returns True if tensors may share memory. ``described``: their addresses, as in the first columns of
    :func:`epload.native.ops.describe_memory`."""
    begin, order = described[:, 0].sort()
    end = described[order, 1]
    return bool((end[:-1] > begin[1:]).any())


def find_overlap(tensors: Sequence[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """Returns the names of two tensors that share memory, None if there are none."""
    spans = []
    for name, tensor in tensors:
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            spans.append((begin, begin + (last + 1) * tensor.element_size(), name, tensor))
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
    return bool(torch.isin(_addresses(a), _addresses(b)).any())


def _addresses(tensor: Tensor) -> Tensor:
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
    return offsets.reshape(-1) * tensor.element_size() + tensor.data_ptr()


def wraps_tensors(kind: type[Tensor]) -> bool:
    """Returns True for a class whose tensors may have no memory of their own, as those of libraries for quantized weights."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def keeps_writes(tensor: Tensor) -> bool:
    """Returns True if an op of epload that writes to a tensor changes it, and one that reads it later reads its memory. A class
    may hand each argument of an op a copy of its elements, such as dequantized ones, which is freed after the op."""
    if tensor.is_meta or not tensor.numel() or not wraps_tensors(type(tensor)):
        return True
    try:
        first, second = ops.describe_memory([tensor, tensor])[:, 0].tolist()
    except (RuntimeError, ValueError, NotImplementedError, TypeError):
        return False
    return bool(first and first == second)


def poison(tensor: Tensor) -> None:
    """Fills a plain tensor of any dtype, strides and device with a pattern that shows whether anything is written later."""
    integers, pattern = _as_integers(tensor)
    with torch.no_grad():
        integers.fill_(pattern)


def is_poisoned(tensor: Tensor) -> bool:
    """Returns True if any element still holds the pattern; for one-byte integers, where it is an ordinary value, if all do."""
    if not tensor.numel():
        return False
    integers, pattern = _as_integers(tensor)
    unwritten = integers == pattern
    is_byte = tensor.dtype in (torch.uint8, torch.int8)
    return bool(unwritten.all() if is_byte else unwritten.any())


def _as_integers(tensor: Tensor) -> tuple[Tensor, int]:
    """Returns a view of the tensor as integers of the same size, and the pattern as such an integer."""
    tensor = tensor.detach()
    byte = _FLOAT_BYTE if tensor.is_floating_point() or tensor.is_complex() else _OTHER_BYTE
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    dtype = _INTEGER_OF_SIZE[tensor.dtype.itemsize]
    return tensor.view(dtype), int.from_bytes(bytes([byte]) * dtype.itemsize, "little", signed=dtype.is_signed)
