"""Buckets: the messages of a load, and what each rank copies out of them.

Thousands of tensors share a shape and a layout, so geometry is computed once for each class of them, and the copy table is put
together by vector arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from epload.core import dtypes
from epload.core.columns import arange, column, expand, first_of_each, from_raw, numbered_rows, to_raw
from epload.core.copy_table import ALIGNMENT, CopyTable
from epload.core.pieces import Metadata, Pieces
from epload.core.placement import OwnedRegion, owned_parts, owned_regions
from epload.core.views import View
from epload.model.targets import Targets
from epload.native.extension import _C
from epload.planning.selection import Selection

HEADER_BYTES = 64
"""Bytes of the header in front of every bucket's slots."""


@dataclass(frozen=True, eq=False)
class BucketCopies:
    """A bucket with one rank's copies between it and the rank's tensors."""

    nbytes: int
    """Size of the bucket, its header included if it has one."""
    rows: CopyTable
    """The copies; targets are numbers of the rank's tensors."""

    @cached_property
    def targets(self) -> tuple[int, ...]:
        """Numbers of the tensors that the rank copies from or into."""
        return self._renumbered[0]

    @cached_property
    def copies(self) -> CopyTable:
        """:attr:`rows` with targets that count in :attr:`targets`."""
        return self._renumbered[1]

    @cached_property
    def _renumbered(self) -> tuple[tuple[int, ...], CopyTable]:
        table = self.rows.clone()
        return tuple(table.renumber_targets()), table


@dataclass(frozen=True, eq=False)
class Bucket(BucketCopies):
    """One message of a load. The copies are this rank's; the rest is equal on all ranks."""

    slots: range
    """Positions in the plan's slots."""
    origins: Tensor
    """int64 [n, 2]: where each row of ``copies`` starts in the checkpoint, as index into the manifest and offset in that tensor
    in bytes."""


@dataclass(frozen=True, eq=False)
class Slots:
    """Pieces of checkpoint tensors in buckets, one entry a piece in each column, in bucket order. Equal on all ranks."""

    tensor: Tensor
    """int64 [s]: index into the manifest."""
    tensor_offset: Tensor
    """int64 [s], in bytes."""
    bucket_offset: Tensor
    """int64 [s], in bytes."""
    nbytes: Tensor
    """int64 [s]"""

    @cached_property
    def pieces(self) -> Pieces:
        """All of them, as a checkpoint is asked for them."""
        return Pieces(torch.stack([self.tensor, self.tensor_offset, self.bucket_offset, self.nbytes], 1))

    @cached_property
    def tensor_count(self) -> int:
        """Number of tensors that they are pieces of."""
        return len(torch.unique(self.tensor))

    @cached_property
    def payload(self) -> int:
        """Bytes of all of them."""
        return int(self.nbytes.sum())


def fill_buckets(manifest: Metadata, chosen: Selection, bucket_bytes: int) -> tuple[Slots, Tensor, list[int]]:
    """Cuts the tensors that are loaded into pieces that fill buckets.

    Returns:
        The slots, whose tensors count among those that are loaded; the bucket of each slot, ascending (int64 [s]); and the
        bytes of each bucket.
    """
    kinds, kind_of = manifest.kinds.combine(chosen.tensor)
    room = bucket_bytes - HEADER_BYTES
    extents = [_C.extent_of(shape, dtype.itemsize, room) for shape, dtype in kinds]
    columns, bucket_nbytes = _C.plan_buckets(extents, bucket_bytes, ALIGNMENT, HEADER_BYTES, to_raw(kind_of))
    tensor, tensor_offset, bucket, bucket_offset, nbytes = map(from_raw, columns)
    return Slots(tensor, tensor_offset, bucket_offset, nbytes), bucket, bucket_nbytes


