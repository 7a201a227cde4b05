"""A save whose nodes do not share a file system: every bucket goes to every node, whose ranks write it in turn.

A bucket carries its runs behind its data, so that no rank has to plan what the others write.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from epload.cluster.group_cache import GroupCache
from epload.cluster.topology import Route, Topology
from epload.errors import LoadError
from epload.observe.progress import Progress
from epload.planning.buckets import HEADER_BYTES
from epload.planning.schedule import WAVE_BYTES, Flow
from epload.planning.waves import Wave, group_buckets
from epload.report import TransferReport
from epload.saving.layout import NewFile
from epload.saving.plan import RUN_BYTES, WritePlan
from epload.saving.report import SaveReport
from epload.saving.writer import NewFiles
from epload.staging.host_ring import HostRing
from epload.staging.shards import Shards
from epload.staging.shared_memory import NodeMemory
from epload.transport.context import TransferContext
from epload.transport.framing import Framing
from epload.transport.movers import Relay
from epload.transport.sinks import PlainSink
from epload.transport.sources import HostSource
from epload.transport.transfers import run_transfer, through_memory

_COUNT_BYTES = 8
"""Of the number of runs, at the end of a bucket."""


class SentBucket(NamedTuple):
    """See :class:`~epload.transport.context.MovedBucket`."""

    nbytes: int
    targets: tuple[int, ...]
    """Not empty if this rank writes it."""


@dataclass(frozen=True, eq=False)
class SentPlan:
    """The buckets of all ranks."""

    buckets: tuple[SentBucket, ...]
    owners: tuple[int, ...]
    """Of each bucket, the rank that packs it."""
    number: Mapping[int, int]
    """Of this rank's buckets: that in its own plan."""
    fingerprint: bytes

    @classmethod
    def of(
        cls, sizes: Mapping[int, Sequence[int]], nodes: Sequence[Sequence[int]], rank: int, writes: bool, token: str
    ) -> SentPlan:
        """The ranks' buckets take turns, and so do nodes, so that all links are busy.

        Args:
            sizes: of each rank's buckets, see :func:`sent_sizes`.
            writes: whether this rank's node writes.
            token: equal on all ranks, and different from save to save.
        """
        in_turn = [rank for row in zip_longest(*nodes) for rank in row if rank is not None]
        rows = zip_longest(*(sizes[each] for each in in_turn))
        turns = [
            (owner, i, nbytes)
            for i, row in enumerate(rows)
            for owner, nbytes in zip(in_turn, row, strict=True)
            if nbytes is not None
        ]
        node = next(node for node in nodes if rank in node)
        buckets = tuple(
            SentBucket(nbytes, (0,) if writes and node[number % len(node)] == rank else ())
            for number, (_, _, nbytes) in enumerate(turns)
        )
        mine = {number: i for number, (owner, i, _) in enumerate(turns) if owner == rank}
        fingerprint = hashlib.blake2b(token.encode(), digest_size=16).digest()
        return cls(buckets, tuple(owner for owner, _, _ in turns), mine, fingerprint)

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    def identity(self, number: int) -> tuple[int, bytes]:
        """See :class:`~epload.transport.framing.Framing`."""
        return number, self.fingerprint

    def describe(self, numbers: Sequence[int]) -> str:
        """For messages."""
        return f"what ranks {', '.join(map(str, dict.fromkeys(self.owners[number] for number in numbers)))} save"


def sent_sizes(plan: WritePlan) -> list[int]:
    """Of a rank's buckets, with their runs; bytes."""
    return [bucket.nbytes + len(bucket.runs) * RUN_BYTES + _COUNT_BYTES for bucket in plan.buckets]


@dataclass(frozen=True)
class SaveFlow(Flow):
    """The roles of the ranks: each bucket is read by the rank that packs it."""

    owners: tuple[int, ...] = ()

    def reader(self, bucket: int) -> int:
        return self.owners[bucket]


