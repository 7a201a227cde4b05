"""The cost functions of docs/algorithms.md: seconds that a load takes in each mode. Pure.

Sizes are in bytes, rates in bytes/s, times in seconds. Parameters that several functions share:
    total: bytes of the checkpoint.
    owned: for each rank, bytes of its local shards.
    nodes: number of nodes.
    wave: bytes of a wave, the buckets that move together.
    chunk: bytes that a relay forwards at a time.
    reader: rate at which the reading rank reads alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epload.ranks.tree import FAN_OUT

INFINITE = float("inf")
LOOKS = 3
"""Number of times that a rank looks at the store until what it waits for is there."""


@dataclass(frozen=True)
class Rates:
    """Rates (bytes/s) and latencies (seconds) of a cluster, measured or assumed."""

    read: Sequence[float]
    """Rate of each rank while all ranks read."""
    link: float
    """Over one node's link, each way. Infinite if there is one node."""
    unpack: float = INFINITE
    """Rate from a staging buffer into one rank's shards, after the last bucket has arrived."""
    intra: float = INFINITE
    """Rate into one rank from the others of its node. Infinite if they share staging buffers."""
    hop: float = 0.0
    """Seconds from a chunk's arrival at a rank to its departure."""
    message: float = 0.0
    """Seconds that each bucket's collective takes at any size."""
    in_turn: bool = False
    """True if a bucket's steps between and inside nodes follow one another, as on one stream of a device."""

    def moving(self, crossing: float, spreading: float) -> float:
        """Seconds of the steps between and inside nodes together, from those of each."""
        return crossing + spreading if self.in_turn else max(crossing, spreading)


def every(owned: Sequence[int], rates: Rates) -> float:
    """Every rank reads its own regions. The slowest rank decides."""
    return max((nbytes / rate for nbytes, rate in zip(owned, rates.read, strict=True) if nbytes), default=0.0)


def partitioned(total: int, owned: Sequence[int], nodes: int, wave: int, rates: Rates) -> float:
    """All ranks read an equal share of every wave, and each node receives the other nodes' shares over its link.

    The slowest reader decides, because shares are equal. The first wave is read before anything moves.
    """
    together = len(rates.read) * min(rates.read)
    reading = total / together
    crossing = total * (nodes - 1) / nodes / rates.link
    spreading = total / rates.intra
    fill = (wave / together + (nodes - 1) * rates.hop) * (nodes > 1)
    return max(reading, rates.moving(crossing, spreading)) + fill + max(owned, default=0) / rates.unpack


def partitioned_wave_overhead(total: int, nodes: int, wave: int, per_wave: int, chunk: int, rates: Rates) -> float:
    """Extra seconds of :func:`partitioned` for the hops around the ring of nodes.

    A node can forward a chunk when it has arrived, ``chunk / link + hop`` after the node before began to send it. With a bucket
    of each node in a wave, that is hidden while the nodes still send their own buckets, if these take longer; and the next wave
    begins when the last chunk has arrived. With fewer, the next wave's readers are ``per_wave`` nodes further along the ring, and
    start one after another, each when all of this wave has passed it.
    """
    if nodes < 2:
        return 0.0
    forwarded = rates.hop + chunk / rates.link
    if per_wave < nodes:
        return total / wave * per_wave * forwarded
    own = wave / nodes / rates.link
    return total / wave * (rates.hop + (nodes - 2) * max(0.0, forwarded - own))


def one(total: int, owned: Sequence[int], nodes: int, rates: Rates, reader: float, wave: int = 0, chunk: int = 0) -> float:
    """One rank reads everything, and a chain of nodes forwards it."""
    crossing = total / rates.link if nodes > 1 else 0.0
    spreading = total / rates.intra
    fill = wave / reader + max(nodes - 2, 0) * (chunk / rates.link + rates.hop)
    return max(total / reader, rates.moving(crossing, spreading)) + fill + max(owned, default=0) / rates.unpack


