"""Finds ranks that read slowly, from what each says in the last round of a load. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

_LEAST_BYTES = 64 << 20
"""A rank that reads less has no rate that says anything."""
_LEAST_SECONDS = 1.0
"""Reading that took less is nothing to speak of."""
_FACTOR = 2.0
"""A rank is slow if it is at least this many times slower than the median."""
_STEPS = 4
"""Number of steps per octave of a rate: few, so that most ranks report the same, and their reports travel as one."""

Pace = tuple[int, bool]
"""A rank's read rate on a logarithmic scale, and whether reading took long enough to matter."""


def pace(nbytes: int, seconds: float) -> Pace | None:
    """None if the rank has read little."""
    if nbytes < _LEAST_BYTES or seconds <= 0:
        return None
    return round(_STEPS * math.log2(nbytes / seconds)), seconds >= _LEAST_SECONDS


def slow_readers(paces: Mapping[int, Sequence[int] | None]) -> dict[int, float]:
    """Returns how many times slower than the median each slow rank reads, by rank."""
    rates = {rank: of_rank for rank, of_rank in paces.items() if of_rank is not None}
    if not rates:
        return {}
    middle = median(rate for rate, _ in rates.values())
    slower = {rank: 2.0 ** ((middle - rate) / _STEPS) for rank, (rate, matters) in rates.items() if matters}
    return {rank: round(factor, 1) for rank, factor in slower.items() if factor >= _FACTOR}


def describe_slow(slower: Mapping[int, float]) -> str:
    listed = ", ".join(f"rank {rank} {factor:g} times" for rank, factor in sorted(slower.items())[:10])
    more = f", and {len(slower) - 10} more" if len(slower) > 10 else ""
    return f"read slower than the median rank: {listed}{more}"
