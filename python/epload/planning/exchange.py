"""The plan of a sync: which rank of one job sends which boxes of its tensors to which nodes of others. Pure.

Boxes that one rank sends to the same nodes are a stream, in the order of the tensors. A stream is cut into as many buckets as
there are waves, one each. Every rank plans only the streams that it sends or its node receives, and all ranks cut these alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from epload.core import dtypes
from epload.core.columns import column, expand, first_of_each, padded
from epload.core.copy_table import ALIGNMENT, CopyTable
from epload.core.pieces import Metadata
from epload.core.placement import Box
from epload.errors import ModelMismatch
from epload.planning.buckets import HEADER_BYTES
from epload.planning.cells import SPLIT_BYTES, Slot, make_slots, merge_boxes
from epload.planning.pulls import Reach, divide, fitting_senders, lent_bytes, plan_pulls, slots_of
from epload.planning.schedule import MAX_WAVE_BYTES, wave_limit
from epload.planning.shares import NO_PART, CopyTemplates, Outline, Share, copies_of_box, number_alike
from epload.planning.streams import ExchangeBuckets, ExchangePlan, Members, Stream

LEAST_BUCKET_BYTES = 4 << 20
"""A stream is cut into no more buckets than leave them so many, or a ``MOST_IN_WAVE``-th of a wave."""
MOST_IN_WAVE = 16
MOST_PARTS_IN_WAVE = 1024
"""Maximum number of parts in a wave, of pieces that are divided among replicas of the sender."""
MOST_WAVES = 2048
"""Unless waves would have more than ``MAX_WAVE_BYTES``. Each bucket costs every rank of a node some host time whatever its size,
so that those of a model of a terabyte are larger; two waves are a thousandth of it."""
LEAST_SLOT_BYTES, MOST_SLOT_BYTES = 64 << 10, 4 << 20
"""Limits of what a slot may have at most."""


def plan_exchange(
    manifest: Metadata,
    members: Members,
    outlines: Mapping[int, Outline],
    rank: int,
    share: Share,
    wave_bytes: int,
    options: str = "",
    reach: Reach | None = None,
    lenders: Mapping[int, Share] | None = None,
) -> ExchangePlan:
    """
    Args:
        manifest: the tensors, with the senders' dtypes.
        outlines: of every rank's share.
        rank: this process's.
        share: this rank's.
        wave_bytes: of all that moves in one wave, at most about so many reach a node, or a ``MOST_WAVES``-th.
        options: anything else on which ranks must agree.
        reach: what receiving nodes copy straight out of the memory of senders, and which therefore does not move.
        lenders: the shares of the senders that this rank's node reaches, if the node keeps versions in host memory.

    Raises:
        ModelMismatch: a receiver wants what no sender has, or has a dtype that the senders' does not convert to.
    """
    kinds = _Kinds(manifest, members, outlines)
    limit = wave_limit(kinds.total, max(wave_bytes, min(kinds.total // MOST_WAVES, MAX_WAVE_BYTES)))
    waves = max(1, -(-kinds.total // limit))
    most = min(max(limit // len(members.senders), LEAST_SLOT_BYTES), MOST_SLOT_BYTES)
    least = max(limit // MOST_PARTS_IN_WAVE, SPLIT_BYTES)
    slots, pulled = divide(
        kinds.slots(most, least), reach or {}, fitting_senders(members.senders, outlines, kinds.first, kinds.declared)
    )
    least_bucket = max(limit // MOST_IN_WAVE, LEAST_BUCKET_BYTES)
    rows = _SlotRows(members, kinds, slots, rank, waves, least_bucket)
    sends = rank in members.senders
    copies = _make_copies(kinds, slots, rows, share, sends)
    buckets = _make_buckets(rows, copies, members, rank, sends)
    digest = hashlib.blake2b(manifest.digest, digest_size=32)
    digest.update(repr((members, waves, most, least, options, sorted((reach or {}).items()))).encode())
    for each in sorted(outlines):
        digest.update(outlines[each].digest.encode())
    node = next((number for number, ranks in enumerate(members.nodes) if rank in ranks), -1)
    mine = pulled.get(node, ())
    about = (digest.digest(), manifest.source, manifest.names, kinds.total)
    landing = None
    if mine and lenders is not None:
        landed = slots_of(mine, len(kinds.first), node)
        rows_landed = _SlotRows(members, kinds, landed, rank, waves, least_bucket)
        buckets_landed, *sources = (
            _make_buckets(rows_landed, _make_copies(kinds, landed, rows_landed, each, once), members, rank, False)
            for each, once in ((share, False), *((lender, True) for lender in lenders.values()))
        )
        landing = ExchangePlan(
            buckets_landed, buckets_landed.waves, *about, ((node,),), sources=dict(zip(lenders, sources, strict=True))
        )
    return ExchangePlan(
        buckets,
        buckets.waves,
        *about,
        tuple(rows.node_sets),
        plan_pulls(mine, kinds.of, len(kinds.first), share) if mine and landing is None else None,
        landing,
        lent_bytes(rank, pulled.values(), kinds.of, [dtype.itemsize for dtype in kinds.declared]),
        tuple(each for number in sorted(pulled) if pulled[number] for each in members.nodes[number]),
    )


class _Kinds:
    """Tensors that every rank divides alike: of one shape and dtype, and in one class of each rank's share."""

    def __init__(self, manifest: Metadata, members: Members, outlines: Mapping[int, Outline]) -> None:
        self.manifest, self._members, self._outlines = manifest, members, outlines
        self.of = number_alike(manifest.kinds, outlines.values())
        """int64 [t], of each tensor."""
        first = first_of_each(self.of)
        self.first: list[int] = first.tolist()
        """The first tensor of each kind."""
        classes = {id(each): each.class_of[first].tolist() for each in outlines.values()}
        self.class_of = {rank: classes[id(outline)] for rank, outline in outlines.items()}
        """Class of each kind, by rank."""
        self.declared = [manifest.dtypes[i] for i in self.first]
        """The senders' dtypes of each kind."""
        self.dtypes = [self._dtype_on_the_way(kind) for kind in range(len(first))]
        """Dtype in which the tensors of each kind move."""

    @cached_property
    def _receivers(self) -> list[int]:
        """One of those with equal outlines each."""
        return list({id(self._outlines[rank]): rank for rank in self._members.receivers}.values())

    @cached_property
    def total(self) -> int:
        """Bytes of all tensors, as they move."""
        counts = torch.bincount(self.of, minlength=len(self.first)).tolist()
        return sum(n * self.nbytes(kind) for kind, n in enumerate(counts))

    def nbytes(self, kind: int) -> int:
        shape = self.manifest.shapes[self.first[kind]]
        return int(torch.Size(shape).numel()) * self.dtypes[kind].itemsize

    def slots(self, limit: int, least: int) -> list[list[Slot]]:
        """Returns the slots of a tensor of each kind; see :func:`make_slots`."""
        senders = self._alike([(rank,) for rank in self._members.senders])
        nodes = self._alike(self._members.nodes)
        ranks = [tuple(self._members.senders[i] for i in some) for some in senders.values()]
        found = []
        for kind, first in enumerate(self.first):
            held = [(some, self._boxes(rank, kind)) for (rank,), some in zip(senders, ranks, strict=True)]
            wanted = [
                (some, merge_boxes(chain.from_iterable(self._boxes(rank, kind) for rank in node)))
                for node, some in nodes.items()
            ]
            slots, lacking = make_slots(
                self.manifest.shapes[first], self.dtypes[kind].itemsize, held, wanted, limit, least
            )
            if lacking is not None:
                start, size = lacking
                raise ModelMismatch(
                    f"no sender has {self.manifest.names[first]} of {self.manifest.source} from {list(start)} on, of size "
                    f"{list(size)}, which a receiver wants"
                )
            found.append(slots)
        return found

    def _alike(self, nodes: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
        """The positions of nodes whose ranks have equal outlines, by the first of them."""
        found: dict[tuple[int, ...], tuple[tuple[int, ...], list[int]]] = {}
        for i, node in enumerate(nodes):
            found.setdefault(tuple(id(self._outlines[rank]) for rank in node), (node, []))[1].append(i)
        return dict(found.values())

    def _boxes(self, rank: int, kind: int) -> tuple[Box, ...]:
        number = self.class_of[rank][kind]
        return () if number == NO_PART else self._outlines[rank].boxes[number]

    def _dtype_on_the_way(self, kind: int) -> torch.dtype:
        """Returns the dtype of all receivers, if it is narrower than the senders', which then convert; else the senders'."""
        source = self.manifest.dtypes[self.first[kind]]
        wanted = set()
        for rank in self._receivers:
            if (number := self.class_of[rank][kind]) != NO_PART:
                wanted.add(self._outlines[rank].dtypes[number])
        for dtype in wanted:
            if not dtypes.converts(source, dtype):
                name = self.manifest.names[self.first[kind]]
                raise ModelMismatch(
                    f"{name} is {dtypes.name(source)} in {self.manifest.source}, which a receiver's tensor of "
                    f"{dtypes.name(dtype)} cannot take"
                )
        only = wanted.pop() if len(wanted) == 1 else source
        return only if only.itemsize < source.itemsize else source


class _SlotRows:
    """The slots that one rank sends, or its node receives, one entry a slot in each column, ordered by stream."""

    def __init__(
        self, members: Members, kinds: _Kinds, slots: Sequence[Sequence[Slot]], rank: int, waves: int, least: int
    ) -> None:
        """``least``: bytes of a bucket, unless its stream has fewer."""
        self.slots = flat = list(chain.from_iterable(slots))
        kind_of_slot = column([kind for kind, some in enumerate(slots) for _ in some])
        self.kind_of_slot = kind_of_slot
        node_sets = {nodes: i for i, nodes in enumerate(dict.fromkeys(slot.nodes for slot in flat))}
        self.node_sets = list(node_sets)
        node_set = column([node_sets[slot.nodes] for slot in flat])
        owners = padded([slot.owners for slot in flat])
        sharers = column([len(slot.owners) for slot in flat])
        if rank in members.senders:
            candidates = (owners == rank).any(1).nonzero().flatten()
        else:
            mine = next(number for number, node in enumerate(members.nodes) if rank in node)
            wanted = torch.tensor([mine in nodes for nodes in node_sets], dtype=torch.bool)
            candidates = wanted[node_set].nonzero().flatten() if flat else node_set
        which, tensor = expand(torch.bincount(kind_of_slot[candidates], minlength=len(slots)), kinds.of)
        slot = candidates[which]
        owner = owners[slot, tensor % sharers[slot]]
        if rank in members.senders:
            sent = owner == rank
            tensor, slot, owner = tensor[sent], slot[sent], owner[sent]
        stream = owner * len(node_sets) + node_set[slot]
        order = torch.argsort(stream, stable=True)
        self.tensor, self.slot, self.stream = tensor[order], slot[order], stream[order]
        self._place(kinds, waves, least, len(members.senders))

    def _place(self, kinds: _Kinds, waves: int, least: int, senders: int) -> None:
        """Assigns each slot to a wave's bucket of its stream, and to an offset in it."""
        itemsize = column([dtype.itemsize for dtype in kinds.dtypes])
        elements = column([torch.Size(slot.size).numel() for slot in self.slots])
        nbytes = (-(-elements * itemsize[self.kind_of_slot] // ALIGNMENT) * ALIGNMENT)[self.slot]
        ends = nbytes.cumsum(0)
        sets = len(self.node_sets)
        streams, of_stream, per_stream = torch.unique_consecutive(self.stream, return_inverse=True, return_counts=True)
        last = per_stream.cumsum(0) - 1
        total = ends[last] - torch.cat([ends.new_zeros(1), ends[last][:-1]])[: len(last)]
        at = ends - nbytes - (ends[last] - total)[of_stream]
        # A stream has a bucket in each wave or, if they would be small, in some; other streams have theirs in others.
        parts = (-(-total // least)).clamp(1, waves)[of_stream]
        turn = (streams // sets * waves // senders)[of_stream]
        self.wave = (at * parts // total[of_stream] * waves + turn) // parts
        bucket, sizes = torch.unique_consecutive(of_stream * waves + self.wave, return_counts=True)
        self.ends = sizes.cumsum(0)
        """Rows of each bucket end before these; buckets are ordered by stream, then wave."""
        self.begins = self.ends - sizes
        self.offset = at - torch.repeat_interleave(at[self.begins], sizes) + HEADER_BYTES
        """Offset in the bucket, in bytes."""
        self.bucket_nbytes = (self.offset + nbytes)[self.ends - 1]
        self.bucket_wave, self.bucket_stream = bucket % waves, bucket // waves
        self.streams = [Stream(number // sets, self.node_sets[number % sets]) for number in streams.tolist()]


def _make_copies(
    kinds: _Kinds, slots: Sequence[Sequence[Slot]], rows: _SlotRows, share: Share, sends: bool
) -> tuple[CopyTable, Tensor]:
    """This rank's copies of all rows; and for each copy its row."""
    templates = CopyTemplates(share)
    needed = torch.bincount(rows.slot, minlength=len(rows.slots)).tolist()
    kind_of_slot, class_of_kind = rows.kind_of_slot.tolist(), share.class_of[column(kinds.first)].tolist()
    for number, slot in enumerate(rows.slots):
        kind = kind_of_slot[number]
        found = []
        if needed[number] and (class_of := class_of_kind[kind]) != NO_PART:
            found = copies_of_box(slot.start, slot.size, share, class_of, kinds.dtypes[kind], sends)
        templates.add(found)
    copies, row_of = templates.expand(rows.tensor, rows.slot)
    copies.offset.add_(rows.offset[row_of])
    return copies, row_of


def _make_buckets(
    rows: _SlotRows, made: tuple[CopyTable, Tensor], members: Members, rank: int, sends: bool
) -> ExchangeBuckets:
    """Returns the buckets in the order in which the rank sends them, or its node receives them: first those that come from the
    sender itself, then those that have come by one node, and so on. So nodes that pass buckets on to each other never wait for
    each other."""
    copies, row_of = made
    wave, stream = rows.bucket_wave, rows.bucket_stream
    hops = torch.zeros_like(wave)
    if not sends:
        mine = next(number for number, node in enumerate(members.nodes) if rank in node)
        hops = column([each.hops(mine, 0) for each in rows.streams])[stream]
        hops = (hops - wave) % column([len(each.nodes) for each in rows.streams])[stream]
    order = ((wave * len(members.nodes) + hops) * len(rows.streams) + stream).argsort()
    ends = torch.stack([rows.begins, rows.ends], 1)[order]
    return ExchangeBuckets(
        rows.streams,
        stream[order].tolist(),
        wave[order].tolist(),
        rows.bucket_nbytes[order].tolist(),
        rows.tensor[ends - torch.tensor([0, 1])],
        torch.searchsorted(row_of, ends),
        copies,
    )
