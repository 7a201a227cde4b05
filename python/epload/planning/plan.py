"""The load plan. Pure: a manifest and the model's targets in; buckets, slots and copies out. No process group, no data.

Thousands of tensors share a shape and a layout, so geometry is worked out once a class of them; per tensor there is a
dictionary look-up, and the copy table is put together by vector arithmetic.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from epload.core import dtypes
from epload.core.pieces import Metadata, Pieces
from epload.core.placement import OwnedRegion, intersect, owned_regions
from epload.core.regions import ALIGNMENT, FIXED_COLUMNS
from epload.core.views import View
from epload.errors import ManifestMismatch, ModelMismatch
from epload.mapping.mapping import Mapping
from epload.mapping.place import Place, ShapeMismatch, place
from epload.mapping.scales import Scaling, with_scales
from epload.model.targets import Targets
from epload.native.extension import _C

HEADER_BYTES = 64
"""In front of every bucket's slots."""


@dataclass(frozen=True)
class Bucket:
    """One message. ``copies`` and ``targets`` are this rank's; the rest is equal on all ranks."""

    nbytes: int
    """Header included."""
    slots: range
    """Positions in the plan's slots."""
    copies: Tensor
    """The native copy table; column 0 counts in ``targets``."""
    targets: tuple[int, ...]
    """Targets that this rank copies into, by index."""
    origins: Tensor
    """int64 [n, 2]: where each row of ``copies`` starts in the checkpoint, as index into the manifest and offset in that tensor
    in bytes."""


class Twin(NamedTuple):
    """Two checkpoint tensors that would fill the same elements of one parameter, and of which one is loaded."""

    kept: int
    """Index into the manifest."""
    left_out: int
    dtype: torch.dtype
    """The parameter's."""
    names: tuple[str, str]
    """The parameter's names that they are for."""


class Taken(NamedTuple):
    """What this rank copies out of some buckets; see :class:`Bucket`."""

    targets: tuple[int, ...]
    copies: Tensor
    origins: Tensor


@dataclass(frozen=True)
class Slots:
    """Pieces of checkpoint tensors in buckets, one entry a piece in each column, in bucket order. Equal on all ranks."""

    tensor: Sequence[int]
    """Index into the manifest."""
    tensor_offset: Sequence[int]
    """Bytes."""
    bucket_offset: Sequence[int]
    """Bytes."""
    nbytes: Sequence[int]

    @cached_property
    def pieces(self) -> Pieces:
        """All of them, as a checkpoint is asked for them."""
        columns = (self.tensor, self.tensor_offset, self.bucket_offset, self.nbytes)
        return Pieces(torch.tensor(columns, dtype=torch.int64).T.contiguous())

    @cached_property
    def tensor_count(self) -> int:
        """How many tensors they are pieces of."""
        return len(set(self.tensor))

    @cached_property
    def payload(self) -> int:
        """Bytes of all of them."""
        return sum(self.nbytes)


