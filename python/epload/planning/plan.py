"""The load plan. Pure: a manifest and the model's targets in; buckets, slots and copies out. No process group, no data."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from epload.core.columns import column, to_raw
from epload.core.copy_table import ALIGNMENT, CopyTable
from epload.core.pieces import Metadata, Pieces
from epload.mapping.mapping import Mapping
from epload.mapping.place import ShapeMismatch, place
from epload.mapping.scales import Scaling, with_scales
from epload.model.targets import Targets
from epload.planning.buckets import HEADER_BYTES, Bucket, Slots, fill_buckets, make_buckets
from epload.planning.holdings import holdings_of_targets
from epload.planning.selection import Twin, check_dtypes, select


class Taken(NamedTuple):
    """The data that this rank copies out of some buckets; see :class:`Bucket`."""

    targets: tuple[int, ...]
    copies: CopyTable
    origins: Tensor


@dataclass(frozen=True)
class LoadPlan:
    """The buckets of a load, the order in which they move, and where they go on this rank."""

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
    """Tied tensors that are left out, with what is loaded in their place: the load is right only if the values are equal."""
    casts: int
    """Checkpoint tensors whose dtype is converted."""
    targets: Targets
    """Without tensors: the model's, then the side tensors for scales."""
    scalings: tuple[Scaling, ...]
    """Targets that are multiplied by scales once all data is there."""
    owned_by_bucket: tuple[int, ...]
    """Number of bytes of each bucket that this rank copies into its shards."""

    def pieces(self, bucket: Bucket) -> Pieces:
        """Returns the pieces that a reader has to fill a bucket with."""
        return self.slots.pieces[bucket.slots.start : bucket.slots.stop]

    def taken(self, numbers: range) -> Taken:
        """Returns the data of several buckets as if they were one: ``copies`` counts in the targets of all."""
        buckets = self.buckets[numbers.start : numbers.stop]
        if len(buckets) == 1:
            return Taken(buckets[0].targets, buckets[0].copies, buckets[0].origins)
        tables, before = [], 0
        for bucket in buckets:
            table = bucket.copies.clone()
            table.target.add_(before)
            before += len(bucket.targets)
            tables.append(table)
        return Taken(
            tuple(chain.from_iterable(bucket.targets for bucket in buckets)),
            CopyTable.concatenate(tables),
            torch.cat([bucket.origins for bucket in buckets]),
        )

    def identity(self, number: int) -> tuple[int, bytes]:
        """Returns what identifies a bucket's header on all ranks: its number, and 16 bytes."""
        return number, self.fingerprint[:16]

    def describe(self, manifest: Metadata, numbers: Sequence[int]) -> str:
        """The tensors in some consecutive buckets, and where they are from; for messages."""
        of = self.slots.tensor
        first, last = (self.buckets[number].slots for number in (numbers[0], numbers[-1]))
        ends = dict.fromkeys(manifest.names[int(of[slot])] for slot in (first[0], last[-1]))
        return f"{' to '.join(ends)} of {manifest.source}"

    @property
    def nbytes(self) -> int:
        """Bytes on the wire towards one rank, headers included."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def owned(self) -> int:
        """Bytes of the checkpoint that this rank copies into its shards."""
        return sum(self.owned_by_bucket)

    @cached_property
    def spanned(self) -> int:
        """Bytes from the first to the last of each region that this rank copies: what it reads where gaps are read along."""
        return (
            int(CopyTable.concatenate([bucket.copies for bucket in self.buckets]).spans().sum()) if self.buckets else 0
        )

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
    targets, scalings = with_scales(manifest, targets, placed)
    tensors, placed, filled, tied, twins, unplaced = select(manifest, targets, placed, wanted)
    casts = check_dtypes(manifest, targets, placed, {scaling.target for scaling in scalings})
    holdings = holdings_of_targets(manifest.shapes, manifest.dtypes, targets, placed)
    slots, bucket, bucket_nbytes = fill_buckets(manifest, column(tensors), bucket_bytes)
    buckets = make_buckets(manifest, holdings, slots, bucket, bucket_nbytes)
    columns = [slots.tensor, slots.tensor_offset, bucket, slots.bucket_offset, slots.nbytes]
    explained = wanted | {source for mismatch in mismatches for source in mismatch.sources}
    return LoadPlan(
        buckets=tuple(buckets),
        slots=slots,
        fingerprint=_fingerprint(manifest, targets, columns, repr((bucket_bytes, options))),
        missing=_missing(targets, mapping, filled, mismatched),
        unexpected=tuple(manifest.names[i] for i in unplaced if i not in explained),
        mismatched=mismatched,
        tied=tied,
        twins=twins,
        casts=casts,
        targets=replace(targets, tensors=[]),
        scalings=scalings,
        owned_by_bucket=_owned(buckets),
    )


def _owned(buckets: Sequence[Bucket]) -> tuple[int, ...]:
    if not buckets:
        return ()
    nbytes = CopyTable.concatenate([bucket.copies for bucket in buckets]).nbytes()  # at once, as each call costs
    return tuple(int(part.sum()) for part in torch.split(nbytes, [len(bucket.copies) for bucket in buckets]))


def _missing(targets: Targets, mapping: Mapping, filled: Set[int], mismatched: Container[str]) -> tuple[str, ...]:
    """Names that nothing fills, except those of empty tensors, which need nothing."""
    expected = {targets.index[name] for _, name in mapping.only} or range(len(targets.names))
    return tuple(
        name
        for i, name in enumerate(targets.names)
        if i not in filled
        and i in expected
        and name not in mismatched
        and 0 not in targets.layouts[targets.layout[i]].shape
    )


def _fingerprint(manifest: Metadata, targets: Targets, columns: Sequence[Tensor], options: str) -> bytes:
    """Returns a digest of all that decides where tensors go on each rank; ``options`` names the mapping."""
    digest = hashlib.blake2b(digest_size=32)
    digest.update(manifest.digest)
    digest.update("\n".join(targets.describe()).encode(errors="backslashreplace"))
    for values in columns:
        digest.update(to_raw(values))
    digest.update(options.encode())
    return digest.digest()
