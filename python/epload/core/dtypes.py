"""The dtypes that epload moves, as torch's: see :mod:`epload.core.dtype_table`."""

from __future__ import annotations

import torch

from epload.core.dtype_table import TABLE, DtypeRow

_ROWS: dict[torch.dtype, DtypeRow] = {getattr(torch, row.name): row for row in TABLE}
_SHORT = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FLOAT_NAMES = ("float64", "float32", "float16", "bfloat16", *_SHORT)
"""Names of the dtypes that weights are converted to."""
DType = torch.dtype | str
"""A dtype that a caller passes: itself, or its name, such as ``"bfloat16"`` or ``"bf16"``."""
_BY_CODE = {row.code: dtype for dtype, row in _ROWS.items()}
CODES = {row.name: row.code for row in TABLE}
ITEMSIZES = [_BY_CODE[i].itemsize if i in _BY_CODE else 0 for i in range(max(_BY_CODE) + 1)]
"""Bytes of an element, by code."""
SAFETENSORS = {row.safetensors: dtype for dtype, row in _ROWS.items() if row.safetensors}
FP8 = tuple(dtype for dtype, row in _ROWS.items() if row.kind == "fp8")
INTEGERS = tuple(dtype for dtype, row in _ROWS.items() if row.kind == "integer")


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
    if isinstance(dtype, torch.dtype) and dtype in _ROWS and dtype.is_floating_point:
        return dtype
    kind = ValueError if isinstance(passed, str | torch.dtype) else TypeError
    raise kind(
        f"expected {argument} to be a floating-point dtype, such as torch.bfloat16, or one of its names "
        f"({', '.join(FLOAT_NAMES)}), got {passed!r}"
    )


def row_of(dtype: torch.dtype) -> DtypeRow:
    """Returns the row of the table.

    Raises:
        ValueError: epload cannot move this dtype.
    """
    if dtype not in _ROWS:
        raise ValueError(f"epload does not support {dtype}")
    return _ROWS[dtype]


def code(dtype: torch.dtype) -> int:
    """Returns the dtype's number in the native copy table. Raises as :func:`row_of`."""
    return row_of(dtype).code


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
    return dtype in _ROWS and _ROWS[dtype].kind == "float"
