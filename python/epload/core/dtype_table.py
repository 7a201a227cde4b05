"""The dtypes that epload moves, without torch: one table, whose rows are also those of csrc/dtypes.h."""

from __future__ import annotations

from typing import NamedTuple


class DtypeRow(NamedTuple):
    """A row of the table."""

    name: str
    """Name in torch, such as ``"bfloat16"``."""
    code: int
    """``c10::ScalarType`` (c10/core/ScalarType.h). Its values are part of torch's serialized formats and do not change."""
    itemsize: int
    """Bytes of an element."""
    safetensors: str = ""
    """Name in ``safetensors::tensor::DtypeRow`` (https://github.com/huggingface/safetensors), if there is one."""
    kind: str = ""
    """``integer``: packed weights are stored as it; ``float``: has at least 16 bits; ``fp8``: weights that scales multiply."""


TABLE = (
    DtypeRow("uint8", 0, 1, "U8", "integer"),
    DtypeRow("int8", 1, 1, "I8", "integer"),
    DtypeRow("int16", 2, 2, "I16", "integer"),
    DtypeRow("int32", 3, 4, "I32", "integer"),
    DtypeRow("int64", 4, 8, "I64", "integer"),
    DtypeRow("float16", 5, 2, "F16", "float"),
    DtypeRow("float32", 6, 4, "F32", "float"),
    DtypeRow("float64", 7, 8, "F64", "float"),
    DtypeRow("complex32", 8, 4),
    DtypeRow("complex64", 9, 8, "C64"),
    DtypeRow("complex128", 10, 16),
    DtypeRow("bool", 11, 1, "BOOL"),
    DtypeRow("bfloat16", 15, 2, "BF16", "float"),
    DtypeRow("float8_e5m2", 23, 1, "F8_E5M2", "fp8"),
    DtypeRow("float8_e4m3fn", 24, 1, "F8_E4M3", "fp8"),
    DtypeRow("float8_e5m2fnuz", 25, 1, "F8_E5M2FNUZ", "fp8"),
    DtypeRow("float8_e4m3fnuz", 26, 1, "F8_E4M3FNUZ", "fp8"),
    DtypeRow("uint16", 27, 2, "U16", "integer"),
    DtypeRow("uint32", 28, 4, "U32", "integer"),
    DtypeRow("uint64", 29, 8, "U64", "integer"),
    DtypeRow("float8_e8m0fnu", 44, 1, "F8_E8M0"),
)
BY_SAFETENSORS_NAME = {row.safetensors: row for row in TABLE if row.safetensors}
