"""Names of many tensors as few lines: ``layers.{0..47}.experts.{0..127}.up.weight``. Pure."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from math import prod
from typing import TypeVar

_NUMBER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,17})(?![0-9])")
"""A number without leading zeros, which would be lost, as in ``layers.3`` or ``block3``."""
Numbers = tuple[int, ...]
Value = TypeVar("Value", bound=Hashable)


def fold(names: Mapping[str, Value]) -> list[tuple[str, Value, int]]:
    """Folds names that differ in their numbers only, and have equal values, where they are all combinations of some numbers.

    Args:
        names: a value by name, such as a dtype and a shape.

    Returns:
        Folded name, value and how many names it stands for, in the order of the first of them.
    """
    groups: dict[tuple[str, Value], list[Numbers]] = {}
    for name, value in names.items():
        pattern = _NUMBER.sub("{}", name.replace("{", "{{").replace("}", "}}"))
        groups.setdefault((pattern, value), []).append(tuple(map(int, _NUMBER.findall(name))))
    return [
        (pattern.format(*map(_braces, sets)), value, prod(map(len, sets)))
        for (pattern, value), numbers in groups.items()
        for sets in _boxes(numbers)
    ]


def _boxes(tuples: Sequence[Numbers]) -> list[tuple[Numbers, ...]]:
    """Returns the tuples as products of sets, one ascending set for each position."""
    boxes: list[tuple[Numbers, ...]] = [tuple((number,) for number in numbers) for numbers in tuples]
    for position in reversed(range(len(tuples[0]))):
        merged: dict[tuple[tuple[Numbers, ...], tuple[Numbers, ...]], list[int]] = {}
        for box in boxes:
            merged.setdefault((box[:position], box[position + 1 :]), []).extend(box[position])
        boxes = [(*before, tuple(sorted(values)), *after) for (before, after), values in merged.items()]
    return boxes


def _braces(values: Sequence[int]) -> str:
    """Returns ``5`` for one value, else ``{0..3,7}``. Values ascend."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][1] == value - 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    texts = [str(first) if first == last else f"{first}..{last}" for first, last in runs]
    return texts[0] if len(values) == 1 else "{" + ",".join(texts) + "}"
