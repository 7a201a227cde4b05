"""The native functions that compare and group the names of a checkpoint, against the same in Python."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epload import _C

# ASCII, letters of two and four bytes, digits that are not ASCII, what splits lines, and half of a surrogate pair.
NAMES = st.lists(st.text(alphabet="a.0179é\U0001f600\u0663\n\ud800", max_size=12), max_size=20)


@given(NAMES)
def test_names_that_differ_only_in_digits_have_one_number(names: list[str]) -> None:
    kinds, firsts = _C.number_by_digits(names)
    masked = [re.sub("[0-9]", "0", name) for name in names]
    distinct = list(dict.fromkeys(masked))
    assert kinds == [distinct.index(text) for text in masked]
    assert firsts == [masked.index(text) for text in distinct]


@given(NAMES, st.sampled_from(["", "x", "é\U0001f600"]), st.data())
def test_names_are_grouped_by_what_they_become(names: list[str], target: str, data: st.DataObject) -> None:
    """Every name is of a kind of its own, so that each has a match of its own."""
    matches: list[tuple[object, ...] | None] = []
    groups: dict[tuple[int, str], tuple[list[int], list[int], list[int]]] = defaultdict(lambda: ([], [], []))
    others = []
    for i, name in enumerate(names):
        if data.draw(st.booleans()):
            matches.append(None)
            others.append(i)
            continue
        begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(name))] * 2)))
        rule, number = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 2))
        found = re.search(r"\d+", name) if data.draw(st.booleans()) else None
        matches.append((rule, number, begin, end, *(found.span() if found else (None, None)), target))
        group = groups[rule, name[:begin] + target + name[end:]]
        for values, value in zip(group, (i, number, int(found[0]) if found else -1), strict=True):
            values.append(value)
    assert _C.group_names(names, list(range(len(names))), matches) == (list(groups.values()), others)


def test_an_index_is_read_as_int_reads_it() -> None:
    def index(text: str) -> int:
        return _C.group_names([text], [0], [(0, 0, 0, 0, 0, len(text), "")])[0][0][2][0]

    for text in ("0", "007", "9" * 17, "9" * 18, "9" * 30, " 5", "1_0", "\u0663"):
        assert index(text) == int(text)
    for text in ("", "a", "1a", "1.", "é"):
        with pytest.raises(ValueError, match=f"expected an integer as the index in {text!r}, got {text!r}"):
            index(text)


def test_what_does_not_fit_is_refused() -> None:
    for match in (
        (0, 0, 2, 1, None, None, ""),
        (0, 0, 0, 3, None, None, ""),
        (0, 0, -1, 1, None, None, ""),
        (0, 0, 0, 1, 1, 3, ""),
    ):
        with pytest.raises(ValueError, match="expected matches within the names"):
            _C.group_names(["ab"], [0], [match])
    with pytest.raises(ValueError, match="expected a kind for each name"):
        _C.group_names(["ab"], [], [None])
    with pytest.raises(ValueError, match="expected matches of 7 fields, got 1"):
        _C.group_names(["ab"], [0], [(0,)])
    with pytest.raises(IndexError):
        _C.group_names(["ab"], [1], [None])
    with pytest.raises(TypeError, match="expected names to be str, got int at 0"):
        _C.number_by_digits([3])
    with pytest.raises(TypeError, match="expected names to be str, got int at 0"):
        _C.group_names([3], [0], [(0, 0, 0, 0, None, None, "")])
