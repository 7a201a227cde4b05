"""The plan of a sync: which rank of one job sends which boxes of its tensors to which nodes of others. Pure.

Boxes that one rank sends to the same nodes are a stream, in the order of the tensors. A stream is cut into as many buckets as
there are waves, one each. Every rank plans only the streams that it sends or its node receives; all ranks cut a stream in the
same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from epload.core import dtypes
from epload.core.columns import arange, column, expand, first_of_each
from epload.core.copy_table import ALIGNMENT, CopyTable
from epload.core.pieces import Metadata
from epload.core.placement import Box
from epload.errors import ModelMismatch
from epload.planning.bucket_layout import BucketLayout
from epload.planning.buckets import HEADER_BYTES, BucketCopies
from epload.planning.cells import SPLIT_BYTES, Slot, expand_slots, make_slots, merge_boxes
from epload.planning.holdings import NO_PART, Holdings, Share, copies_of_box, expand_copies, number_alike
from epload.planning.pulls import Reach, divide, lent_bytes, plan_pulls
from epload.planning.schedule import MAX_WAVE_BYTES, wave_limit
from epload.planning.streams import ExchangeBucket, ExchangePlan, Members, Stream

MIN_BUCKET_BYTES = 4 << 20
"""A stream is cut into no more buckets than leave them so many, or a ``MAX_BUCKETS_IN_WAVE``-th of a wave."""
MAX_BUCKETS_IN_WAVE = 16
MAX_PARTS_IN_WAVE = 1024
"""Maximum number of parts in a wave, of pieces that are divided among replicas of the sender."""
MAX_WAVES = 2048
"""Unless waves would have more than ``MAX_WAVE_BYTES``. Each bucket costs every rank of a node some host time whatever its size,
so that those of a model of a terabyte are larger; two waves are a thousandth of it."""
MIN_SLOT_BYTES, MAX_SLOT_BYTES = 64 << 10, 4 << 20
"""Limits of what a slot may have at most."""


def plan_exchange(
    manifest: Metadata,
    members: Members,
    of_ranks: Mapping[int, Holdings],
    rank: int,
    holdings: Holdings,
    wave_bytes: int,
    options: str = "",
    reach: Reach | None = None,
    lenders: Mapping[int, Holdings] | None = None,
    base: Holdings | None = None,
) -> ExchangePlan:
    """
    Args:
        manifest: the tensors, with the senders' dtypes.
        of_ranks: every rank's holdings, of which the regions count. Those of ranks with equal ones are one object.
        rank: this process's.
        holdings: this rank's, with targets.
        wave_bytes: of all that moves in one wave, at most about so many reach a node, or a ``MAX_WAVES``-th.
        options: anything else on which ranks must agree.
        reach: what receiving nodes copy straight out of the memory of senders, and which therefore does not move.
        lenders: the holdings of the senders that this rank's node reaches, if the node keeps versions in host memory.
        base: what the node has of the version before, in the layout of another plan; see :class:`BucketLayout`. Its buckets have
            copies of it only if it has all of them, in their dtypes.

    Raises:
        ModelMismatch: a receiver wants what no sender has, or has a dtype that the senders' does not convert to.
    """
    reach = reach or {}
    kinds = _Kinds(manifest, members, of_ranks)
    limit = wave_limit(kinds.total, max(wave_bytes, min(kinds.total // MAX_WAVES, MAX_WAVE_BYTES)))
    waves = max(1, -(-kinds.total // limit))
    slot_bytes = min(max(limit // len(members.senders), MIN_SLOT_BYTES), MAX_SLOT_BYTES)
    part_bytes = max(limit // MAX_PARTS_IN_WAVE, SPLIT_BYTES)
    if any(len(senders) < len(members.senders) for senders in reach.values()):
        part_bytes = kinds.total + 1  # replicas on several machines divide no tensor: a node copies all of it from its own
    slots = kinds.slots(slot_bytes, part_bytes)
    moved, pulled = divide(slots, reach, kinds.exact_senders()) if reach else (slots, {})
    node = next((number for number, ranks in enumerate(members.nodes) if rank in ranks), -1)
    bucket_bytes = max(limit // MAX_BUCKETS_IN_WAVE, MIN_BUCKET_BYTES)
    rows = _SlotRows(members, kinds, moved, rank, node, waves, bucket_bytes)
    digest = hashlib.blake2b(manifest.digest, digest_size=32)
    digest.update(repr((members, waves, slot_bytes, part_bytes, options, sorted(reach.items()))).encode())
    for number in sorted(of_ranks):
        digest.update(of_ranks[number].digest.encode())
    about = (digest.digest(), manifest.source, manifest.names, kinds.total)
    own = pulled.get(node, [])
    pulls = landing = None
    if any(own) and lenders is None:
        pulls = plan_pulls(own, kinds.of, holdings)
    elif any(own) and lenders is not None:
        landed = _SlotRows(members, kinds, own, rank, node, waves, bucket_bytes)
        sources = {lender: landed.buckets(of_lender, packs=True) for lender, of_lender in lenders.items()}
        landing = ExchangePlan(landed.buckets(holdings, packs=False), *about, ((node,),), sources=sources, layout=landed.layout)
    return ExchangePlan(
        rows.buckets(holdings, packs=node < 0, base=base),
        *about,
        tuple(rows.node_sets),
        pulls,
        landing,
        lent_bytes(rank, pulled.values(), kinds.of, [dtype.itemsize for dtype in kinds.declared]),
        tuple(member for number in sorted(pulled) if any(pulled[number]) for member in members.nodes[number]),
        node=node,
        layout=rows.layout if node >= 0 else None,
        dtypes=tuple(kinds.dtypes[kind] for kind in kinds.of.tolist()),
    )


class _Kinds:
    """Tensors that every rank divides in the same way: of one shape and dtype, and in one class of each rank's holdings."""

    def __init__(self, manifest: Metadata, members: Members, of_ranks: Mapping[int, Holdings]) -> None:
        self._manifest, self._members, self._of_ranks = manifest, members, of_ranks
        self.of = number_alike(manifest, of_ranks.values())
        """int64 [t], of each tensor."""
        first = first_of_each(self.of)
        self.first: list[int] = first.tolist()
        """The first tensor of each kind."""
        self._classes = {id(holdings): holdings.class_of[first].tolist() for holdings in of_ranks.values()}
        """The class of each kind, by the holdings that have it."""
        self.declared = [manifest.dtypes[i] for i in self.first]
        """The senders' dtype of each kind."""
        self._receivers = {id(of_ranks[rank]): rank for rank in members.receivers}.values()
        """One receiver for each distinct holdings."""
        self.dtypes = [self._dtype_of_buckets(kind) for kind in range(len(first))]
        """Dtype in which the tensors of each kind move."""
        counts = torch.bincount(self.of, minlength=len(self.first)).tolist()
        self.total = sum(
            count * prod(manifest.shapes[i]) * dtype.itemsize
            for i, count, dtype in zip(self.first, counts, self.dtypes, strict=True)
        )
        """Bytes of all tensors, as they move."""

    def slots(self, limit: int, min_bytes: int) -> list[list[Slot]]:
        """Returns the slots of a tensor of each kind; see :func:`make_slots`."""
        nodes, senders = self._equal_nodes(self._members.nodes), self._members.senders
        of_senders: list[list[tuple[list[int], list[Box]]]] = [[] for _ in self.first]
        for (rank,), some in self._equal_nodes([(rank,) for rank in senders]):
            holdings, ranks = self._of_ranks[rank], [senders[i] for i in some]
            for kind, number in enumerate(self._classes[id(holdings)]):  # few senders have a part of an expert
                if number != NO_PART:
                    of_senders[kind].append((ranks, list(holdings.boxes[number])))
        of_kinds = []
        for kind, first in enumerate(self.first):
            of_nodes = [(some, merge_boxes(self._boxes(node, kind))) for node, some in nodes]
            itemsize = self.dtypes[kind].itemsize
            slots, missing = make_slots(self._manifest.shapes[first], itemsize, of_senders[kind], of_nodes, limit, min_bytes)
            if missing is not None:
                start, size = missing
                raise ModelMismatch(
                    f"no sender has {self._manifest.names[first]} of {self._manifest.source} from {list(start)} on, of size "
                    f"{list(size)}, which a receiver wants"
                )
            of_kinds.append(slots)
        return of_kinds

    def exact_senders(self) -> list[list[int]]:
        """Returns the senders whose local tensors of each kind have its dtype: those of others are converted twice."""
        exact: list[list[int]] = [[] for _ in self.first]
        for rank in self._members.senders:
            for kind, dtype in enumerate(self.declared):
                share = self._share(rank, kind)
                if share is not None and share.dtype == dtype:
                    exact[kind].append(rank)
        return exact

    def _equal_nodes(self, nodes: Sequence[tuple[int, ...]]) -> Collection[tuple[tuple[int, ...], list[int]]]:
        """Groups nodes whose ranks have equal holdings: the first of each group, and the positions of all of it."""
        groups: dict[tuple[int, ...], tuple[tuple[int, ...], list[int]]] = {}
        for i, node in enumerate(nodes):
            groups.setdefault(tuple(id(self._of_ranks[rank]) for rank in node), (node, []))[1].append(i)
        return groups.values()

    def _class_of(self, rank: int, kind: int) -> tuple[Holdings, int]:
        holdings = self._of_ranks[rank]
        return holdings, self._classes[id(holdings)][kind]

    def _share(self, rank: int, kind: int) -> Share | None:
        """Returns what a rank has of the tensors of a kind; None if nothing."""
        holdings, number = self._class_of(rank, kind)
        return holdings.classes[number] if number != NO_PART else None

    def _boxes(self, node: Sequence[int], kind: int) -> list[Box]:
        """Returns the boxes that some ranks have."""
        classes = (self._class_of(rank, kind) for rank in node)
        return [box for holdings, number in classes if number != NO_PART for box in holdings.boxes[number]]

    def _dtype_of_buckets(self, kind: int) -> torch.dtype:
        """Returns the dtype of all receivers, if it is narrower than the senders', which then convert; else the senders'."""
        source, name = self.declared[kind], self._manifest.names[self.first[kind]]
        shares = (self._share(rank, kind) for rank in self._receivers)
        of_receivers = {share.dtype or source for share in shares if share is not None}
        for dtype in of_receivers:
            if not dtypes.converts(source, dtype):
                raise ModelMismatch(
                    f"{name} is {dtypes.name(source)} in {self._manifest.source}, which a receiver's tensor of "
                    f"{dtypes.name(dtype)} cannot take"
                )
        only = of_receivers.pop() if len(of_receivers) == 1 else source
        return only if only.itemsize < source.itemsize else source


