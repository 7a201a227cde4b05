"""The two tables of dtypes, in Python and in C++, are one."""

from __future__ import annotations

import torch

from epload.core import dtypes
from epload.core.dtype_table import TABLE
from epload.native import ops


def test_the_tables_are_equal() -> None:
    assert ops.dtypes() == dtypes.CODES


def test_the_sizes_are_those_of_torch() -> None:
    assert {row.name: row.itemsize for row in TABLE} == {row.name: getattr(torch, row.name).itemsize for row in TABLE}
