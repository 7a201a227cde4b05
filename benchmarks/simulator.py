"""Simulates a load or a sync on an assumed cluster, with the same schedule and cost functions that a real load uses. Pure.

:func:`sync_traffic` counts the bytes over each node's link, as :func:`epload.planning.traffic.traffic` does for a load.
:func:`predict` and :func:`predict_sync` return seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import costs
from costs import INFINITE, Rates, StoreRates
from epload.planning.schedule import WAVE_BYTES, Flow, buckets_per_wave, wave_limit
from epload.planning.streams import ExchangePlan, Members

Nodes = Sequence[Sequence[int]]
"""The global ranks of each node."""
_CHUNK_ON_DEVICE = 512 << 10
"""Bytes that a collective library forwards at a time: NCCL's slice of its Simple protocol."""


@dataclass(frozen=True)
class Cluster:
    """Equal nodes. Rates are in bytes/s, times in seconds."""

    nodes: int
    """Number of nodes."""
    ranks: int
    """Ranks per node."""
    link: float
    """Rate of one network card, each way."""
    links: int = 1
    """Cards of a node that can be used at once."""
    intra: float = INFINITE
    """Rate into one rank from the others of its node. Infinite if they share staging buffers."""
    storage: float = INFINITE
    """Rate at which one node can read."""
    storage_all: float = INFINITE
    """Rate at which all nodes together can read."""
    reader: float = INFINITE
    """Rate at which one rank can read."""
    unpack: float = INFINITE
    """Rate from a staging buffer into one rank's shards, after the last bucket has arrived."""
    message: float = 0.0
    """Time that each bucket's collective takes at any size."""
    hop: float = 0.0
    """Time from a chunk's arrival at a node to its departure."""
    hop_inside: float = 0.0
    """The same between two ranks of a node."""
    fixed: float = 0.0
    """Time of every load, to inspect the model, make the plan and materialize."""
    rounds: int = 0
    """Agreement rounds of the load."""
    on_device: bool = False
    """True if buckets move from device to device, one after another on one stream, read by the leaders; else through host memory
    that a node's ranks share."""
    overlap: bool = False
    """True if, on devices, what crosses nodes and what moves inside them are on two streams."""
    header_wait: float = 0.0
    """Time for which devices are idle after each bucket, where the host looks at its header before the next one moves."""
    wave: int = 0
    """Most bytes of a wave; 0 for the loader's default."""
    store: StoreRates = field(default_factory=StoreRates)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks


def waves(total: int, nodes: Nodes, readers: str, on_device: bool = False, most: int = 0) -> tuple[int, int]:
    """The bytes of a wave and the number of buckets in it, as the loader chooses them for ``total`` bytes. On a device each
    bucket moves alone. ``most``: bytes, instead of the default."""
    size = wave_limit(total, most or WAVE_BYTES)
    return size, 1 if on_device else buckets_per_wave(nodes, readers, size)


def predict(mode: str, total: int, tensors: int, cluster: Cluster, owned: Sequence[int] = ()) -> float:
    """Seconds of a load.

    Args:
        mode: ``"readers/algorithm"``, e.g. ``"one/striped"``. Or a broadcast over one group of all ranks: ``"ring"`` (NCCL's,
            one per bucket), ``"tensor ring"`` (NCCL's, one per tensor) or ``"tree"`` (gloo's, one per bucket).
        total: bytes of the checkpoint.
        tensors: number of tensors.
        cluster: the cluster to simulate.
        owned: for each rank, bytes of its local shards; by default equal parts, as of a fully sharded model.

    Raises:
        ValueError: there is no such mode.
    """
    agreeing = costs.agreement(cluster.nodes, cluster.world, cluster.rounds, cluster.store).seconds
    return cluster.fixed + agreeing + _transfer_seconds(mode, total, tensors, cluster, owned)


