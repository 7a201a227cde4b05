"""Finds ranks that read slowly, from what each says in the last round of a load. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from epload.observe.render import list_first

_MIN_BYTES = 64 << 20
"""A rank that reads less has no rate that says anything."""
_MIN_SECONDS = 1.0
"""Reading that took less is nothing to speak of."""
_FACTOR = 2.0
"""A rank is slow if it is at least this many times slower than the median."""
_STEPS = 4
"""Number of steps per octave of a rate: few, so that most ranks report the same, and their reports travel as one."""


def pace(nbytes: int, seconds: float) -> tuple[int, bool] | None:
    """Returns a rank's read rate on a logarithmic scale, and whether that took long enough to matter. None if it read little."""
    if nbytes < _MIN_BYTES or seconds <= 0:
        return None
    return round(_STEPS * math.log2(nbytes / seconds)), seconds >= _MIN_SECONDS


def describe_slow(paces: Mapping[int, Sequence[int] | None]) -> str:
    """Returns how many times slower than the median each slow rank reads, as text. Empty if none is slow."""
    rates = {rank: of_rank for rank, of_rank in paces.items() if of_rank is not None}
    middle = median([rate for rate, _ in rates.values()] or [0])
    factors = {rank: 2.0 ** ((middle - rate) / _STEPS) for rank, (rate, matters) in sorted(rates.items()) if matters}
    slow = [f"rank {rank} {factor:.3g} times" for rank, factor in factors.items() if factor >= _FACTOR]
    return f"read slower than the median rank: {list_first(slow, 10)}" if slow else ""
