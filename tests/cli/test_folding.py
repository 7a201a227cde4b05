"""Folded names stand for exactly the names that were folded."""

from __future__ import annotations

from collections.abc import Iterator
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
        for part in name.replace("..", "\0").split(".")
        for part in [part.replace("\0", "..")]
    ]
    return map(".".join, product(*parts))


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(8, 12), st.sampled_from(["", "x", "y"]))))
def test_lines_stand_for_the_names(found: set[tuple[int, int, str]]) -> None:
    names = {f"layers.{i}.experts.{j}{f'.{end}' if end else ''}": end != "x" for i, j, end in sorted(found)}
    folded = fold(names)
    assert sorted(name for line, _, _ in folded for name in unfold(line)) == sorted(names)
    for line, value, count in folded:
        assert {names[name] for name in unfold(line)} == {value}
        assert len(list(unfold(line))) == count
