"""Describes a sync as one rank sees it: its participants, streams of buckets, and their paths from node to node. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from epload.planning.bucket_layout import BucketLayout
from epload.planning.buckets import BucketCopies
from epload.planning.pulls import Pulls
from epload.planning.schedule import Step
from epload.planning.waves import Wave


@dataclass(frozen=True)
class Members:
    """The participants. Ranks are numbered over both jobs, senders first."""

    sender_nodes: tuple[tuple[int, ...], ...]
    nodes: tuple[tuple[int, ...], ...]
    """The receiving nodes. Ranks of a node share memory."""

    @cached_property
    def senders(self) -> tuple[int, ...]:
        return tuple(sorted(chain.from_iterable(self.sender_nodes)))

    @cached_property
    def receivers(self) -> tuple[int, ...]:
        return tuple(sorted(chain.from_iterable(self.nodes)))

    @cached_property
    def rails(self) -> int:
        """Number of ranks of each node that send or receive over a NIC of their own."""
        return min(map(len, (*self.sender_nodes, *self.nodes)))

    @cached_property
    def rail_of(self) -> dict[int, int]:
        """Rail of each rank; a receiver that is in none takes what others of its node receive."""
        of_senders = {rank: i % self.rails for node in self.sender_nodes for i, rank in enumerate(node)}
        return of_senders | {rank: i for node in self.nodes for i, rank in enumerate(node[: self.rails])}

    def rail(self, number: int) -> tuple[int, ...]:
        """The ranks of one rail, ascending."""
        return tuple(sorted(rank for rank, rail in self.rail_of.items() if rail == number))


class Stream(NamedTuple):
    """The buckets that one rank sends to some nodes."""

    owner: int
    nodes: tuple[int, ...]
    """Numbers of nodes, ascending."""
    number: int
    """Position of the set of nodes among the plan's. Also where the buckets go to some of them only."""

    def path(self, wave: int) -> tuple[int, ...]:
        """The nodes in the order in which a wave's bucket passes through them: each begins at another one."""
        first = (wave + self.owner) % len(self.nodes)
        return self.nodes[first:] + self.nodes[:first]

    def hops(self, node: int, wave: int) -> int:
        """Returns the number of nodes that a wave's bucket passes through before this one."""
        return (self.nodes.index(node) - wave - self.owner) % len(self.nodes)


