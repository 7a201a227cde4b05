"""Shows numbers, lists of names and reports as text."""

from __future__ import annotations

import html
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


def list_keys(keys: Sequence[str]) -> str:
    """Returns the number of keys and the first of them, as text. Empty if there are none."""
    if not keys:
        return ""
    more = f" and {len(keys) - _SHOWN_KEYS:,} more" if len(keys) > _SHOWN_KEYS else ""
    return f"{count(len(keys), 'tensor')}: {', '.join(keys[:_SHOWN_KEYS])}{more}"


def show_bytes(nbytes: float) -> str:
    """E.g. "927.4 MB"; units are powers of 1000."""
    for unit, least, size in (("GB", 1e10, 1e9), ("MB", 1e5, 1e6), ("kB", 1e3, 1e3)):
        if nbytes >= least:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes:.0f} B"


def show_rate(rate: float) -> str:
    """``rate``: bytes per second."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{show_bytes(rate)}/s"


def bytes_and_rate(phase: str, nbytes: int, seconds: float) -> tuple[str, str]:
    """Returns the bytes of a phase and their rate, as text; empty where there is none."""
    rated = nbytes and seconds and phase != UNRATED
    return show_bytes(nbytes) if nbytes else "", show_rate(nbytes / seconds) if rated else ""


def rows_of(phases: Mapping[str, Phase], titles: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Returns title, seconds, bytes and rate of each phase that was used. ``titles``: by name, of the phases that are shown."""
    return [
        (title, f"{phase.seconds:.3f} s", *bytes_and_rate(name, phase.nbytes, phase.seconds))
        for name, title in titles.items()
        if (phase := phases[name]).seconds >= _MIN_SECONDS or (phase.nbytes and name != UNRATED)
    ]


def as_text(headline: str, facts: Facts, rows: Sequence[tuple[str, ...]], warnings: Sequence[str]) -> str:
    """Returns a report as aligned lines. ``rows``: from :func:`rows_of`."""
    widths = [max((len(title) for title, *_ in part), default=0) for part in (facts, rows)]
    lines = [headline, *(f"  {title:<{widths[0]}}  {text}" for title, text in facts)]
    lines += [f"  {name:<{max(widths)}}  {s:>9}  {nbytes:>12}  {rate:>10}".rstrip() for name, s, nbytes, rate in rows]
    return "\n".join([*lines, *(f"  warning: {warning}" for warning in warnings)])


def as_html(headline: str, facts: Facts, rows: Sequence[tuple[str, ...]], warnings: Sequence[str]) -> str:
    """Returns a report as a table."""
    lines = []
    for title, *texts in [*facts, *rows, *(("warning", warning) for warning in warnings)]:
        span, align = (" colspan=3", "left") if len(texts) == 1 else ("", "right")
        cells = "".join(f"<td{span} style='text-align:{align}'>{html.escape(text)}</td>" for text in texts)
        lines.append(f"<tr><th style='text-align:left'>{html.escape(title)}</th>{cells}</tr>")
    return f"<b>{html.escape(headline)}</b><table>{''.join(lines)}</table>"
