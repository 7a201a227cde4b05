"""Shows numbers and lists of names as text."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: int, noun: str) -> str:
    """E.g. "1 tensor", "18,867 tensors"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def list_first(values: Sequence[object], shown: int = 5, separator: str = ", ") -> str:
    """E.g. "a, b, c, d, e and 7 more"."""
    more = f" and {len(values) - shown:,} more" if len(values) > shown else ""
    return separator.join(map(str, values[:shown])) + more


def list_keys(keys: Sequence[str]) -> str:
    """Returns the number of keys and the first of them, as text. Empty if there are none."""
    return f"{count(len(keys), 'tensor')}: {list_first(keys)}" if keys else ""


def show_bytes(nbytes: float) -> str:
    """E.g. "927.4 MB"; units are powers of 1000."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes:.0f} B"


def show_rate(rate: float) -> str:
    """``rate``: bytes per second."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{show_bytes(rate)}/s"