@dataclass(frozen=True, eq=False)
class ExchangeBucket(BucketCopies):
    """A part of a stream that moves in one wave. Its copies pack it on a rank that sends it, and unpack it on the others."""

    stream: Stream
    wave: int
    tensors: tuple[int, int]
    """The first and the last tensor that it has boxes of."""
    padding: Tensor
    """int64 [n]: offsets of the bytes between its slots, which are zero."""
    base: BucketCopies | None = None
    """The copies between it and a version that this rank's node has in the layout of another plan."""

    def order(self, node: int) -> tuple[int, int, int, int]:
        """Returns the key by which a rank of a node, or a sender (-1), orders its buckets: wave by wave first those that come
        from their sender, then those that have come by one node, and so on, so that nodes never wait for each other."""
        hops = self.stream.hops(node, self.wave) if node >= 0 else 0
        return self.wave, hops, self.stream.owner, self.stream.number


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """The buckets that one rank sends, or its node receives, in the order in which it does."""

    buckets: Sequence[ExchangeBucket]
    fingerprint: bytes
    """32 bytes over everything that the ranks share."""
    source: str
    """Source of the tensors, for messages."""
    names: tuple[str, ...]
    total: int
    """Bytes of all tensors, as they move."""
    node_sets: tuple[tuple[int, ...], ...]
    """Numbers of the nodes that need the same of some tensors, for all tensors. Equal on all ranks."""
    pulls: Pulls | None = None
    """The boxes that this rank copies straight out of the memory of senders into its tensors."""
    landing: ExchangePlan | None = None
    """Buckets that do not move: this rank's node copies them straight out of the memory of senders into its own."""
    lent: int = 0
    """Bytes that receivers copy straight out of this sender's memory; each node once."""
    borrowers: tuple[int, ...] = ()
    """The ranks that copy out of any sender's memory. Equal on all ranks."""
    sources: Mapping[int, Sequence[ExchangeBucket]] = field(default_factory=dict)
    """A landing's buckets again, by sender, with the copies out of that sender's tensors. Those that another one owns have
    none that count."""
    node: int = -1
    """Number of this rank's node; -1 on a sender."""
    layout: BucketLayout | None = None
    """The places of slots in the buckets; None on a sender."""
    dtypes: tuple[torch.dtype, ...] = ()
    """The dtype in which each tensor moves."""

    def toward(self, nodes: Collection[int]) -> ExchangePlan:
        """Returns the plan by which the same buckets go to some of the nodes only."""
        if all(node in nodes for node in chain.from_iterable(self.node_sets)):
            return self
        buckets = {}
        for number, bucket in enumerate(self.buckets if self.node < 0 or self.node in nodes else ()):
            stream = bucket.stream._replace(nodes=tuple(node for node in bucket.stream.nodes if node in nodes))
            if stream.nodes:
                buckets[number] = replace(bucket, stream=stream)
        order = sorted(buckets, key=lambda number: buckets[number].order(self.node))
        layout = self.layout
        if layout is not None and order:
            layout = replace(layout, bucket=torch.tensor(order).argsort()[layout.bucket])
        fingerprint = hashlib.blake2b(repr(sorted(nodes)).encode(), digest_size=32, key=self.fingerprint).digest()
        return replace(self, buckets=[buckets[i] for i in order], fingerprint=fingerprint, layout=layout)

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank sends, or its node receives; headers included."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @cached_property
    def waves(self) -> list[Wave]:
        """The buckets of each wave in which there are any."""
        groups = [list(numbers) for _, numbers in groupby(range(len(self.buckets)), lambda i: self.buckets[i].wave)]
        return [
            Wave.of(index, numbers, [self.buckets[number].nbytes for number in numbers]) for index, numbers in enumerate(groups)
        ]

    @property
    def landing_waves(self) -> list[Wave]:
        """The waves of the landing, behind those of the buckets that move."""
        waves = self.landing.waves if self.landing is not None else []
        return [replace(wave, index=len(self.waves) + wave.index) for wave in waves]

    def identity(self, number: int) -> tuple[int, bytes]:
        """Returns what identifies a bucket's header on the ranks that send and receive it: its wave, and 16 bytes."""
        bucket = self.buckets[number]
        stream = repr((bucket.stream.owner, bucket.stream.number)).encode()
        return bucket.wave, hashlib.blake2b(stream, digest_size=16, key=self.fingerprint).digest()

    def describe(self, numbers: Sequence[int]) -> str:
        """Names the tensors in some consecutive buckets, for messages."""
        ends = self.names[self.buckets[numbers[0]].tensors[0]], self.names[self.buckets[numbers[-1]].tensors[1]]
        return f"{' to '.join(dict.fromkeys(ends))} of {self.source}"


@dataclass(frozen=True, eq=False)
class ExchangeRoles:
    """The role of each rank in a sync, as seen by ``rank``, as :class:`~epload.planning.schedule.Flow` has those in a load."""

    plan: ExchangePlan
    members: Members
    rank: int

    crosses = True

    @cached_property
    def sharers(self) -> tuple[int, ...]:
        return next((node for node in self.members.nodes if self.rank in node), (self.rank,))

    @cached_property
    def relays(self) -> tuple[int, ...]:
        return self.sharers[: self.members.rails]

    def reader(self, bucket: int) -> int:
        """Returns the rank that fills a bucket."""
        return self.plan.buckets[bucket].stream.owner

    def steps(self, buckets: Sequence[tuple[int, int, int]]) -> list[Step]:
        """Returns the steps along each bucket's path, between ranks of the rail that its sender is in."""
        members = self.members
        rail = members.rail_of[self.rank]
        steps: list[Step] = []
        for number, begin, end in buckets:
            bucket = self.plan.buckets[number]
            owner, path = bucket.stream.owner, bucket.stream.path(bucket.wave)
            if members.rail_of[owner] == rail:
                chain = [-1, owner, *(members.nodes[node][rail] for node in path), -1]
                at = chain.index(self.rank)
                steps.append((begin, end, chain[at - 1], -1, chain[at + 1], -1))
        return steps
