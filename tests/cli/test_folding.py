"""Folded names stand for exactly the names that were folded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from epload.cli.folding import fold


def unfold(name: str) -> Iterator[str]:
    """The names that a folded name stands for: the reference."""
    parts = [
        [str(i) for run in part[1:-1].split(",") for i in range(int(run.split("..")[0]), int(run.split("..")[-1]) + 1)]
        if part.startswith("{")
        else [part]
        for part in re.split(r"(\{[^}]*\})", name)
    ]
    return map("".join, product(*parts))


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(8, 12), st.sampled_from(["", "x", "y"]))))
def test_lines_stand_for_the_names(found: set[tuple[int, int, str]]) -> None:
    names = {f"layers.{i}.experts.{j}{f'.{end}' if end else ''}": end != "x" for i, j, end in sorted(found)}
    check(names)


def check(names: Mapping[str, object]) -> list[str]:
    """Returns the lines."""
    folded = fold(names)
    assert sorted(name for line, _, _ in folded for name in unfold(line)) == sorted(names)
    for line, value, count in folded:
        assert {names[name] for name in unfold(line)} == {value}
        assert len(list(unfold(line))) == count
    return [line for line, _, _ in folded]


def test_numbers_inside_words() -> None:
    """Leading zeros and digits of other scripts are kept: the lines would otherwise stand for other names."""
    names = [f"block{i}.conv{j}_{k}" for i in range(2) for j in range(3) for k in range(1, 3)]
    assert check(dict.fromkeys(names)) == ["block{0..1}.conv{0..2}_{1..2}"]
    kept = ["layer.007.w", "layer.07.w", "layer.\u0663.w", f"layer.{'9' * 5000}.w"]
    assert check(dict.fromkeys(kept)) == kept