def sync(
    received: int, sent: int, into: float, out: float, chain: int, waves: int, buffers: int, chunk: int, rates: Rates
) -> float:
    """A version from one job to another, until it is in the memory of every receiving node.

    A chunk passes through a chain of nodes, so that the last has it ``chain - 1`` hops later. A node that has memory for fewer
    waves than there are takes a wave only when an earlier one has come around.

    Args:
        received: bytes into the node that receives most.
        sent: bytes out of the trainer's node that sends most.
        into: rate into a node.
        out: rate out of a trainer's node.
        chain: most nodes that a bucket passes through.
        waves: how many there are.
        buffers: waves that a receiving node has memory for.
    """
    around = (chain - 1) * (chunk / rates.link + rates.hop)
    moving = max(received / into, sent / out)
    if buffers < waves:
        moving = max(moving, (waves * around + received / into) / buffers)
    return moving + around


def per_node(total: int, owned: Sequence[int], readers: Sequence[float], rates: Rates) -> float:
    """One rank of each node reads everything. ``readers``: the rate of each. The slowest node decides."""
    return max(total / min(readers), total / rates.intra) + max(owned, default=0) / rates.unpack


def flat_ring(total: int, buckets: int, rates: Rates, reader: float, latency: float) -> float:
    """A ring broadcast over one group of all ranks, as NCCL's.

    ``rates.link`` is the rate of all links of a node together, ``latency`` the seconds from the first rank to the last.
    """
    moving = total / min(rates.link, rates.intra)
    return max(total / reader, moving) + buckets * rates.message + latency


def flat_tree(total: int, copies: int, inside: int, rates: Rates, reader: float, wave: int = 0) -> float:
    """A tree broadcast over one group of all ranks, as gloo's.

    ``copies`` and ``inside`` are those of :func:`tree_copies`.
    """
    return wave / reader + copies * total / rates.link + inside * total / rates.intra


def tree_copies(nodes: Sequence[Sequence[int]], src: int) -> tuple[int, int]:
    """Counts, in gloo's binomial tree, the copies that leave the busiest node, and those that ``src`` sends inside its own node.

    Args:
        nodes: the global ranks of each node.
        src: global rank of the source.
    """
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
    """The (sender, receiver) pairs of gloo's broadcast.

    In step i, the first 2**i ranks, counted from ``src``, send to as many others.
    """
    count, first = len(ranks), ranks.index(src)
    edges, reach = [], 1
    while reach < count:
        edges += [(i, i + reach) for i in range(min(reach, count - reach))]
        reach *= 2
    return [(ranks[(a + first) % count], ranks[(b + first) % count]) for a, b in edges]


@dataclass(frozen=True)
class StoreRates:
    """Seconds that agreement costs, as measured by bench_control.py."""

    operation: float = 0.0
    """Seconds of the store's server for one operation of many."""
    round: float = 0.0
    """Seconds of the store's server for one round besides: each operation that comes alone wakes it."""
    rank: float = 0.0
    """Seconds of the coordinator for the view of one rank in one round."""
    level: float = 0.0
    """Seconds from the views of one level of the tree to those of the next."""


@dataclass(frozen=True)
class Agreement:
    """The agreement rounds of one load."""

    operations: int
    """Operations of the store, by all ranks."""
    most: int
    """The most operations of one rank."""
    server: float
    """Seconds for which the store's server computes."""
    seconds: float


def agreement(nodes: int, ranks: int, rounds: int, store: StoreRates) -> Agreement:
    """The rounds of a load of ``ranks`` ranks on ``nodes`` nodes: see ranks/rounds.py. All ranks come to each at once.

    A leader sets its views, looks for the decision, and deletes the views; the coordinator sets the decision and deletes it.
    Every parent looks for the views of its children, and gets them.
    """
    parents = -(-(nodes - 1) // FAN_OUT)
    operations = rounds * ((2 + LOOKS) * (nodes - 1) + (2 + LOOKS) * parents + 2)
    most = rounds * (2 if nodes == 1 else 4 + 2 * LOOKS)
    levels, reach, last = 0, 1, 1
    while reach < nodes:
        last *= FAN_OUT
        reach += last
        levels += 1
    server = operations * store.operation + rounds * store.round
    return Agreement(operations, most, server, server + rounds * (levels * store.level + ranks * store.rank))
