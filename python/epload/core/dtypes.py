"""Names and codes of dtypes in torch, in safetensors files and in the native copy table."""

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
"""The dtypes of ``safetensors::tensor::Dtype`` that torch has (https://github.com/huggingface/safetensors)."""

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
"""Dtypes of weights that scales multiply. One value an element."""
INTEGERS = (
    torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64,
)  # fmt: skip
"""Dtypes that packed weights are stored as."""

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
"""``c10::ScalarType`` (c10/core/ScalarType.h). Its values are part of torch's serialized formats and do not change."""

_BY_CODE = {number: dtype for dtype, number in _SCALAR_TYPE.items()}


def name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def from_name(text: str) -> torch.dtype:
    """The inverse of :func:`name`.

    Raises:
        ValueError: ``text`` does not name a torch dtype.
    """
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected the name of a torch dtype, got {text!r}")
    return dtype


def code(dtype: torch.dtype) -> int:
    """The dtype's number in the native copy table.

    Raises:
        ValueError: epload cannot move this dtype.
    """
    if dtype not in _SCALAR_TYPE:
        raise ValueError(f"epload does not support {dtype}")
    return _SCALAR_TYPE[dtype]


def from_code(number: int) -> torch.dtype:
    """The inverse of :func:`code`."""
    return _BY_CODE[number]


def converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Returns True if a load may convert ``source`` to ``target``: they are equal, or both are floats of at least 16 bits.

    fp8 is not converted, because an fp8 value means nothing without its scale. Nor are integers, bool and complex dtypes.
    """
    return source == target or (is_wide(source) and is_wide(target))


def is_wide(dtype: torch.dtype) -> bool:
    """Returns True if ``dtype`` is a float of at least 16 bits."""
    return dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