def make_buckets(
    manifest: Metadata,
    targets: Targets,
    chosen: Selection,
    slots: Slots,
    bucket: Tensor,
    bucket_nbytes: Sequence[int],
) -> list[Bucket]:
    """Adds this rank's copies to the planned slots; see :func:`fill_buckets`."""
    slot_of, place = _places_of_slots(slots, chosen)
    number, offset, target = chosen.tensor[slots.tensor], slots.tensor_offset, chosen.target[place]
    # The class of a slot and place: everything that their copies depend on but for where the slot lies in the bucket.
    of_slots = manifest.kinds.dtype_of[number], offset, slots.nbytes
    classes = [column(targets.layout)[target], chosen.view[place], *(values[slot_of] for values in of_slots)]
    copies, pair = _copies_of_classes(classes, manifest.kinds.dtypes, targets, chosen)
    slot = slot_of[pair]
    origins = torch.stack([number, offset], 1)[slot]
    origins[:, 1] += copies.offset
    copies.offset.add_(slots.bucket_offset[slot])
    copies.target[:] = target[pair]

    numbers = arange(len(bucket_nbytes))
    slot_ends = [0, *torch.searchsorted(bucket, numbers, right=True).tolist()]
    row_ends = [0, *torch.searchsorted(bucket[slot], numbers, right=True).tolist()]
    made = []
    for at, nbytes in enumerate(bucket_nbytes):
        rows = slice(row_ends[at], row_ends[at + 1])
        made.append(Bucket(nbytes, copies.select(rows), range(*slot_ends[at : at + 2]), origins[rows]))
    return made


def _places_of_slots(slots: Slots, chosen: Selection) -> tuple[Tensor, Tensor]:
    """A slot has copies for each place of its tensor: pair p is of the p-th slot and place returned. Mostly it has one."""
    place, slot_of = expand(chosen.first.diff(), slots.tensor)
    return slot_of, place


def _copies_of_classes(
    classes: Sequence[Tensor], types: Sequence[torch.dtype], targets: Targets, chosen: Selection
) -> tuple[CopyTable, Tensor]:
    """The rows of each pair of a slot and a place, as if its slot began the bucket; and for each row the number of its pair.

    Args:
        classes: layout, view and dtype (one of ``types``) of each pair, offset and bytes of its slot in the tensor.
    """
    dims = max((len(layout.shape) for layout in targets.layouts), default=1) or 1
    owned = [owned_regions(layout, at) for layout, at in zip(targets.layouts, targets.coordinates, strict=True)]
    class_of = numbered_rows(classes)
    first = first_of_each(class_of)
    rows_of = [
        _rows(chosen.views[view], owned[layout], types[kind], offset, size, dims)
        for layout, view, kind, offset, size in zip(*(values[first].tolist() for values in classes), strict=True)
    ]
    table = torch.tensor([row for rows in rows_of for row in rows], dtype=torch.int64, device="cpu")
    count = column([len(rows) for rows in rows_of])
    which, pair = expand(count, class_of)
    return CopyTable(table.reshape(-1, CopyTable.columns(dims))[which]), pair


def _rows(
    view: View, owned: Sequence[OwnedRegion], dtype: torch.dtype, offset: int, nbytes: int, dims: int
) -> list[list[int]]:
    """Copy-table rows for bytes [offset, offset + nbytes) of a checkpoint tensor placed by ``view``, from offset 0 of the
    bucket: what they share with each region that this rank owns."""
    begin, end = offset // dtype.itemsize, (offset + nbytes) // dtype.itemsize
    rows = []
    for part in view.within(begin, end):
        for low, extent, local in owned_parts((part.start, part.size), owned):
            steps = sum((a - b) * stride for a, b, stride in zip(low, part.start, part.strides, strict=True))
            fill = [0] * (dims - len(low))
            row = [0, (part.offset - begin + steps) * dtype.itemsize, dtypes.code(dtype), len(low)]
            rows.append([*row, *local, *fill, *extent, *fill, *part.strides, *fill])
    return rows