@dataclass(frozen=True)
class LoadPlan:
    """What moves, in which order, and where it goes on this rank."""

    buckets: tuple[Bucket, ...]
    slots: Slots
    fingerprint: bytes
    """32 bytes over everything that ranks must share: tensors, targets, layouts, slots, options."""
    missing: tuple[str, ...]
    """Names of the model that nothing fills; of tied names the first."""
    unexpected: tuple[str, ...]
    """Names of the checkpoint that the model has no place for."""
    mismatched: dict[str, str]
    """Names of the model that the checkpoint has in another shape, and what to say of each; nothing fills them."""
    tied: tuple[str, ...]
    """Names of the checkpoint left out because another name of the same parameter is in it."""
    twins: tuple[Twin, ...]
    """Those with what is loaded in their place: the load is right only if the values are equal."""
    casts: int
    """Checkpoint tensors whose dtype is converted."""
    targets: Targets
    """Without tensors: the model's, then the side tensors for scales."""
    scalings: tuple[Scaling, ...]
    """What is multiplied once all data is there."""
    owned: int
    """Bytes of the checkpoint that this rank copies into its shards."""

    def pieces(self, bucket: Bucket) -> Pieces:
        """What a reader has to fill a bucket with."""
        return self.slots.pieces[bucket.slots.start : bucket.slots.stop]

    def taken(self, numbers: range) -> Taken:
        """Of several buckets as of one: ``copies`` counts in the targets of all."""
        buckets = self.buckets[numbers.start : numbers.stop]
        if len(buckets) == 1:
            return Taken(buckets[0].targets, buckets[0].copies, buckets[0].origins)
        tables, before = [], 0
        for bucket in buckets:
            table = bucket.copies.clone()
            table[:, 0] += before
            before += len(bucket.targets)
            tables.append(table)
        return Taken(
            tuple(chain.from_iterable(bucket.targets for bucket in buckets)),
            torch.cat(tables),
            torch.cat([bucket.origins for bucket in buckets]),
        )

    @property
    def nbytes(self) -> int:
        """Bytes on the wire towards one rank, headers included."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def largest(self) -> int:
        return max((bucket.nbytes for bucket in self.buckets), default=0)


def make_plan(
    manifest: Metadata,
    targets: Targets,
    mapping: Mapping,
    bucket_bytes: int,
    options: str = "",
    wanted: Set[int] = frozenset(),
) -> LoadPlan:
    """Plans a load.

    Args:
        bucket_bytes: size of a bucket, header included.
        options: anything else on which ranks must agree.
        wanted: checkpoint tensors, by number, that are sent even if they have no place here, since some rank wants them.

    Raises:
        ModelMismatch: the checkpoint does not fit the model, by other than missing, unexpected or mismatched keys.
        ValueError: ``bucket_bytes`` is too small for the elements.
    """
    if bucket_bytes < HEADER_BYTES + ALIGNMENT:
        raise ValueError(f"expected bucket_bytes of at least {HEADER_BYTES + ALIGNMENT}, got {bucket_bytes}")
    mismatches: list[ShapeMismatch] = []
    placed = place(mapping, manifest.names, manifest.shapes, targets.shapes, mismatches)
    mismatched = {targets.names[targets.index[mismatch.target]]: mismatch.message for mismatch in mismatches}
    out_of_shape = {source for mismatch in mismatches for source in mismatch.sources}
    targets, scalings = with_scales(manifest, targets, placed)
    chosen, tied, twins = _choose(manifest, targets, placed, wanted)
    casts = _check_dtypes(manifest, targets, chosen, {scaling.target for scaling in scalings})
    columns, bucket_nbytes = _C.plan_buckets(
        _extents(manifest, chosen, bucket_bytes - HEADER_BYTES), bucket_bytes, ALIGNMENT, HEADER_BYTES
    )
    buckets = _buckets(manifest, targets, chosen, columns, bucket_nbytes)

    digest = hashlib.blake2b(digest_size=32)
    digest.update(manifest.digest)
    digest.update("\n".join(targets.describe()).encode(errors="backslashreplace"))
    # Where tensors go on each rank follows from these, the targets and the mapping.
    for column in (*columns, chosen.tensor):
        digest.update(array("q", column).tobytes())
    digest.update(repr((bucket_bytes, options)).encode())
    filled = set(chosen.target)
    expected = {targets.index[name] for _, name in mapping.only} or range(len(targets.names))
    return LoadPlan(
        buckets=tuple(buckets),
        slots=Slots([chosen.tensor[i] for i in columns[0]], columns[1], columns[3], columns[4]),
        fingerprint=digest.digest(),
        missing=tuple(
            name
            for i, name in enumerate(targets.names)
            if i not in filled and i in expected and _numel(targets, i) and name not in mismatched
        ),
        unexpected=tuple(
            name
            for i, (name, places) in enumerate(zip(manifest.names, placed, strict=True))
            if not places and i not in wanted and i not in out_of_shape
        ),
        mismatched=mismatched,
        tied=tied,
        twins=twins,
        casts=casts,
        targets=replace(targets, tensors=[]),
        scalings=scalings,
        owned=_copied_bytes([bucket.copies for bucket in buckets], manifest),
    )


def explain_difference(views: dict[int, list[str]], reference: int, limit: int = 5) -> ManifestMismatch:
    """The error for ranks whose plans differ, from what each describes (see :func:`describe`)."""
    ours = views[reference]
    said = []
    for rank, theirs in views.items():
        for a, b in zip(ours, theirs, strict=False):
            if a != b:
                said.append(f"rank {reference} has {a!r} where rank {rank} has {b!r}")
                if len(said) >= limit:
                    break
        if len(ours) != len(theirs):
            extra, who = (ours, reference) if len(ours) > len(theirs) else (theirs, rank)
            said.append(f"only rank {who} has {extra[min(len(ours), len(theirs))]!r}")
    return ManifestMismatch("the ranks disagree, nothing was moved:\n  " + "\n  ".join(said[: limit + 1]))


def describe(manifest: Metadata, targets: Targets, bucket_bytes: int, options: str) -> list[str]:
    """A line an entry of everything in the fingerprint, for telling where two ranks differ."""
    lines = [f"options: bucket_bytes={bucket_bytes} {options}"]
    lines += [f"model {line}" for line in targets.describe()]
    lines += [
        f"checkpoint {name}: {dtypes.name(dtype)} {list(shape)}"
        for name, dtype, shape in zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True)
    ]
    return lines


@dataclass
class _Chosen:
    """Checkpoint tensors that are loaded, in manifest order, and the places of each."""

    tensor: list[int] = field(default_factory=list)
    """Index into the manifest."""
    first: list[int] = field(default_factory=lambda: [0])
    """Places [first[i], first[i + 1]) are those of tensor i."""
    target: list[int] = field(default_factory=list)
    """Of each place."""
    view: list[int] = field(default_factory=list)
    """Of each place, an index into ``views``."""
    views: list[View] = field(default_factory=list)


def _numel(targets: Targets, index: int) -> bool:
    return 0 not in targets.layouts[targets.layout[index]].shape


def _choose(
    manifest: Metadata, targets: Targets, placed: Sequence[tuple[Place, ...]], wanted: Set[int]
) -> tuple[_Chosen, tuple[str, ...], tuple[Twin, ...]]:
    """Leaves out what has no place, and a tied name whose parameter another name already fills."""
    chosen = _Chosen()
    tied = []
    left_out: list[tuple[int, int, str, View]] = []
    filled: dict[int, str] = {}
    numbers: dict[int, int] = {}
    target_of, view_of, first = chosen.target, chosen.view, chosen.first
    for i, places in enumerate(placed):
        for name, view in places:
            target = targets.index[name]
            if filled.setdefault(target, name) != name:
                left_out.append((target, i, name, view))
                continue
            number = numbers.get(id(view))
            if number is None:
                number = numbers[id(view)] = len(chosen.views)
                chosen.views.append(view)
            target_of.append(target)
            view_of.append(number)
        if (end := len(target_of)) > first[-1] or i in wanted:
            chosen.tensor.append(i)
            first.append(end)
        elif places:
            tied.append(manifest.names[i])
    return chosen, tuple(tied), _twins(manifest, targets, placed, filled, left_out)


def _twins(
    manifest: Metadata,
    targets: Targets,
    placed: Sequence[tuple[Place, ...]],
    filled: dict[int, str],
    left_out: list[tuple[int, int, str, View]],
) -> tuple[Twin, ...]:
    """For what a tied name leaves out the checkpoint tensor that fills the same elements."""
    if not left_out:
        return ()
    names = {filled[target] for target, *_ in left_out}
    kept = {(name, view): i for i, places in enumerate(placed) for name, view in places if name in names}
    twins = {}
    for target, i, name, view in left_out:
        source = kept.get((filled[target], view))
        if source is None:
            raise ModelMismatch(
                f"the model ties {filled[target]} and {name}, and {manifest.source} holds both, divided in different ways "
                f"(one by {manifest.names[i]}), so that they cannot be compared; leave one of them out of the checkpoint"
            )
        if source != i:
            twins[source, i, target] = Twin(source, i, targets.dtypes[target], (filled[target], name))
    return tuple(twins.values())


def _check_dtypes(manifest: Metadata, targets: Targets, chosen: _Chosen, scaled: Set[int]) -> int:
    wanted = [targets.dtypes[target] for target in chosen.target]
    casts = set()
    for i, begin, end in zip(chosen.tensor, chosen.first, chosen.first[1:], strict=False):
        source = manifest.dtypes[i]
        if end == begin + 1 and wanted[begin] is source:
            continue
        for position in range(begin, end):
            dtype = wanted[position]
            if dtype is source:
                continue
            if not dtypes.converts(source, dtype) and chosen.target[position] not in scaled:
                raise ModelMismatch(
                    f"{manifest.names[i]} is {dtypes.name(source)} in the checkpoint, which the model's "
                    f"{targets.names[chosen.target[position]]} of {dtypes.name(dtype)} cannot take"
                )
            casts.add(i)
    return len(casts)


def _extents(manifest: Metadata, chosen: _Chosen, room: int) -> list[tuple[int, int, int]]:
    itemsize = {dtype: dtype.itemsize for dtype in set(manifest.dtypes)}
    keys = [(manifest.shapes[i], itemsize[manifest.dtypes[i]]) for i in chosen.tensor]
    known = {(shape, size): _C.extent_of(shape, size, room) for shape, size in set(keys)}
    return [known[key] for key in keys]


def _buckets(
    manifest: Metadata, targets: Targets, chosen: _Chosen, slots: list[list[int]], bucket_nbytes: list[int]
) -> list[Bucket]:
    """Adds this rank's copies to the planned slots."""
    tensor, tensor_offset, bucket, bucket_offset, nbytes = slots
    dims = max((len(layout.shape) for layout in targets.layouts), default=1) or 1
    owned = [owned_regions(layout, at) for layout, at in zip(targets.layouts, targets.coordinates, strict=True)]

    # A slot has copies for each place of its tensor: pair p is of slot slot_of[p] and of place places[p]. Mostly it has one.
    places: Sequence[int] = tensor
    slot_of = torch.arange(len(tensor))
    if chosen.first != list(range(len(chosen.tensor) + 1)):
        of_slot = torch.tensor(tensor, dtype=torch.int64)
        ends = torch.tensor(chosen.first, dtype=torch.int64)
        each = ends.diff()[of_slot]
        slot_of = torch.repeat_interleave(slot_of, each)
        places = (torch.arange(len(slot_of)) + (ends[of_slot] - each.cumsum(0) + each)[slot_of]).tolist()
    target_of = [chosen.target[place] for place in places]
    dtype_of = [manifest.dtypes[chosen.tensor[i]] for i in tensor]

    # The class of a slot and place: everything that their copies depend on but for where the slot lies in the bucket.
    keys = [
        (targets.layout[target], chosen.view[place], dtype_of[i], tensor_offset[i], nbytes[i])
        for i, place, target in zip(slot_of.tolist(), places, target_of, strict=True)
    ]
    classes = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    rows_of = [
        _rows(chosen.views[view], owned[layout], dtype, offset, size, dims)
        for layout, view, dtype, offset, size in classes
    ]
    columns = FIXED_COLUMNS + 3 * dims
    table = torch.tensor([row for rows in rows_of for row in rows], dtype=torch.int64).reshape(-1, columns)
    count = torch.tensor([len(rows) for rows in rows_of], dtype=torch.int64)
    first = count.cumsum(0) - count

    # Row r of the result is row `within` of the class of pair `pair`, which is one of slot `slot`.
    class_of = torch.tensor([classes[key] for key in keys], dtype=torch.int64)
    pair = torch.repeat_interleave(torch.arange(len(keys)), count[class_of])
    slot = slot_of[pair]
    within = torch.arange(len(pair)) - (count[class_of].cumsum(0) - count[class_of])[pair]
    copies = table[first[class_of[pair]] + within]
    numbers_and_offsets = torch.tensor([[chosen.tensor[i] for i in tensor], tensor_offset], dtype=torch.int64)
    origins = numbers_and_offsets.T.contiguous()[slot]
    origins[:, 1] += copies[:, 1]
    copies[:, 1] += torch.tensor(bucket_offset, dtype=torch.int64)[slot]
    target_of_row = torch.tensor(target_of, dtype=torch.int64)[pair]

    bucket_of = torch.tensor(bucket, dtype=torch.int64)
    numbers = torch.arange(len(bucket_nbytes))
    slot_ends = torch.searchsorted(bucket_of, numbers, right=True).tolist()
    row_ends = torch.searchsorted(bucket_of[slot], numbers, right=True).tolist()
    made = []
    slot_begin = row_begin = 0
    for number, (slot_end, row_end) in enumerate(zip(slot_ends, row_ends, strict=True)):
        part = copies[row_begin:row_end].contiguous()
        wanted, part[:, 0] = torch.unique(target_of_row[row_begin:row_end], return_inverse=True)
        made.append(
            Bucket(
                bucket_nbytes[number],
                range(slot_begin, slot_end),
                part,
                tuple(wanted.tolist()),
                origins[row_begin:row_end],
            )
        )
        slot_begin, row_begin = slot_end, row_end
    return made