def _transfer_seconds(mode: str, total: int, tensors: int, cluster: Cluster, owned: Sequence[int]) -> float:
    c = cluster
    readers, _, algorithm = mode.partition("/")
    nodes = [range(first, first + c.ranks) for first in range(0, c.world, c.ranks)]
    owned = owned or [-(-total // c.world)] * c.world
    one_reads = min(c.reader, c.storage, c.storage_all)
    all_read = min(c.storage, c.storage_all / c.nodes, c.reader * c.ranks) / c.ranks
    leaders_read = min(c.reader, c.storage, c.storage_all / c.nodes)
    read = [leaders_read] * c.nodes if c.on_device and readers == "partitioned" else [all_read] * c.world
    # A leader uses one of its node's cards. With "striped", each rank uses its own.
    cards = min(c.links, c.ranks) if algorithm == "striped" else 1
    link = c.link * cards if c.nodes > 1 else INFINITE
    rates = Rates(read, link, c.unpack, c.intra, c.hop, c.message, c.on_device and not c.overlap)
    wave, per_wave = waves(total, nodes, readers if algorithm else "one", c.on_device, c.wave)
    flow = Flow(tuple(map(tuple, nodes)), 0, 0, "partitioned" if readers == "partitioned" else "one", "two_level", True)
    chunk = _CHUNK_ON_DEVICE if c.on_device else flow.chunk_bytes(total, wave // per_wave, per_wave)
    chunk = min(chunk, wave // per_wave)
    buckets = -(-total * per_wave // wave)
    if mode in ("ring", "tensor ring"):
        count = tensors if mode == "tensor ring" else buckets
        latency = c.nodes * c.hop + (c.world - c.nodes) * c.hop_inside
        return costs.flat_ring(total, count, replace(rates, link=_all_links(c)), one_reads, latency)
    if mode == "tree":
        copies, inside = costs.tree_copies(nodes, 0)
        return costs.flat_tree(total, copies, inside, rates, one_reads, wave) + max(owned) / c.unpack
    overhead = buckets * (c.message + c.header_wait)
    if readers == "one":
        return costs.one(total, owned, c.nodes, rates, one_reads, wave, chunk) + overhead
    if readers == "partitioned":
        extra = costs.partitioned_wave_overhead(total, c.nodes, wave, per_wave, chunk, rates)
        return costs.partitioned(total, owned, c.nodes, wave, rates) + extra + overhead
    if readers == "per_node":
        return costs.per_node(total, owned, [leaders_read], rates) + overhead
    if readers == "every":
        return costs.every(owned, replace(rates, read=[min(all_read, c.unpack)] * c.world))
    raise ValueError(f"expected a mode such as 'one/two_level', 'ring', 'tensor ring' or 'tree', got {mode!r}")


def _all_links(cluster: Cluster) -> float:
    return cluster.link * cluster.links if cluster.nodes > 1 else INFINITE


@dataclass(frozen=True)
class SyncLoad:
    """The bytes that a sync of one version moves, as its plans have it."""

    total: int
    received: int
    """Into the receiving node that receives most."""
    sent: int
    """Out of the trainer's node that sends most."""
    trainers: int
    """Nodes of the trainer."""
    rollouts: int
    """Receiving nodes."""
    chain: int
    """Nodes that want the same bytes."""
    waves: int
    chunk: int
    """Bytes that a node passes on at a time."""

    def bound(self, cluster: Cluster) -> float:
        """Seconds that no sync can be under: what a node needs over its links, or all bytes over all of the trainer's."""
        rate = cluster.link * min(cluster.links, cluster.ranks)
        return max(self.received / rate, self.total / (self.trainers * rate))


def predict_sync(load: SyncLoad, cluster: Cluster, stage: str, buffers: int = 2) -> float:
    """Seconds of a steady sync, from the call until every rank has committed to the version.

    Args:
        cluster: what the nodes of both jobs are; its number of nodes does not count.
        stage: the receivers'. With ``"none"``, a node has memory for ``buffers`` waves, and the last is still to be unpacked.
    """
    nodes = load.trainers + load.rollouts
    agreeing = costs.agreement(nodes, nodes * cluster.ranks, cluster.rounds, cluster.store).seconds
    rate = cluster.link * min(cluster.links, cluster.ranks)
    rates = Rates((), cluster.link, hop=cluster.hop)
    kept = load.waves if stage == "host" else buffers
    moving = costs.sync(load.received, load.sent, rate, rate, load.chain, load.waves, kept, load.chunk, rates)
    last = 0.0 if stage == "host" else load.received / load.waves / cluster.ranks / cluster.unpack
    return cluster.fixed + agreeing + moving + last


class Traffic(NamedTuple):
    """Bytes that each node receives from and sends to other nodes."""

    received: list[int]
    sent: list[int]


def sync_traffic(plans: Iterable[ExchangePlan], members: Members) -> tuple[Traffic, Traffic]:
    """Bytes that each node of the senders, and each that receives, gets from and passes to other nodes.

    Args:
        plans: of every rank that sends.
    """
    node_of = {rank: number for number, node in enumerate(members.sender_nodes) for rank in node}
    out, into = (Traffic([0] * len(nodes), [0] * len(nodes)) for nodes in (members.sender_nodes, members.nodes))
    for plan in plans:
        for bucket in plan.buckets:
            path = bucket.stream.path(bucket.wave)
            out.sent[node_of[bucket.stream.owner]] += bucket.nbytes
            for node in path:
                into.received[node] += bucket.nbytes
            for node in path[:-1]:
                into.sent[node] += bucket.nbytes
    return out, into
