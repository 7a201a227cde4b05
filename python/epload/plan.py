"""The load plan. Pure: a manifest and the model's targets in; buckets, slots and copies out. No process group, no data.

Thousands of tensors share a shape and a layout, so geometry is worked out once a class of them; per tensor there is a
dictionary look-up, and the copy table is put together by vector arithmetic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epload import _C, dtypes
from epload.checkpoint import Manifest, Piece
from epload.control import HEADER_BYTES
from epload.errors import ManifestMismatch, ModelMismatch
from epload.mapping import Mapping, Placed
from epload.placement import OwnedRegion, box_of_range, intersect, owned_regions, row_major_strides
from epload.targets import Targets

ALIGNMENT = 16
"""Bytes; where a slot may start. The widest access of a device, and so that a tensor's dtype can be viewed in place."""
_FIXED_COLUMNS = 4


@dataclass(frozen=True)
class Bucket:
    """One message. ``copies`` and ``targets`` are this rank's; the rest is equal on all ranks."""

    nbytes: int
    """Header included."""
    pieces: tuple[Piece, ...]
    copies: Tensor
    """The native copy table; column 0 counts in ``targets``."""
    targets: tuple[int, ...]
    """Targets that this rank copies into, by index."""


@dataclass(frozen=True)
class LoadPlan:
    """What moves, in which order, and where it goes on this rank."""

    buckets: tuple[Bucket, ...]
    fingerprint: bytes
    """32 bytes over everything that ranks must share: tensors, targets, layouts, slots, options."""
    missing: tuple[str, ...]
    """Names of the model that nothing fills; of tied names the first."""
    unexpected: tuple[str, ...]
    """Names of the checkpoint that the model has no place for."""
    tied: tuple[str, ...]
    """Names of the checkpoint left out because another name of the same parameter is in it."""
    casts: int
    """Checkpoint tensors whose dtype is converted."""

    @property
    def nbytes(self) -> int:
        """Bytes on the wire towards one rank, headers included."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def largest(self) -> int:
        return max((bucket.nbytes for bucket in self.buckets), default=0)


def make_plan(manifest: Manifest, targets: Targets, mapping: Mapping, bucket_bytes: int, options: str = "") -> LoadPlan:
    """Plans a load.

    Args:
        bucket_bytes: size of a bucket, header included.
        options: anything else on which ranks must agree.

    Raises:
        ModelMismatch: a shape or dtype of the checkpoint does not fit the model.
        ValueError: ``bucket_bytes`` is too small for the elements.
    """
    if bucket_bytes < HEADER_BYTES + ALIGNMENT:
        raise ValueError(f"expected bucket_bytes of at least {HEADER_BYTES + ALIGNMENT}, got {bucket_bytes}")
    placed = mapping.place(manifest.names, manifest.shapes, targets.shapes)
    chosen, tied = _choose(manifest, targets, placed)
    casts = _check_dtypes(manifest, targets, chosen)
    slots, bucket_nbytes = _C.plan_buckets(
        _extents(manifest, chosen, bucket_bytes - HEADER_BYTES), bucket_bytes, ALIGNMENT, HEADER_BYTES
    )
    buckets = _buckets(manifest, targets, chosen, slots, bucket_nbytes)

    filled = {target for _, target, _ in chosen}
    digest = hashlib.blake2b(digest_size=32)
    digest.update(manifest.digest)
    digest.update("\n".join(targets.describe()).encode())
    digest.update(repr(slots).encode())
    digest.update(repr([(i, t, box.offset) for i, t, box in chosen]).encode())
    digest.update(f"{bucket_bytes} {options}".encode())
    return LoadPlan(
        buckets=tuple(buckets),
        fingerprint=digest.digest(),
        missing=tuple(name for i, name in enumerate(targets.names) if i not in filled and _numel(targets, i)),
        unexpected=tuple(name for name, box in zip(manifest.names, placed, strict=True) if box is None),
        tied=tied,
        casts=casts,
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


def describe(manifest: Manifest, targets: Targets, bucket_bytes: int, options: str) -> list[str]:
    """A line an entry of everything in the fingerprint, for telling where two ranks differ."""
    lines = [f"options: bucket_bytes={bucket_bytes} {options}"]
    lines += [f"model {line}" for line in targets.describe()]
    lines += [
        f"checkpoint {name}: {dtypes.name(dtype)} {list(shape)}"
        for name, dtype, shape in zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True)
    ]
    return lines


Chosen = list[tuple[int, int, Placed]]
"""Manifest index, target index, box; in manifest order."""


def _numel(targets: Targets, index: int) -> bool:
    return 0 not in targets.layouts[targets.layout[index]].shape


def _choose(manifest: Manifest, targets: Targets, placed: list[Placed | None]) -> tuple[Chosen, tuple[str, ...]]:
    """Leaves out what has no place, and a tied name whose parameter another name already fills."""
    chosen: Chosen = []
    tied = []
    filled: dict[int, str] = {}
    for i, box in enumerate(placed):
        if box is None:
            continue
        target = targets.index[box.target]
        by = filled.setdefault(target, box.target)
        if by == box.target:
            chosen.append((i, target, box))
        else:
            tied.append(manifest.names[i])
    return chosen, tuple(tied)


def _check_dtypes(manifest: Manifest, targets: Targets, chosen: Chosen) -> int:
    casts = 0
    for i, target, _ in chosen:
        source, wanted = manifest.dtypes[i], targets.dtypes[target]
        if source is not wanted:
            if not dtypes.converts(source, wanted):
                raise ModelMismatch(
                    f"{manifest.names[i]} is {dtypes.name(source)} in the checkpoint, which the model's "
                    f"{targets.names[target]} of {dtypes.name(wanted)} cannot take"
                )
            casts += 1
    return casts


def _extents(manifest: Manifest, chosen: Chosen, room: int) -> list[tuple[int, int, int]]:
    known: dict[tuple[tuple[int, ...], int], tuple[int, int, int]] = {}
    extents = []
    for i, _, box in chosen:
        key = (box.size, manifest.dtypes[i].itemsize)
        extent = known.get(key)
        if extent is None:
            extent = known[key] = _C.extent_of(*key, room)
        extents.append(extent)
    return extents


def _buckets(
    manifest: Manifest, targets: Targets, chosen: Chosen, slots: list[list[int]], bucket_nbytes: list[int]
) -> list[Bucket]:
    """Adds this rank's copies to the planned slots."""
    dims = max((len(layout.shape) for layout in targets.layouts), default=1) or 1
    owned: list[list[OwnedRegion]] = [
        owned_regions(layout, at) for layout, at in zip(targets.layouts, targets.coordinates, strict=True)
    ]
    classes: dict[tuple[object, ...], int] = {}
    class_rows: list[list[list[int]]] = []
    class_of: list[int] = []
    target_of: list[int] = []
    pieces: list[list[Piece]] = [[] for _ in bucket_nbytes]
    for tensor, offset, bucket, bucket_offset, nbytes in zip(*slots, strict=True):
        i, target, box = chosen[tensor]
        layout = targets.layout[target]
        dtype = manifest.dtypes[i]
        key = (layout, box.offset, box.size, dtype, offset, nbytes)
        known = classes.get(key)
        if known is None:
            known = classes[key] = len(class_rows)
            class_rows.append(_rows(box, owned[layout], dtype, offset, nbytes, dims))
        class_of.append(known)
        target_of.append(target)
        pieces[bucket].append(Piece(i, offset, bucket_offset, nbytes))

    counts = torch.tensor([len(class_rows[c]) for c in class_of], dtype=torch.int64)
    flat_rows = [row for rows in class_rows for row in rows]
    columns = _FIXED_COLUMNS + 3 * dims
    table = torch.tensor(flat_rows, dtype=torch.int64).reshape(-1, columns)
    first = torch.tensor([0, *(len(rows) for rows in class_rows)], dtype=torch.int64).cumsum(0)
    # Row r of the result is row `within` of the class of slot `slot`.
    slot = torch.repeat_interleave(torch.arange(len(class_of)), counts)
    within = torch.arange(len(slot)) - (counts.cumsum(0) - counts)[slot]
    copies = table[first[torch.tensor(class_of, dtype=torch.int64)[slot]] + within]
    copies[:, 1] += torch.tensor(slots[3], dtype=torch.int64)[slot]
    targets_of_rows = torch.tensor(target_of, dtype=torch.int64)[slot]
    ends = torch.searchsorted(
        torch.tensor(slots[2], dtype=torch.int64)[slot], torch.arange(len(bucket_nbytes)), right=True
    ).tolist()

    made = []
    begin = 0
    for number, end in enumerate(ends):
        part = copies[begin:end].contiguous()
        wanted, part[:, 0] = torch.unique(targets_of_rows[begin:end], return_inverse=True)
        made.append(Bucket(bucket_nbytes[number], tuple(pieces[number]), part, tuple(wanted.tolist())))
        begin = end
    return made


def _rows(
    box: Placed, owned: Sequence[OwnedRegion], dtype: torch.dtype, offset: int, nbytes: int, dims: int
) -> list[list[int]]:
    """Copy-table rows for bytes [offset, offset + nbytes) of a checkpoint tensor that lands in ``box``, from offset 0 of
    the bucket: what they share with each region that this rank owns."""
    start, size = box_of_range(box.size, offset // dtype.itemsize, nbytes // dtype.itemsize)
    here = tuple(map(int.__add__, box.offset, start))
    strides = row_major_strides(size)
    rows = []
    for region in owned:
        shared = intersect((here, size), (region.start, region.size))
        if shared is None:
            continue
        low, extent = shared
        in_bucket = sum((a - b) * stride for a, b, stride in zip(low, here, strides, strict=True))
        local = [at + a - b for at, a, b in zip(region.local_start, low, region.start, strict=True)]
        fill = [0] * (dims - len(low))
        rows.append(
            [0, in_bucket * dtype.itemsize, dtypes.code(dtype), len(low), *local, *fill, *extent, *fill, *strides, *fill]
        )
    return rows
