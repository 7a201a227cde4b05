"""The dtypes that epload moves: one table, whose rows are also those of csrc/dtypes.h."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DtypeRow(NamedTuple):
    """A row of the table."""

    code: int
    """``c10::ScalarType`` (c10/core/ScalarType.h). Its values are part of torch's serialized formats and do not change."""
    safetensors: str = ""
    """Name in ``safetensors::tensor::Dtype`` (https://github.com/huggingface/safetensors), if there is one."""
    kind: str = ""
    """``integer``: packed weights are stored as it; ``float``: has at least 16 bits; ``fp8``: weights that scales multiply."""


TABLE = {
    torch.uint8: DtypeRow(0, "U8", "integer"),
    torch.int8: DtypeRow(1, "I8", "integer"),
    torch.int16: DtypeRow(2, "I16", "integer"),
    torch.int32: DtypeRow(3, "I32", "integer"),
    torch.int64: DtypeRow(4, "I64", "integer"),
    torch.float16: DtypeRow(5, "F16", "float"),
    torch.float32: DtypeRow(6, "F32", "float"),
    torch.float64: DtypeRow(7, "F64", "float"),
    torch.complex32: DtypeRow(8),
    torch.complex64: DtypeRow(9, "C64"),
    torch.complex128: DtypeRow(10),
    torch.bool: DtypeRow(11, "BOOL"),
    torch.bfloat16: DtypeRow(15, "BF16", "float"),
    torch.float8_e5m2: DtypeRow(23, "F8_E5M2", "fp8"),
    torch.float8_e4m3fn: DtypeRow(24, "F8_E4M3", "fp8"),
    torch.float8_e5m2fnuz: DtypeRow(25, "F8_E5M2FNUZ", "fp8"),
    torch.float8_e4m3fnuz: DtypeRow(26, "F8_E4M3FNUZ", "fp8"),
    torch.uint16: DtypeRow(27, "U16", "integer"),
    torch.uint32: DtypeRow(28, "U32", "integer"),
    torch.uint64: DtypeRow(29, "U64", "integer"),
    torch.float8_e8m0fnu: DtypeRow(44, "F8_E8M0"),
}
_SHORT = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FLOAT_NAMES = ("float64", "float32", "float16", "bfloat16", *_SHORT)
"""Names of the dtypes that weights are converted to."""
DType = torch.dtype | str
"""A dtype that a caller passes: itself, or its name, such as ``"bfloat16"`` or ``"bf16"``."""
_BY_CODE = {row.code: dtype for dtype, row in TABLE.items()}
ITEMSIZES = [_BY_CODE[i].itemsize if i in _BY_CODE else 0 for i in range(max(_BY_CODE) + 1)]
"""Bytes of an element, by code."""
SAFETENSORS = {row.safetensors: dtype for dtype, row in TABLE.items() if row.safetensors}
SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS.items()}
FP8 = tuple(dtype for dtype, row in TABLE.items() if row.kind == "fp8")
INTEGERS = tuple(dtype for dtype, row in TABLE.items() if row.kind == "integer")


def name(dtype: torch.dtype) -> str:
    """Returns ``"bfloat16"`` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def from_name(text: str) -> torch.dtype:
    """Inverts :func:`name`.

    Raises:
        ValueError: ``text`` does not name a torch dtype.
    """
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected the name of a torch dtype, got {text!r}")
    return dtype


def requested(argument: str, passed: object) -> torch.dtype:
    """Returns the floating-point dtype that a caller has passed as an argument, itself or by name.

    Raises:
        TypeError: it is neither a dtype nor a string. ValueError: it is another dtype, or no name of one.
    """
    dtype = passed
    if isinstance(passed, str):
        text = passed.removeprefix("torch.")
        dtype = _SHORT.get(text, getattr(torch, text, None))
    if isinstance(dtype, torch.dtype) and dtype in TABLE and dtype.is_floating_point:
        return dtype
    kind = ValueError if isinstance(passed, str | torch.dtype) else TypeError
    raise kind(
        f"expected {argument} to be a floating-point dtype, such as torch.bfloat16, or one of its names "
        f"({', '.join(FLOAT_NAMES)}), got {passed!r}"
    )


def code(dtype: torch.dtype) -> int:
    """Returns the dtype's number in the native copy table.

    Raises:
        ValueError: epload cannot move this dtype.
    """
    if dtype not in TABLE:
        raise ValueError(f"epload does not support {dtype}")
    return TABLE[dtype].code


def from_code(number: int) -> torch.dtype:
    """Inverts :func:`code`."""
    return _BY_CODE[number]


def converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Returns True if a load may convert ``source`` to ``target``: they are equal, or both are floats of at least 16 bits.

    fp8 is not converted, because an fp8 value means nothing without its scale. Nor are integers, bool and complex dtypes.
    """
    return source == target or (is_wide(source) and is_wide(target))


def is_wide(dtype: torch.dtype) -> bool:
    """Returns True if ``dtype`` is a float of at least 16 bits."""
    return dtype in TABLE and TABLE[dtype].kind == "float"
