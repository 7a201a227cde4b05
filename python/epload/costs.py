"""What a load costs, by the formulas of docs/algorithms.md, and the choice between ways of reading that follows. Pure.

Symbols: S bytes, N nodes of G ranks, W ranks, B_i bytes/s of a node's link, b bytes of a wave. Rates are bytes/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MEMORY_RATE = 2e9
"""Bytes/s at which a rank can be counted on to unpack from memory (measured: 2.6e9 in pieces of 12 kB on 2 busy cores)."""
WORTH_A_TRIAL = 1.0
"""Seconds a load must still take before another way of reading is tried on one wave of it."""


@dataclass(frozen=True)
class Rates:
    """What has been measured."""

    read: Sequence[float]
    """For each rank, bytes/s at which it read what it owns while all others did the same."""
    link: float
    """Bytes/s over one node's link; infinite if there is one node."""


def every(owned: Sequence[int], rates: Rates) -> float:
    """Each rank reads its own regions: as slow as the slowest."""
    return max((nbytes / rate for nbytes, rate in zip(owned, rates.read, strict=True) if nbytes), default=0.0)


def partitioned(total: int, owned: Sequence[int], nodes: int, wave: int, rates: Rates) -> float:
    """All read a share of every wave; each node's link carries the shares of the others, both ways at once."""
    reading = total / sum(rates.read)
    crossing = total * (nodes - 1) / nodes / rates.link
    return max(reading, crossing) + wave / rates.link * (nodes > 1) + max(owned, default=0) / MEMORY_RATE


def one(total: int, owned: Sequence[int], nodes: int, rates: Rates, reader: float) -> float:
    """One rank reads, at ``reader`` bytes/s, and a chain of nodes passes everything on."""
    crossing = total / rates.link if nodes > 1 else 0.0
    return max(total / reader, crossing) + max(owned, default=0) / MEMORY_RATE


def per_node(total: int, owned: Sequence[int], readers: Sequence[float]) -> float:
    """One rank of each node reads everything."""
    return total / min(readers) + max(owned, default=0) / MEMORY_RATE


def spelled(readers: str, predictions: dict[str, float], why: str) -> str:
    """The choice in a sentence, e.g. ``chose every: predicted 0.8 s, partitioned 2.1 s``."""
    others = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in predictions.items() if name != readers)
    own = f": predicted {predictions[readers]:.2g} s" if readers in predictions else ""
    return f"chose {readers}{own}{', ' + others if others else ''} ({why})"
