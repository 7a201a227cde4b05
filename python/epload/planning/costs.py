"""What a load costs, by the formulas of docs/algorithms.md, and the choice between ways of reading that follows. Pure.

Symbols: S bytes, N nodes of G ranks, W ranks, B_i bytes/s of a node's link, b bytes of a wave, c bytes of a chunk. Rates are
bytes/s. ``auto.py`` asks with what the first waves have shown, ``simulator.py`` with what a cluster is assumed to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MEMORY_RATE = 2e9
"""Bytes/s at which a rank can be counted on to unpack from memory (measured: 2.6e9 in pieces of 12 kB on 2 busy cores)."""
WORTH_A_TRIAL = 1.0
"""Seconds a load must still take before another way of reading is tried on one wave of it."""
INFINITE = float("inf")


@dataclass(frozen=True)
class Rates:
    """What has been measured, or is assumed."""

    read: Sequence[float]
    """For each rank, bytes/s at which it read what it owns while all others did the same."""
    link: float
    """Bytes/s over one node's link; infinite if there is one node."""
    unpack: float = MEMORY_RATE
    """Bytes/s from a staging buffer into one rank's shards, where that comes after everything else."""
    intra: float = INFINITE
    """Bytes/s into one rank from the others of its node; infinite where they share their staging buffers."""
    hop: float = 0.0
    """Seconds from a chunk's arrival at a rank to its departure."""
    message: float = 0.0
    """Seconds that each bucket's collective costs whatever its size."""


def every(owned: Sequence[int], rates: Rates) -> float:
    """Each rank reads its own regions: as slow as the slowest."""
    return max((nbytes / rate for nbytes, rate in zip(owned, rates.read, strict=True) if nbytes), default=0.0)


def partitioned(total: int, owned: Sequence[int], nodes: int, wave: int, rates: Rates) -> float:
    """All read a share of every wave; each node's link carries the shares of the others, both ways at once.

    Their shares are equal, so that the slowest reader decides. The first wave is read before anything moves.
    """
    together = len(rates.read) * min(rates.read)
    reading = total / together
    crossing = total * (nodes - 1) / nodes / rates.link
    spreading = total / rates.intra
    fill = (wave / together + (nodes - 1) * rates.hop) * (nodes > 1)
    return max(reading, crossing, spreading) + fill + max(owned, default=0) / rates.unpack


def partitioned_waves(total: int, nodes: int, wave: int, per_wave: int, chunk: int, rates: Rates) -> float:
    """What :func:`partitioned` costs more where a wave has fewer buckets than there are nodes.

    The readers of the next wave stand ``per_wave`` nodes further along the ring, and begin when the last chunk has come there.
    """
    if nodes <= per_wave:
        return 0.0
    return total / wave * per_wave * (rates.hop + chunk / rates.link)


def one(
    total: int, owned: Sequence[int], nodes: int, rates: Rates, reader: float, wave: int = 0, chunk: int = 0
) -> float:
    """One rank reads, at ``reader`` bytes/s, and a chain of nodes passes everything on."""
    crossing = total / rates.link if nodes > 1 else 0.0
    spreading = total / rates.intra
    fill = wave / reader + max(nodes - 2, 0) * (chunk / rates.link + rates.hop)
    return max(total / reader, crossing, spreading) + fill + max(owned, default=0) / rates.unpack


def per_node(total: int, owned: Sequence[int], readers: Sequence[float], rates: Rates | None = None) -> float:
    """One rank of each node reads everything."""
    rates = rates or Rates((), INFINITE)
    return max(total / min(readers), total / rates.intra) + max(owned, default=0) / rates.unpack


def flat_ring(total: int, buckets: int, rates: Rates, reader: float, latency: float) -> float:
    """One group of all ranks, each passing on to the next, as NCCL broadcasts: ``rates.link`` of all links of a node, ``latency``
    seconds from the first rank to the last."""
    moving = total / min(rates.link, rates.intra)
    return max(total / reader, moving) + buckets * rates.message + latency


def flat_tree(total: int, copies: int, inside: int, rates: Rates, reader: float, wave: int = 0) -> float:
    """gloo's tree over all ranks: ``copies`` of everything leave the busiest node over its link, after ``inside`` steps in it."""
    return wave / reader + copies * total / rates.link + inside * total / rates.intra


def tree_copies(nodes: Sequence[Sequence[int]], src: int) -> tuple[int, int]:
    """Of gloo's binomial tree: copies that leave the busiest node, and steps in which the source sends inside its own."""
    node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
    out = [0] * len(nodes)
    inside = 0
    for sender, receiver in tree_edges(sorted(node_of), src):
        if node_of[sender] != node_of[receiver]:
            out[node_of[sender]] += 1
        elif sender == src:
            inside += 1
    return max(out), inside


def tree_edges(ranks: Sequence[int], src: int) -> list[tuple[int, int]]:
    """Who sends to whom in gloo's broadcast: in step i, the first 2**i ranks (counted from the source) to as many others."""
    count, first = len(ranks), ranks.index(src)
    edges, reach = [], 1
    while reach < count:
        edges += [(i, i + reach) for i in range(min(reach, count - reach))]
        reach *= 2
    return [(ranks[(a + first) % count], ranks[(b + first) % count]) for a, b in edges]


def spelled(readers: str, predictions: dict[str, float], why: str) -> str:
    """The choice in a sentence, e.g. ``chose every: predicted 0.8 s, partitioned 2.1 s``."""
    others = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in predictions.items() if name != readers)
    own = f": predicted {predictions[readers]:.2g} s" if readers in predictions else ""
    return f"chose {readers}{own}{', ' + others if others else ''} ({why})"
