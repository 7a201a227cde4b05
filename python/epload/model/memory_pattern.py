"""Marks memory that nobody has written yet, so that what stays unwritten is found however it could have been written.

Version counters would miss writes through ``tensor.data``, and comparing values would need to know the right ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FLOATING, _OTHER = 0xFF, 0xA5
"""The byte that is repeated. All ones is a NaN in every floating-point format, and none that arithmetic gives."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def mark(tensor: Tensor) -> None:
    """Fills a plain tensor with the pattern. Any dtype, strides and device."""
    words, pattern = _words(tensor)
    with torch.no_grad():
        words.fill_(pattern)


def is_marked(tensor: Tensor) -> bool:
    """Whether part of a tensor still holds the pattern; for integers of one byte, where every value is possible, all of it."""
    if not tensor.numel():
        return False
    words, pattern = _words(tensor)
    found = words == pattern
    whole = tensor.dtype in (torch.uint8, torch.int8)
    return bool(found.all() if whole else found.any())


def _words(tensor: Tensor) -> tuple[Tensor, int]:
    """The tensor as integers of its size, and the pattern as such an integer."""
    tensor = tensor.detach()
    floating = tensor.is_floating_point() or tensor.is_complex()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    dtype = _WORDS[tensor.dtype.itemsize]
    byte = bytes([_FLOATING if floating else _OTHER]) * dtype.itemsize
    return tensor.view(dtype), int.from_bytes(byte, "little", signed=dtype.is_signed)
