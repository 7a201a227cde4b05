"""Buckets: the messages of a load, and what each rank copies out of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from epload.core.columns import arange, first_of_each, from_raw, numbered_rows, to_raw
from epload.core.copy_table import ALIGNMENT, CopyTable
from epload.core.pieces import Metadata, Pieces
from epload.native.extension import _C
from epload.planning.holdings import NO_PART, CopyTemplates, Holdings, copies_of_range

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


def fill_buckets(manifest: Metadata, tensors: Tensor, bucket_bytes: int) -> tuple[Slots, Tensor, list[int]]:
    """Cuts tensors into pieces that fill buckets.

    Args:
        tensors: int64 [t], those that are loaded, as indices into the manifest.

    Returns:
        The slots; the bucket of each slot, ascending (int64 [s]); and the bytes of each bucket.
    """
    kinds, kind_of = manifest.kinds.combine(tensors)
    room = bucket_bytes - HEADER_BYTES
    extents = [_C.extent_of(shape, dtype.itemsize, room) for shape, dtype in kinds]
    columns, bucket_nbytes = _C.plan_buckets(extents, bucket_bytes, ALIGNMENT, HEADER_BYTES, to_raw(kind_of))
    number, tensor_offset, bucket, bucket_offset, nbytes = map(from_raw, columns)
    return Slots(tensors[number], tensor_offset, bucket_offset, nbytes), bucket, bucket_nbytes


def make_buckets(
    manifest: Metadata, holdings: Holdings, slots: Slots, bucket: Tensor, bucket_nbytes: Sequence[int]
) -> list[Bucket]:
    """Adds this rank's copies to the planned slots; see :func:`fill_buckets`."""
    tensor, offset, types = slots.tensor, slots.tensor_offset, manifest.kinds.dtypes
    # Everything that the copies of a slot depend on but for where the slot lies in the bucket.
    columns = holdings.class_of[tensor] - NO_PART, manifest.kinds.dtype_of[tensor], offset, slots.nbytes
    template_of = numbered_rows(columns)
    first = first_of_each(template_of)
    templates = CopyTemplates(holdings)
    for number, dtype, *extent in zip(*(values[first].tolist() for values in columns), strict=True):
        templates.add(copies_of_range(holdings, number + NO_PART, types[dtype], *extent))
    copies, slot = templates.expand(tensor, template_of)
    origins = torch.stack([tensor[slot], offset[slot] + copies.offset], 1)
    copies.offset.add_(slots.bucket_offset[slot])

    numbers = arange(len(bucket_nbytes))
    slot_ends = [0, *torch.searchsorted(bucket, numbers, right=True).tolist()]
    row_ends = [0, *torch.searchsorted(bucket[slot], numbers, right=True).tolist()]
    buckets = []
    for at, nbytes in enumerate(bucket_nbytes):
        rows = slice(row_ends[at], row_ends[at + 1])
        buckets.append(Bucket(nbytes, copies.select(rows), range(*slot_ends[at : at + 2]), origins[rows]))
    return buckets
