"""Columns of integers, against the same in Python."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from epload.core.columns import column, first_of_each, numbered, numbered_rows

VALUES = st.one_of(st.integers(0, 5), st.integers(0, 2**63 - 1))


@st.composite
def tables(draw: st.DrawFn) -> list[list[int]]:
    """One to four columns of one length, of few or of any values."""
    length = draw(st.integers(0, 12))
    return draw(st.lists(st.lists(VALUES, min_size=length, max_size=length), min_size=1, max_size=4))


@given(st.lists(VALUES))
def test_values_are_numbered_in_their_order(values: list[int]) -> None:
    assert column(values).tolist() == values
    distinct = sorted(set(values))
    assert numbered(column(values)).tolist() == [distinct.index(value) for value in values]


@given(tables())
def test_rows_are_numbered_in_their_order(columns: list[list[int]]) -> None:
    rows = [*zip(*columns, strict=True)]
    distinct = sorted(set(rows))
    numbers = numbered_rows([*map(column, zip(*rows, strict=True))] or [column([])])
    assert numbers.tolist() == [distinct.index(row) for row in rows]
    assert first_of_each(numbers).tolist() == [rows.index(row) for row in distinct]


def test_columns_are_on_the_cpu_whatever_the_default_is() -> None:
    made: list[Tensor] = []
    with torch.device("meta"):
        made = [column([]), column([3])]
    assert [each.device.type for each in made] == ["cpu", "cpu"]
