"""The memory of tensors on CPU as Python's own buffers. It imports neither torch nor NumPy."""

from __future__ import annotations

from ctypes import c_uint8
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def as_memoryview(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on CPU, which share its memory. Unlike ``Tensor.numpy``, it needs no NumPy.

    Raises:
        ValueError: the tensor is not contiguous: what is written to a copy would be lost.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"expected a contiguous tensor, got strides {tensor.stride()}")
    if not tensor.nbytes:
        return memoryview(b"")
    array = (c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]  # whose memory lives as long as the view
    return memoryview(array).cast("B")