class PackSource(HostSource):
    """Buckets out of a rank's shards. See :class:`~epload.transport.sources.BucketSource`."""

    def __init__(self, plan: SentPlan, mine: WritePlan, shards: Shards) -> None:
        self._plan = plan
        self._mine = mine
        self._shards = shards

    def fill(self, number: int, buffer: Tensor) -> None:
        number = self._plan.number[number]
        bucket = self._mine.buckets[number]
        self._shards.pack(number, buffer[: bucket.nbytes])
        runs = buffer[bucket.nbytes :].view(torch.int64)
        runs[:-1] = bucket.runs.flatten()
        runs[-1] = len(bucket.runs)


class FileSink(PlainSink):
    """Into the files of a new checkpoint. See :class:`~epload.transport.sinks.Sink`."""

    def __init__(self, plan: SentPlan, files: NewFiles, layout: Sequence[NewFile]) -> None:
        self._plan = plan
        self._files = files
        self._sizes = torch.tensor([file.nbytes for file in layout], dtype=torch.int64)
        self.written = 0
        """Bytes."""

    def unpack(self, number: int, bucket: Tensor) -> None:
        if self._plan.buckets[number].targets:
            self.written += self._files.write(bucket, self._runs(number, bucket))

    def _runs(self, number: int, bucket: Tensor) -> Tensor:
        """Raises LoadError if they are not within the bucket and the files."""
        count = int(bucket[-_COUNT_BYTES:].view(torch.int64))
        end = bucket.nbytes - _COUNT_BYTES - count * RUN_BYTES
        if count >= 0 and end >= HEADER_BYTES:
            runs = bucket[end:-_COUNT_BYTES].view(torch.int64).reshape(-1, 4)
            file, offset, begin, nbytes = runs.unbind(1)
            in_files = (file >= 0) & (file < len(self._sizes)) & (offset >= 0)
            inside = in_files & (begin >= HEADER_BYTES) & (nbytes >= 0) & (begin <= end - nbytes)
            if bool(inside.all()) and bool((offset <= self._sizes[file] - nbytes).all()):
                return runs
        raise LoadError(f"bucket {number} of the save does not say where its bytes belong; this is a bug in epload")


def send_to_nodes(
    topology: Topology,
    plan: SentPlan,
    mine: WritePlan,
    shards: Shards,
    sink: FileSink,
    report: SaveReport,
) -> None:
    """Packs this rank's buckets, and writes those that are its turn on its node. Collective; without a round at the end.

    Makes process groups of its own, so that it may run in the background.

    Raises:
        LoadError: a rank failed.
    """
    control, nodes = topology.control, topology.nodes
    sizes = [bucket.nbytes for bucket in plan.buckets]
    numbers = group_buckets(range(len(sizes)), sizes, WAVE_BYTES)
    waves = [Wave.of(index, each, [sizes[number] for number in each]) for index, each in enumerate(numbers)]
    largest = max((wave.nbytes for wave in waves), default=0)
    memory = NodeMemory.for_node(control, nodes, largest)
    report.peak_staging = sum(buffer.nbytes for buffer in memory.buffers)
    first = topology.ranks[0]
    flow = SaveFlow(nodes, topology.rank, first, "partitioned", "two_level", memory.shared, plan.owners)
    groups = GroupCache({"cpu": "gloo"}, topology.rank, control)
    try:
        leaders = topology.leaders(first)
        groups.make("save", (leaders,), nodes)
        leader = leaders[nodes.index(topology.node)]
        route = Route(first, leader, groups.name(leaders), groups.name(topology.node))
        transfer = TransferReport()
        framing = Framing(plan.identity, plan.describe, topology.rank, control, checked=True)
        source = PackSource(plan, mine, shards) if plan.number else None
        context = TransferContext(plan, flow, source, framing, control, transfer)

        def connect(ring: HostRing, seconds: float) -> Relay:
            chunk = flow.chunk_bytes(plan.nbytes, max(sizes, default=0))
            return Relay(context, ring, route, chunk, memory.board.words, seconds)

        engine = through_memory(context, memory, waves, sink, connect)
        try:
            with Progress(plan.nbytes, False) as bar:
                run_transfer(engine, control, groups, bar)
        finally:
            report.add(transfer)
    finally:
        groups.clear()
