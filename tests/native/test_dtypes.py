"""The two tables of dtypes, in Python and in C++, are one."""

from __future__ import annotations

from epload.core import dtypes
from epload.native import ops


def test_the_tables_are_equal() -> None:
    assert ops.dtypes() == {dtypes.name(dtype): dtypes.code(dtype) for dtype in dtypes.TABLE}
