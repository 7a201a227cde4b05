"""Determines which rank reads which bucket, and which pieces of it each rank receives and passes on. Pure: nodes and numbers in,
roles out. Stripes, chains and leaders are computed in csrc/schedule.cpp, which the broadcast op uses too.

Buckets move in waves: consecutive buckets that share a staging buffer. With one reader a wave is one bucket; with several it has
a bucket for each of them, so that all read, send and receive at once.

The algorithm ``two_level`` sends each bucket along one rank of each node, on the rail of the source. ``striped`` cuts it into a
stripe for each rank of a node, which sends it along its rail, so that all nodes need equally many ranks. Inside a node a bucket
is passed on, or gathered, over the node's own group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Literal, get_args

from epload.native.extension import _C

Readers = Literal["auto", "one", "per_node", "partitioned", "every"]
"""Choices of the ranks that read."""
Algorithm = Literal["two_level", "striped"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
Algorithms = Algorithm | Literal["auto"]
READERS = tuple(choice for choice in get_args(Readers) if choice != "auto")
MIN_WAVES = 3
MIN_WAVE_BYTES = 8 << 20
"""A load has at least so many waves, unless they would be smaller than this: the first is read before anything can be sent, and
the last unpacked when all else is done."""
MIN_PART_BYTES = 4 << 20
"""A reader's share of a wave is no smaller, so that its reads stay long, and sending a node's share takes longer than a hop."""
WAVE_BYTES = 64 << 20
"""Maximum bytes of a load's wave, or of a device's bucket, if the caller gives none."""
SYNC_WAVE_BYTES = 128 << 20
"""Bytes of a wave of a sync. Between two waves the ranks of a node wait for one another, which takes 1 to 2 ms where cores are
few: as long as 8 MB over loopback."""
MAX_WAVE_BYTES = 512 << 20
"""Maximum bytes of a wave that grows with the number of bytes of a sync."""
MAX_READERS_OF_SOME_NODES = 16
"""Readers that share a wave with no room for one of each node. Each delays the next wave's readers by a hop, and takes a part of
the reading."""
_MAX_FILL = 1 / 128
_MAX_WAVE_FILL = 1 / 16
_CHUNK_BYTES = (512 << 10, 16 << 20)

Step = tuple[int, int, int, int, int, int]
"""begin, end (bytes of the wave), from (inter-node group, intra-node group), to (likewise); global ranks, -1 for none."""
Ranks = tuple[int, ...]
STRIPE_ALIGNMENT = 64
"""Bytes; every stripe but the last is a multiple."""


def groups_between(nodes: Sequence[Ranks], src: int, rank: int, algorithm: str) -> tuple[tuple[Ranks, ...], int]:
    """Returns the groups of ranks between nodes for what comes from ``src``, and from which of their ranks ``rank`` gets it."""
    node, own = (next(i for i, ranks in enumerate(nodes) if member in ranks) for member in (src, rank))
    if algorithm == "striped":
        rails = tuple(map(tuple, _C.rails(nodes)))
        return rails, next(rail for rail in rails if rank in rail)[node]
    leaders = tuple(_C.leaders(nodes, src))
    return (leaders,), leaders[own]


@dataclass(frozen=True)
class Flow:
    """The roles of all ranks in one load, as seen by ``rank``. Equal on all ranks but for ``rank``."""

    nodes: tuple[tuple[int, ...], ...]
    rank: int
    src: int
    readers: str
    algorithm: str
    shared: bool
    """True if the ranks of a node share their staging buffers; else each has its own and bytes are passed on to it."""

    @cached_property
    def node(self) -> int:
        """Number of this rank's node."""
        return self._node_of[self.rank]

    @cached_property
    def _node_of(self) -> dict[int, int]:
        return {rank: i for i, node in enumerate(self.nodes) for rank in node}

    @cached_property
    def sharers(self) -> tuple[int, ...]:
        """The ranks that use this rank's staging buffers."""
        return self.nodes[self.node] if self.shared else (self.rank,)

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """One rank per node: those on the rail of ``src``."""
        return tuple(_C.leaders(self.nodes, self.src))

    @cached_property
    def turns(self) -> tuple[int, ...]:
        """The ranks that read, in the order in which they take buckets: one of each node, then the next of each."""
        if self.readers == "one":
            return (self.src,)
        if self.readers == "per_node":
            return self.leaders
        if self.readers == "every":
            return tuple(sorted(rank for node in self.nodes for rank in node))
        nodes = self.nodes if self.shared else [[leader] for leader in self.leaders]
        return tuple(rank for row in zip_longest(*nodes) for rank in row if rank is not None)

    @property
    def reads(self) -> bool:
        """True if this rank reads."""
        return self.rank in self.turns

    def reader(self, bucket: int) -> int:
        """The rank that reads a bucket for this rank."""
        if self.readers == "per_node":
            return self.leaders[self.node]
        return self.turns[bucket % len(self.turns)]

    @cached_property
    def relays(self) -> tuple[int, ...]:
        """The sharers through which bytes come into the staging buffers and go on."""
        if not self.shared:
            return self.sharers if len(self.nodes[self.node]) > 1 or self.crosses else ()
        if not self.crosses:
            return ()
        return self.sharers if self.algorithm == "striped" else (self.leaders[self.node],)

    @property
    def crosses(self) -> bool:
        """True if bytes move between nodes."""
        return crosses(self.nodes, self.readers)

    @property
    def stripes_multiple(self) -> int:
        """Bytes; a bucket whose size is a multiple has equal stripes, which the ranks of a node gather at once."""
        return len(self.nodes[self.node]) * STRIPE_ALIGNMENT if self.algorithm == "striped" else 1

    def steps(self, buckets: Sequence[tuple[int, int, int]]) -> list[Step]:
        """Returns the steps that this rank, one of ``relays``, takes with the buckets of a wave.

        Each node's leader (or, striped, each rank, with its stripe of every bucket) stands in a ring with those of the other
        nodes, and every bucket goes once around from its reader's node to the one before. A rank takes its own node's buckets
        first, then those of the node before, and so on, so that all links are busy and neighbors agree on the order.
        Without shared buffers, the same order goes on from the leader along a chain of its node's ranks.

        Args:
            buckets: number of the bucket, begin and end in the wave.
        """
        read_on = [(self._node_of[self.reader(number)], begin, end) for number, begin, end in buckets]
        who = self.nodes, self.src, self.rank, self.algorithm, self.shared, self.crosses
        return _C.wave_steps(*who, read_on, STRIPE_ALIGNMENT)

    def chunk_bytes(self, total: int, bucket: int = 0, per_wave: int = 1) -> int:
        """Bytes of a message: large, but so that filling the longest chain takes little of the time of ``total`` bytes.

        With several readers, a node begins to forward a chunk while the node before it still sends the rest of what it reads of a
        wave, at most ``per_wave`` buckets of ``bucket`` bytes: a chunk is a small part of that, but not under 512 KiB.
        """
        hops = len(self.nodes) - 1 if self.crosses else 0
        if not self.shared:
            hops += max(map(len, self.nodes)) - 1
        low, high = _CHUNK_BYTES
        if self.readers == "partitioned" and self.crosses and len(self.nodes) > 2:
            high = int(min(high, bucket * max(per_wave // len(self.nodes), 1) * _MAX_WAVE_FILL)) >> 16 << 16
        return max(low, min(high, int(total * _MAX_FILL / max(hops - 1, 1)) >> 16 << 16))


def crosses(nodes: Sequence[Sequence[int]], readers: str) -> bool:
    """Returns True if bytes move between nodes."""
    return len(nodes) > 1 and readers not in ("per_node", "every")


def buckets_per_wave(nodes: Sequence[Sequence[int]], readers: str, wave_bytes: int) -> int:
    """Returns the number of readers that share a wave: a whole number of ranks a node where that leaves each enough."""
    if readers != "partitioned":
        return 1
    ranks = sum(map(len, nodes))
    count = max(1, min(ranks, wave_bytes // MIN_PART_BYTES))
    return count // len(nodes) * len(nodes) if count >= len(nodes) else min(count, MAX_READERS_OF_SOME_NODES)


def wave_limit(total: int, limit: int) -> int:
    """Bytes of a wave in a load of ``total`` bytes."""
    return min(limit, max(MIN_WAVE_BYTES, total // MIN_WAVES))
