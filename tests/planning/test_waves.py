"""How buckets are grouped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epload.planning.waves import group_buckets


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(0, 5), st.integers(1, 150))
def test_groups_are_as_large_as_the_limit_allows(nbytes: list[int], first: int, limit: int) -> None:
    numbers = range(min(first, len(nbytes)), len(nbytes))
    groups = group_buckets(numbers, nbytes, limit)
    assert [number for group in groups for number in group] == list(numbers)
    sums = [sum(nbytes[number] for number in group) for group in groups]
    for i, (group, total) in enumerate(zip(groups, sums, strict=True)):
        assert total <= limit or len(group) == 1
        if i + 1 < len(groups):
            assert total + nbytes[group.stop] > limit
