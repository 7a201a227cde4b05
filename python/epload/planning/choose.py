"""Chooses how a checkpoint is read, from what the first waves of this very load have shown. Nothing is read for the trial alone.

Where every rank can read the checkpoint, the first wave is read by each rank for itself; in a fully sharded model that reads each
byte once and moves none between ranks, so that nothing beats it but storage that dislikes many readers. Only if much is left is
another wave moved in the partitioned way, which measures sequential reading and the links; the cost functions then decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epload.planning import costs

SMALL_BYTES = 64 << 20
"""A rank that owns no more than this reads it before a trial would pay."""


@dataclass(frozen=True)
class Measured:
    """What one rank saw of one wave."""

    read_bytes: int
    read_seconds: float
    link_bytes: int
    link_seconds: float


@dataclass(frozen=True)
class Job:
    """What the choice depends on besides the measurements. One entry a rank in the lists, in the order of the ranks."""

    total: int
    owned: Sequence[int]
    node_of: Sequence[int]
    reader: int
    """Position of the rank that reads with ``readers="one"``."""
    waves: int
    wave_bytes: int
    ways: Sequence[str]
    """Those that go with the algorithm; "every" and "partitioned" do with any."""


Trial = Callable[[str], Sequence[Measured]]
"""Moves the next wave in the way named; gives what each rank saw. Collective."""


def choose(job: Job, trial: Trial) -> tuple[str, str]:
    """The way to move the waves that the trials have left, and why, in a sentence. The same on every rank."""
    if max(job.owned) <= SMALL_BYTES:
        return "every", "chose every: each rank can read its own, which is little"
    seen = trial("every")
    left = max(0.0, 1 - job.wave_bytes / max(job.total, 1))
    owned = [int(nbytes * left) for nbytes in job.owned]
    rates = costs.Rates(_read_rates(seen), float("inf"))
    predictions = {"every": costs.every(owned, rates)}
    if predictions["every"] < costs.WORTH_A_TRIAL or job.waves < 3:
        return "every", costs.spelled("every", predictions, "each rank can read its own, and little is left to gain")
    shared = trial("partitioned")
    nodes = max(job.node_of) + 1
    crossing = [m.link_bytes / m.link_seconds for m in shared if m.link_bytes and m.link_seconds > 0]
    rates = costs.Rates(
        _read_rates(shared),
        min(crossing, default=float("inf")),
    )
    total = int(job.total * left)
    of_node = [
        sum(rate for rate, at in zip(rates.read, job.node_of, strict=True) if at == node) for node in range(nodes)
    ]
    predictions |= {
        "partitioned": costs.partitioned(total, owned, nodes, job.wave_bytes, rates),
        "per_node": costs.per_node(total, owned, of_node),
        "one": costs.one(total, owned, nodes, rates, of_node[job.node_of[job.reader]]),
    }
    predictions = {name: seconds for name, seconds in predictions.items() if name in job.ways}
    best = min(predictions, key=lambda name: predictions[name])
    return best, costs.spelled(best, predictions, "from the rates of the first waves")


def _read_rates(seen: Sequence[Measured]) -> list[float]:
    """Of each rank, bytes/s. One that had nothing to read is taken for the mean of the others."""
    known = [m.read_bytes / m.read_seconds for m in seen if m.read_bytes and m.read_seconds > 0]
    mean = sum(known) / len(known) if known else float("inf")
    return [m.read_bytes / m.read_seconds if m.read_bytes and m.read_seconds > 0 else mean for m in seen]
