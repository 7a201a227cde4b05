"""Shows numbers, lists of names and reports as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from epload.observe.phases import Phase

UNRATED = "unpack"
"""The bytes of this phase are those of whole buckets, of which a rank may keep little, so that their rate says nothing."""
_SHOWN_KEYS = 5
_MIN_SECONDS = 0.0005
"""Phases that took less, and handled no bytes, are not shown."""

Facts = Sequence[tuple[str, str]]
"""Titles and texts."""


def count(number: int, noun: str) -> str:
    """E.g. "1 tensor", "18,867 tensors"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def list_first(values: Sequence[object]) -> str:
    """E.g. "a, b, c, d, e and 7 more"."""
    more = f" and {len(values) - _SHOWN_KEYS:,} more" if len(values) > _SHOWN_KEYS else ""
    return ", ".join(map(str, values[:_SHOWN_KEYS])) + more


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


def as_text(headline: str, facts: Facts, phases: Mapping[str, Phase], warnings: Sequence[str]) -> str:
    """Returns a report as aligned lines."""
    shown = [
        (name, phase)
        for name, phase in phases.items()
        if phase.seconds >= _MIN_SECONDS or (phase.nbytes and name != UNRATED)
    ]
    width = max((len(title) for title, _ in facts), default=0)
    lines = [headline, *(f"  {title:<{width}}  {text}" for title, text in facts)]
    width = max([width, *(len(name) for name, _ in shown)])
    for name, phase in shown:
        nbytes = show_bytes(phase.nbytes) if phase.nbytes else ""
        rate = show_rate(phase.nbytes / phase.seconds) if phase.nbytes and phase.seconds and name != UNRATED else ""
        lines.append(f"  {name:<{width}}  {f'{phase.seconds:.3f} s':>9}  {nbytes:>12}  {rate:>10}".rstrip())
    return "\n".join([*lines, *(f"  warning: {warning}" for warning in warnings)])
