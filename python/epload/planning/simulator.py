"""What a load would move and take on a cluster that is not at hand: the plan's waves and roles, and the cost functions.

Touches no device and no network. :func:`traffic` follows every bucket through :class:`Flow` and counts the bytes
over each node's link; :func:`predict` gives seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from epload.planning import costs
from epload.planning.costs import INFINITE, Rates
from epload.planning.schedule import Flow, buckets_per_wave, wave_limit

Nodes = Sequence[Sequence[int]]
BUCKET_BYTES = 64 << 20


@dataclass(frozen=True)
class Cluster:
    """N equal nodes, in numbers. Bytes/s and seconds."""

    nodes: int
    ranks: int
    """A node."""
    link: float
    """Of one network card, each way."""
    links: int = 1
    """Cards of a node that can be used at once."""
    intra: float = INFINITE
    """Into one rank from the others of its node; infinite where ranks share their staging buffers."""
    storage: float = INFINITE
    """At which one node can read."""
    storage_all: float = INFINITE
    """At which all nodes together can read."""
    reader: float = INFINITE
    """At which one rank can read."""
    place: float = INFINITE
    """At which one rank takes what it owns out of a staging buffer, after the last bucket."""
    message: float = 0.0
    hop: float = 0.0
    """Between nodes."""
    hop_inside: float = 0.0
    fixed: float = 0.0
    """Of every load: walking the model, the plan, materializing."""
    per_rank: float = 0.0
    """More of that for every rank: agreement goes through one store."""

    @property
    def world(self) -> int:
        return self.nodes * self.ranks


@dataclass(frozen=True)
class Traffic:
    """Bytes that come into and go out of each node over its link."""

    into: list[int] = field(default_factory=list)
    out: list[int] = field(default_factory=list)


def waves(total: int, nodes: Nodes, readers: str, most: int = BUCKET_BYTES) -> tuple[int, int]:
    """Bytes of a wave and buckets in it, as the loader chooses them."""
    size = wave_limit(total, most)
    return size, buckets_per_wave(nodes, readers, size)


def traffic(
    buckets: Sequence[int], per_wave: int, nodes: Nodes, readers: str, algorithm: str, src: int = 0, shared: bool = True
) -> Traffic:
    """What the ranks of each node receive from and send to other nodes, by the roles that the loader gives them.

    Args:
        buckets: bytes of each, in order.
        per_wave: how many move together.
    """
    moved = Traffic([0] * len(nodes), [0] * len(nodes))
    node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
    ranks = sorted(node_of)
    flows = {
        rank: Flow(tuple(map(tuple, nodes)), rank, src, readers, algorithm, shared and algorithm != "flat")
        for rank in ranks
    }
    if not flows[src].crosses:
        return moved
    for first in range(0, len(buckets), per_wave):
        wave, end = [], 0
        for number in range(first, min(first + per_wave, len(buckets))):
            wave.append((number, end, end + buckets[number]))
            end += buckets[number]
        if algorithm == "flat":
            for number, begin, stop in wave:
                for sender, receiver in costs.tree_edges(ranks, flows[src].reader(number)):
                    _count(moved, node_of[sender], node_of[receiver], stop - begin)
            continue
        for rank, flow in flows.items():
            if rank in flow.relays:
                for begin, stop, source, _, target, _ in flow.steps(wave):
                    if source >= 0:
                        moved.into[node_of[rank]] += stop - begin
                    if target >= 0:
                        moved.out[node_of[rank]] += stop - begin
    return moved


def _count(moved: Traffic, sender: int, receiver: int, nbytes: int) -> None:
    if sender != receiver:
        moved.out[sender] += nbytes
        moved.into[receiver] += nbytes


def predict(way: str, total: int, tensors: int, cluster: Cluster) -> float:
    """Seconds of a load of ``total`` bytes in ``tensors`` tensors into a fully sharded model.

    Args:
        way: ``"readers/algorithm"``; or ``"ring"``, a flat ring of buckets as NCCL's, ``"tensor ring"``, one broadcast a
            tensor in the same ring, ``"tree"``, gloo's flat tree of buckets.

    Raises:
        ValueError: no such way.
    """
    return cluster.fixed + cluster.per_rank * cluster.world + _moving(way, total, tensors, cluster)


def _moving(way: str, total: int, tensors: int, cluster: Cluster) -> float:
    c = cluster
    readers, _, algorithm = way.partition("/")
    nodes = [range(first, first + c.ranks) for first in range(0, c.world, c.ranks)]
    owned = [-(-total // c.world)] * c.world
    one_reads = min(c.reader, c.storage, c.storage_all)
    all_read = min(c.storage, c.storage_all / c.nodes, c.reader * c.ranks) / c.ranks
    # A leader uses one of its node's cards; with stripes each rank uses its own.
    cards = min(c.links, c.ranks) if algorithm == "striped" else 1
    rates = Rates([all_read] * c.world, c.link * cards if c.nodes > 1 else INFINITE, c.place, c.intra, c.hop, c.message)
    wave, per_wave = waves(total, nodes, readers if readers in ("partitioned", "auto") else "one")
    flow = Flow(tuple(map(tuple, nodes)), 0, 0, "partitioned" if readers == "partitioned" else "one", "two_level", True)
    chunk = min(flow.chunk_bytes(total, wave // per_wave, per_wave), wave // per_wave)
    buckets = -(-total * per_wave // wave)
    if way in ("ring", "tensor ring"):
        count = tensors if way == "tensor ring" else buckets
        latency = c.nodes * c.hop + (c.world - c.nodes) * c.hop_inside
        return costs.flat_ring(total, count, replace(rates, link=_all_links(c)), one_reads, latency)
    if way == "tree" or algorithm == "flat":
        copies, inside = costs.tree_copies(nodes, 0)
        return costs.flat_tree(total, copies, inside, rates, one_reads, wave) + owned[0] / c.place
    overhead = buckets * c.message
    if readers == "one":
        return costs.one(total, owned, c.nodes, rates, one_reads, wave, chunk) + overhead
    if readers == "partitioned":
        more = costs.partitioned_waves(total, c.nodes, wave, per_wave, chunk, rates) if c.nodes > 1 else 0.0
        return costs.partitioned(total, owned, c.nodes, wave, rates) + more + overhead
    if readers == "per_node":
        reading = min(c.reader, c.storage, c.storage_all / c.nodes)
        return costs.per_node(total, owned, [reading], rates) + overhead
    if readers == "every":
        return costs.every(owned, replace(rates, read=[min(all_read, c.place)] * c.world))
    raise ValueError(f"expected a way such as 'one/two_level', 'ring', 'tensor ring' or 'tree', got {way!r}")


def _all_links(cluster: Cluster) -> float:
    return cluster.link * cluster.links if cluster.nodes > 1 else INFINITE