def _copied_bytes(tables: list[Tensor], manifest: Metadata) -> int:
    if not tables:
        return 0
    rows = torch.cat(tables)
    dims = (rows.shape[1] - FIXED_COLUMNS) // 3
    used = torch.arange(dims) < rows[:, 3:4]
    sizes = rows[:, FIXED_COLUMNS + dims : FIXED_COLUMNS + 2 * dims].where(used, 1)
    width = torch.ones(max(map(dtypes.code, manifest.dtypes), default=0) + 1, dtype=torch.int64)
    for dtype in set(manifest.dtypes):
        width[dtypes.code(dtype)] = dtype.itemsize
    return int((sizes.prod(1) * width[rows[:, 2]]).sum())


def _rows(
    view: View, owned: Sequence[OwnedRegion], dtype: torch.dtype, offset: int, nbytes: int, dims: int
) -> list[list[int]]:
    """Copy-table rows for bytes [offset, offset + nbytes) of a checkpoint tensor placed by ``view``, from offset 0 of the
    bucket: what they share with each region that this rank owns."""
    begin, end = offset // dtype.itemsize, (offset + nbytes) // dtype.itemsize
    rows = []
    for part in view.within(begin, end):
        for region in owned:
            shared = intersect((part.start, part.size), (region.start, region.size))
            if shared is None:
                continue
            low, extent = shared
            steps = sum((a - b) * stride for a, b, stride in zip(low, part.start, part.strides, strict=True))
            local = [at + a - b for at, a, b in zip(region.local_start, low, region.start, strict=True)]
            fill = [0] * (dims - len(low))
            rows.append(
                [
                    0,
                    (part.offset - begin + steps) * dtype.itemsize,
                    dtypes.code(dtype),
                    len(low),
                    *local,
                    *fill,
                    *extent,
                    *fill,
                    *part.strides,
                    *fill,
                ]
            )
    return rows