class _SlotRows:
    """The slots that one rank sends, or its node receives, one entry a slot in each column, in the order in which the rank sends
    their buckets, or its node receives them: wave by wave first those that come from the sender itself, then those that have
    come by one node, and so on. So nodes that pass buckets on to each other never wait for each other."""

    def __init__(
        self,
        members: Members,
        kinds: _Kinds,
        slots: Sequence[Sequence[Slot]],
        rank: int,
        node: int,
        waves: int,
        min_bytes: int,
    ) -> None:
        """
        Args:
            node: number of the rank's node; -1 for a rank that sends.
            min_bytes: of a bucket, unless its stream has fewer.
        """
        self._kinds = kinds
        self.node_sets = list(dict.fromkeys(slot.nodes for some in slots for slot in some))
        own = [[slot for slot in some if (rank in slot.owners if node < 0 else node in slot.nodes)] for some in slots]
        self._slots = [(slot, kind) for kind, some in enumerate(own) for slot in some]
        slot, tensor, owner = expand_slots(own, kinds.of)
        sets = {nodes: i for i, nodes in enumerate(self.node_sets)}
        stream = owner * len(sets) + column([sets[slot.nodes] for slot, _ in self._slots])[slot]
        order = torch.argsort(stream, stable=True)
        if node < 0:
            order = order[owner[order] == rank]
        sizes = column([prod(slot.box[1]) * kinds.dtypes[kind].itemsize for slot, kind in self._slots])
        nbytes = (-(-sizes // ALIGNMENT) * ALIGNMENT)[slot[order]]

        numbers, of_stream, counts = torch.unique_consecutive(stream[order], return_inverse=True, return_counts=True)
        streams = [Stream(i // len(sets), self.node_sets[i % len(sets)], i % len(sets)) for i in numbers.tolist()]
        ends = nbytes.cumsum(0)
        total = ends[counts.cumsum(0) - 1].diff(prepend=ends.new_zeros(1))
        at = ends - nbytes - (total.cumsum(0) - total)[of_stream]
        # A stream has a bucket in each wave or, if they would be small, in some; other streams have theirs in others.
        parts = (-(-total // min_bytes)).clamp(1, waves)[of_stream]
        turn = (numbers // len(sets) * waves // len(members.senders))[of_stream]
        wave = (at * parts // total[of_stream] * waves + turn) // parts
        hops = torch.zeros_like(wave)
        if node >= 0:
            paths = column([value for some in streams for value in (some.hops(node, 0), len(some.nodes))])
            first_hops, length = paths.reshape(-1, 2)[of_stream].unbind(1)
            hops = (first_hops - wave) % length

        key = (wave * len(members.nodes) + hops) * len(streams) + of_stream
        in_buckets = key.argsort(stable=True)
        rows, at = order[in_buckets], at[in_buckets]
        self._tensor, self._slot = tensor[rows], slot[rows]
        _, self._bucket, counts = torch.unique_consecutive(key[in_buckets], return_inverse=True, return_counts=True)
        last = counts.cumsum(0) - 1
        first = last - counts + 1
        self._offset = at - at[first][self._bucket] + HEADER_BYTES
        """Offset in the bucket, in bytes."""
        bucket_nbytes = self._offset[last] + nbytes[in_buckets][last]
        self._sizes = sizes[self._slot]
        self._gaps = nbytes[in_buckets] - self._sizes
        """Bytes between each slot and the next one."""
        columns = of_stream[in_buckets][first], wave[in_buckets][first], self._tensor[first], self._tensor[last]
        self._buckets = [
            (size, streams[i], of_wave, (begin, end))
            for size, i, of_wave, begin, end in torch.stack([bucket_nbytes, *columns], 1).tolist()
        ]

    @property
    def layout(self) -> BucketLayout:
        slots = [(slot.box, self._kinds.dtypes[kind]) for slot, kind in self._slots]
        return BucketLayout(slots, self._tensor, self._slot, self._bucket, self._offset)

    def buckets(self, holdings: Holdings, packs: bool, base: Holdings | None = None) -> list[ExchangeBucket]:
        """Returns the buckets.

        Args:
            holdings: of the rank whose copies they have.
            packs: whether that rank packs the buckets.
            base: see :func:`plan_exchange`.
        """
        gap, row = expand(self._gaps, arange(len(self._gaps)))
        within = gap - (self._gaps.cumsum(0) - self._gaps)[row]
        paddings = self._by_bucket((self._offset + self._sizes)[row] + within, row)
        tables = self._tables(holdings, packs)
        bases: Sequence[BucketCopies | None] = [None] * len(tables)
        if base is not None and self._is_in(base):
            bases = [BucketCopies(0, table) for table in self._tables(base, packs=True)]
        return [
            ExchangeBucket(nbytes, table, stream, wave, tensors, padding, of_base)
            for (nbytes, stream, wave, tensors), table, padding, of_base in zip(
                self._buckets, tables, paddings, bases, strict=True
            )
        ]

    def _tables(self, holdings: Holdings, packs: bool) -> list[CopyTable]:
        class_of_kind, dtypes_of = holdings.class_of[column(self._kinds.first)].tolist(), self._kinds.dtypes
        templates = [copies_of_box(slot.box, holdings, class_of_kind[kind], dtypes_of[kind], packs) for slot, kind in self._slots]
        copies, row = expand_copies(holdings, templates, self._tensor, self._slot)
        copies.offset.add_(self._offset[row])
        return list(map(CopyTable, self._by_bucket(copies.rows, row)))

    def _by_bucket(self, entries: Tensor, row: Tensor) -> tuple[Tensor, ...]:
        """Divides entries, each of a slot, into those of each bucket."""
        return torch.split(entries, torch.bincount(self._bucket[row], minlength=len(self._buckets)).tolist())

    def _is_in(self, base: Holdings) -> bool:
        """Returns True if a rank has every slot once, in the dtype in which it moves. ``base``: boxes that do not overlap."""
        of_kinds = base.class_of[column(self._kinds.first)]
        if not torch.equal(base.class_of[self._tensor], of_kinds[self._kinds.of[self._tensor]]):
            return False
        numbers, dtypes_of = of_kinds.tolist(), self._kinds.dtypes
        if any(numbers[kind] == NO_PART or base.classes[numbers[kind]].dtype != dtypes_of[kind] for _, kind in self._slots):
            return False
        nbytes = sum(int(table.nbytes().sum()) for table in self._tables(base, packs=False))
        return nbytes == int(self._sizes.sum())
