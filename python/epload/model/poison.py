"""Poisons memory, to detect later that nothing has written to it.

Version counters would miss writes through ``tensor.data``, and comparing values would require the right ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FLOAT_BYTE, _OTHER_BYTE = 0xFF, 0xA5
"""The byte that is repeated. In every floating-point format all ones is a NaN, and not one that arithmetic produces."""
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def poison(tensor: Tensor) -> None:
    """Fills a plain tensor of any dtype, strides and device with the pattern."""
    integers, pattern = _as_integers(tensor)
    with torch.no_grad():
        integers.fill_(pattern)


def is_poisoned(tensor: Tensor) -> bool:
    """Returns True if any element still holds the pattern; of one-byte integers, where it is an ordinary value, if all do."""
    if not tensor.numel():
        return False
    integers, pattern = _as_integers(tensor)
    unwritten = integers == pattern
    is_byte = tensor.dtype in (torch.uint8, torch.int8)
    return bool(unwritten.all() if is_byte else unwritten.any())


def _as_integers(tensor: Tensor) -> tuple[Tensor, int]:
    """A view of the tensor as integers of the same size, and the pattern as such an integer."""
    tensor = tensor.detach()
    is_float = tensor.is_floating_point() or tensor.is_complex()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    dtype = _INTEGER_OF_SIZE[tensor.dtype.itemsize]
    pattern = bytes([_FLOAT_BYTE if is_float else _OTHER_BYTE]) * dtype.itemsize
    return tensor.view(dtype), int.from_bytes(pattern, "little", signed=dtype.is_signed)
