"""Chooses the readers of a load with ``readers="auto"`` from measurements of its first waves. Nothing is read only to measure.

If every rank can read the checkpoint, each reads its own part of the first wave. In a fully sharded model this reads each byte
once and moves none between ranks, so no mode is faster unless storage is slow with many readers. Only if the rest would take
long is another wave moved with partitioned readers, which measures sequential reads and the links. The cost functions then
choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epload.planning import costs

SMALL_BYTES = 64 << 20
"""If no rank owns more bytes than this, a trial would not pay: every rank reads its own part at once."""


@dataclass(frozen=True)
class WaveMeasurement:
    """What one rank measured during one wave."""

    read_bytes: int
    read_seconds: float
    link_bytes: int
    """Bytes that it moved between nodes."""
    link_seconds: float


@dataclass(frozen=True)
class LoadProfile:
    """What the choice depends on besides the measurements. Lists have one entry per rank, in the order of the ranks."""

    total: int
    """Bytes of the whole load."""
    owned: Sequence[int]
    """Bytes of each rank's local shards."""
    node_of: Sequence[int]
    """Index of each rank's node."""
    reader: int
    """Position of the rank that reads with ``readers="one"``."""
    waves: int
    """Number of waves, including those of the trials."""
    wave_bytes: int
    """Bytes of the largest wave."""
    candidates: Sequence[str]
    """The readers that the algorithm supports. "every" and "partitioned" must be among them."""


Trial = Callable[[str], Sequence[WaveMeasurement]]
"""Moves the next wave with the given readers and returns what each rank measured. Collective."""


def choose_readers(
    profile: LoadProfile, trial: Trial, source: str = "from rates measured on the first waves"
) -> tuple[str, str]:
    """Chooses the readers of the waves that the trials leave. Collective, with the same result on every rank.

    Args:
        source: of the rates, for the reason.

    Returns:
        The readers, and the reason in words.
    """
    if max(profile.owned) <= SMALL_BYTES:
        return "every", "auto -> every: per-rank data is small, so each rank reads its own shards"
    measured = trial("every")
    left = max(0.0, 1 - profile.wave_bytes / max(profile.total, 1))
    owned = [int(nbytes * left) for nbytes in profile.owned]
    predictions = {"every": costs.every(owned, costs.Rates(_read_rates(measured), costs.INFINITE))}
    if predictions["every"] < costs.MIN_SECONDS_FOR_TRIAL or profile.waves < 3:
        reason = "each rank reads its own shards, and too little is left to try other readers"
        return "every", costs.describe_choice("every", predictions, reason)
    measured = trial("partitioned")
    link_rates = [m.link_bytes / m.link_seconds for m in measured if m.link_bytes and m.link_seconds > 0]
    rates = costs.Rates(_read_rates(measured), min(link_rates, default=costs.INFINITE))
    nodes = max(profile.node_of) + 1
    node_rates = [
        sum(rate for rate, at in zip(rates.read, profile.node_of, strict=True) if at == node) for node in range(nodes)
    ]
    total = int(profile.total * left)
    predictions |= {
        "partitioned": costs.partitioned(total, owned, nodes, profile.wave_bytes, rates),
        "per_node": costs.per_node(total, owned, node_rates),
        "one": costs.one(total, owned, nodes, rates, node_rates[profile.node_of[profile.reader]]),
    }
    predictions = {name: seconds for name, seconds in predictions.items() if name in profile.candidates}
    best = min(predictions, key=lambda name: predictions[name])
    return best, costs.describe_choice(best, predictions, source)


def _read_rates(measured: Sequence[WaveMeasurement]) -> list[float]:
    """Each rank's read rate in bytes/s. A rank that read nothing gets the mean of the others."""
    rates = [m.read_bytes / m.read_seconds if m.read_bytes and m.read_seconds > 0 else None for m in measured]
    known = [rate for rate in rates if rate is not None]
    mean = sum(known) / len(known) if known else costs.INFINITE
    return [mean if rate is None else rate for rate in rates]
