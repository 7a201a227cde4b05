"""Rules of a mapping are checked when they are made."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from epload.mapping import Convert, Rename


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rename("(a", "b"),
        lambda: Rename("a", "b", when="*"),
        lambda: Rename("(a)", r"\2"),
        lambda: Rename("(a)", r"\g<layer>"),
        lambda: Convert(("a", "b["), ("c",)),
        lambda: Convert(("(a)", "b"), (r"\1",)),
    ],
)
def test_a_rule_is_checked_when_made(make: Callable[[], object]) -> None:
    with pytest.raises(
        ValueError,
        match=r"expected valid regular expressions, and targets that refer to groups they define, got (Rename|Convert)",
    ):
        make()


def test_a_conversion_has_sources_and_targets() -> None:
    for sources, targets in (((), ("a",)), (("a",), ())):
        with pytest.raises(ValueError, match="expected at least one source and one target"):
            Convert(sources, targets)
