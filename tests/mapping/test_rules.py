"""Rules of a mapping are checked when they are made."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from epload.mapping import Convert, Rename
from epload.mapping.conversion import match_conversions
from epload.mapping.mapping import number_by_digits


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


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"experts\.(?P<index>\d+)\.gate", True), (r"(?P<g0>^model\.norm(?!\w))", True), (r"[^.]+\.[^.]*$", True),
        (r"layers\.1\.", False), (r"\d{2}\.", False), (r"(\d)\.\1", False), (r"(?P<a>\d)\.(?P=a)", False),
        (r"[2-5]\.", False), (r"[0-9]", False), (r"\x31\.", False), (r"\N{DIGIT ONE}\.", False),
    ],
)  # fmt: skip
def test_patterns_that_treat_all_digits_alike(pattern: str, expected: bool) -> None:
    assert (number_by_digits(["a1", "a2"], pattern) == ([0, 0], [0])) == expected


NAMES = [f"{scope}layers.{layer}.{leaf}" for scope in ("", "m1.") for layer in (1, 2, 12) for leaf in ("w_g", "norm.b")]


@pytest.mark.parametrize(
    "convert",
    [
        Convert((r"layers\.(?P<index>\d+)\.w",), ("w",)),
        Convert((r"layers\.(?P<index>\d+)\.w", "norm"), ("w",), (), ("m1.", "")),
        Convert((r"layers\.(?P<index>1)\.w",), ("w",)), Convert((r"layers\.(\d+)\.norm",), (r"norm.\1",)),
    ],
)  # fmt: skip
def test_conversions_find_in_names_together_what_they_find_alone(convert: Convert) -> None:
    groups, others = match_conversions([convert], NAMES)
    found = {i: (group.targets, number, index) for group in groups
             for i, number, index in zip(group.sources, group.inputs, group.indices, strict=True)}  # fmt: skip
    assert found
    assert sorted([*found, *others]) == list(range(len(NAMES)))
    for i, name in enumerate(NAMES):
        alone, _ = match_conversions([convert], [name])
        expected = [(group.targets, group.inputs[0], group.indices[0]) for group in alone]
        assert expected == ([found[i]] if i in found else [])
