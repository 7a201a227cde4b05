"""Describes a sync as one rank sees it: its participants, streams of buckets, and their paths from node to node. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple, overload

import torch
from torch import Tensor

from epload.core.copy_table import CopyTable
from epload.planning.pulls import Pulls


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

    def path(self, wave: int) -> tuple[int, ...]:
        """The nodes in the order in which a wave's bucket passes through them: each begins at another one."""
        first = (wave + self.owner) % len(self.nodes)
        return self.nodes[first:] + self.nodes[:first]

    def hops(self, node: int, wave: int) -> int:
        """Returns the number of nodes that a wave's bucket passes through before this one."""
        return (self.nodes.index(node) - wave - self.owner) % len(self.nodes)


@dataclass(eq=False)
class ExchangeBucket:
    """A part of a stream that moves in one wave. ``copies`` and ``targets`` are this rank's."""

    stream: Stream
    wave: int
    nbytes: int
    """Header included."""
    tensors: tuple[int, int]
    """The first and the last tensor that it has boxes of."""
    rows: CopyTable
    """The copies, of which targets count in all local tensors."""

    @cached_property
    def _copies(self) -> tuple[CopyTable, tuple[int, ...]]:
        copies = self.rows.clone()
        return copies, tuple(copies.renumber_targets())

    @property
    def copies(self) -> CopyTable:
        """Copies that pack it out of local tensors, on a rank that sends it; that unpack it into local tensors, on the others."""
        return self._copies[0]

    @property
    def targets(self) -> tuple[int, ...]:
        """Local tensors that the copies count."""
        return self._copies[1]


@dataclass(frozen=True, eq=False)
class ExchangeBuckets(Sequence[ExchangeBucket]):
    """The buckets of a plan, in columns of one entry each. A bucket is made when it is first asked for, and kept: a large model
    has so many that making all of them would take most of the time for planning."""

    streams: Sequence[Stream]
    stream: Sequence[int]
    """Index of each bucket's stream in ``streams``."""
    wave: Sequence[int]
    nbytes: Sequence[int]
    """Header included."""
    tensors: Tensor
    """int64 [n, 2]: the first and the last tensor that a bucket has boxes of."""
    rows: Tensor
    """int64 [n, 2]: its first row in ``copies``, and the one after its last."""
    copies: CopyTable
    """Copies of all buckets."""
    _made: dict[int, ExchangeBucket] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def waves(self) -> tuple[range, ...]:
        """Numbers of the buckets of each wave in which there are any."""
        starts = [i for i, wave in enumerate(self.wave) if i == 0 or self.wave[i - 1] != wave]
        return tuple(map(range, starts, [*starts[1:], len(self)]))

    @overload
    def __getitem__(self, number: int) -> ExchangeBucket: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[ExchangeBucket, ...]: ...
    def __getitem__(self, number: int | slice) -> ExchangeBucket | tuple[ExchangeBucket, ...]:
        if isinstance(number, slice):
            return tuple(self[i] for i in range(*number.indices(len(self))))
        bucket = self._made.get(number)
        if bucket is None:
            (first, last), (begin, end) = self.tensors[number].tolist(), self.rows[number].tolist()
            stream = self.streams[self.stream[number]]
            rows = self.copies.select(slice(begin, end))
            bucket = ExchangeBucket(stream, self.wave[number], self.nbytes[number], (first, last), rows)
            self._made[number] = bucket
        return bucket

    def of_rows(self) -> Tensor:
        """int64: for each row of ``copies`` the number of its bucket."""
        order = self.rows[:, 0].argsort(stable=True)
        return torch.repeat_interleave(order, (self.rows[:, 1] - self.rows[:, 0])[order])


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """The buckets that one rank sends, or its node receives, in the order in which it does."""

    buckets: ExchangeBuckets
    waves: tuple[range, ...]
    """Numbers of the buckets of each wave in which there are any."""
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
    sources: Mapping[int, ExchangeBuckets] = field(default_factory=dict)
    """A landing's buckets again, by sender, with the copies out of that sender's tensors. Those that another one owns have
    none that count."""

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return len(self.names)

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max(self.buckets.nbytes, default=0)

    def identity(self, number: int) -> tuple[int, bytes]:
        """Returns what identifies a bucket's header on the ranks that send and receive it: its wave, and 16 bytes."""
        return self.buckets.wave[number], self._names_of_streams[self.buckets.stream[number]]

    @cached_property
    def _names_of_streams(self) -> list[bytes]:
        texts = (repr((stream.owner, stream.nodes)).encode() for stream in self.buckets.streams)
        return [hashlib.blake2b(text, digest_size=16, key=self.fingerprint).digest() for text in texts]

    def describe(self, numbers: Sequence[int]) -> str:
        """The tensors in some consecutive buckets, for messages."""
        ends = self.names[self.buckets[numbers[0]].tensors[0]], self.names[self.buckets[numbers[-1]].tensors[1]]
        return f"{' to '.join(dict.fromkeys(ends))} of {self.source}"

    @property
    def nbytes(self) -> int:
        """Bytes that this rank sends, or its node receives; headers included."""
        return sum(self.buckets.nbytes)
