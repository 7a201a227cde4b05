"""Names and codes of dtypes: torch's, safetensors', and those of the native copy table."""

from __future__ import annotations

import torch

SAFETENSORS = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""https://github.com/huggingface/safetensors, ``safetensors::tensor::Dtype``, those that torch has."""

_SCALAR_TYPE = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.complex32: 8,
    torch.complex64: 9,
    torch.complex128: 10,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
    torch.float8_e5m2fnuz: 25,
    torch.float8_e4m3fnuz: 26,
    torch.uint16: 27,
    torch.uint32: 28,
    torch.uint64: 29,
    torch.float8_e8m0fnu: 44,
}
"""c10::ScalarType (c10/core/ScalarType.h); its values are part of torch's serialized formats and do not change."""


_BY_CODE = {number: dtype for dtype, number in _SCALAR_TYPE.items()}


def name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def from_name(text: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected the name of a torch dtype, got {text!r}")
    return dtype


def code(dtype: torch.dtype) -> int:
    """The number by which the copy table names a dtype. Raises ValueError for one that epload cannot move."""
    try:
        return _SCALAR_TYPE[dtype]
    except KeyError:
        raise ValueError(f"epload has no code for {dtype}") from None


def from_code(number: int) -> torch.dtype:
    """The inverse of :func:`code`."""
    return _BY_CODE[number]


def converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether loading may convert: equal dtypes, or between float formats of 16 bits and more.

    An fp8 value means nothing without its scale, so fp8 to another dtype is refused, as is anything with integers or bool.
    """
    return source == target or (is_wide(source) and is_wide(target))


def is_wide(dtype: torch.dtype) -> bool:
    """Whether it is a float format of 16 bits and more."""
    return dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
