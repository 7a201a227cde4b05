"""The load plan. Pure: a manifest and the model's targets in; buckets, slots and copies out. No process group, no data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from epload.core.columns import column, first_of_each, from_raw, numbered_rows, to_raw
from epload.core.copy_table import ALIGNMENT, CopyTable
from epload.core.pieces import Metadata, Pieces
from epload.mapping.mapping import Mapping
from epload.mapping.place import Leftover, Mismatch, place
from epload.mapping.quantized_targets import QuantizedTarget, with_quantized
from epload.mapping.scales import SUFFIXES, Scaling, with_scales
from epload.model.targets import Targets
from epload.native.extension import _C
from epload.planning.buckets import HEADER_BYTES, Bucket
from epload.planning.holdings import NO_PART, Holdings, copies_of_range, expand_copies, holdings_of_targets
from epload.planning.selection import TiedPair, select


@dataclass(frozen=True)
class LoadPlan:
    """The buckets of a load, the order in which they move, and where they go on this rank."""

    buckets: tuple[Bucket, ...]
    holdings: Holdings
    """The parts of the checkpoint's tensors that this rank keeps, in the targets."""
    copies: CopyTable
    """This rank's copies out of all buckets."""
    tensor_count: int
    """Number of checkpoint tensors in the buckets."""
    payload: int
    """Bytes of these tensors."""
    fingerprint: bytes
    """32 bytes over everything that ranks must share: tensors, targets, layouts, pieces, options."""
    missing: tuple[str, ...]
    """Names of the model that nothing fills; of tied names the first."""
    unexpected: tuple[str, ...]
    """Names of the checkpoint that the model has no place for, and of what conversions make and the model lacks."""
    mismatched: dict[str, str]
    """Names of the model, as all ranks know them, that the checkpoint has in another shape, and what to say of each."""
    unfilled: tuple[str, ...]
    """Names of the model that nothing fills: missing ones, and mismatched ones that no other name fills; of tied names the
    first."""
    tied: tuple[str, ...]
    """Names of the checkpoint that are skipped because another name of the same parameter is in it."""
    tied_pairs: tuple[TiedPair, ...]
    """Tied tensors that are skipped, with what is loaded in their place: the load is right only if the values are equal."""
    casts: int
    """Number of checkpoint tensors whose dtype is converted."""
    targets: Targets
    """Without tensors: the model's, then extra ones: for scales, and for what is quantized."""
    scalings: tuple[Scaling, ...]
    """Targets that are multiplied by scales once all data is there."""
    quantized: tuple[QuantizedTarget, ...]
    """Targets that are quantized as soon as their data is there."""

    def taken(self, numbers: range) -> tuple[list[int], CopyTable, Tensor]:
        """Returns what this rank copies out of several buckets as if they were one: targets, the copies, which count in these,
        and their origins; see :class:`Bucket`."""
        buckets = self.buckets[numbers.start : numbers.stop]
        table = CopyTable.concatenate([bucket.rows for bucket in buckets])
        return table.renumber_targets(), table, torch.cat([bucket.origins for bucket in buckets])

    def identity(self, number: int) -> tuple[int, bytes]:
        """Returns what identifies a bucket's header on all ranks: its number, and 16 bytes."""
        return number, self.fingerprint[:16]

    def describe(self, manifest: Metadata, numbers: Sequence[int]) -> str:
        """The tensors in some consecutive buckets, and where they are from; for messages."""
        first, last = self.buckets[numbers[0]].pieces[0], self.buckets[numbers[-1]].pieces[-1]
        names = dict.fromkeys(manifest.names[piece.tensor] for piece in (first, last))
        return f"{' to '.join(names)} of {manifest.source}"

    @property
    def sizes(self) -> list[int]:
        """Bytes of each bucket, headers included."""
        return [bucket.nbytes for bucket in self.buckets]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire towards one rank, headers included."""
        return sum(self.sizes)

    @cached_property
    def owned_by_bucket(self) -> list[int]:
        """Bytes of each bucket that this rank copies into its shards."""
        parts = torch.split(self.copies.nbytes(), [len(bucket.rows) for bucket in self.buckets])
        return [int(part.sum()) for part in parts]

    @property
    def owned(self) -> int:
        """Bytes of the checkpoint that this rank copies into its shards."""
        return sum(self.owned_by_bucket)

    @property
    def spanned(self) -> int:
        """Bytes from the first to the last of each region that this rank copies: what it reads where gaps are read, too."""
        return int(self.copies.spans().sum())

    @property
    def largest(self) -> int:
        return max(self.sizes, default=0)


def make_plan(
    manifest: Metadata,
    targets: Targets,
    mapping: Mapping,
    bucket_bytes: int,
    options: str = "",
    required: Set[int] = frozenset(),
) -> LoadPlan:
    """Plans a load.

    Args:
        bucket_bytes: size of a bucket, header included.
        options: anything else on which ranks must agree.
        required: checkpoint tensors, by number, that are sent even if they have no place here, since some rank needs them.

    Raises:
        ModelMismatch: the checkpoint does not fit the model, by other than missing, unexpected or mismatched keys.
        ValueError: ``bucket_bytes`` is too small for the elements.
    """
    if bucket_bytes < HEADER_BYTES + ALIGNMENT:
        raise ValueError(f"expected bucket_bytes of at least {HEADER_BYTES + ALIGNMENT}, got {bucket_bytes}")
    mismatches, leftovers = list[Mismatch](), list[Leftover]()
    placed = place(mapping, manifest.names, manifest.shapes, targets.shapes, mismatches, leftovers)
    mismatched = {target: text for target, _, text in mismatches}
    targets, scalings = with_scales(manifest, targets, placed)
    targets, quantized = with_quantized(manifest, targets, placed, mapping.quantize)
    explained = required | {source for _, sources, _ in mismatches for source in sources}
    scales = {manifest.names[source] + suffix for source in explained - required for suffix in SUFFIXES}
    unplaced = [i for i, places in enumerate(placed) if not places and i not in explained]
    unexpected = [manifest.names[i] for i in unplaced if manifest.names[i] not in scales]
    unexpected += [name for name, sources in leftovers if required.isdisjoint(sources)]
    scaled = {scaling.target for scaling in scalings}
    tensors, placed, filled, tied, tied_pairs, casts = select(manifest, targets, placed, required, scaled)
    filled = filled | {i for own in quantized for i in own[:2]}
    lost = {targets.index[target] for target in mismatched} - filled
    missing = targets.missing(mapping.only, filled | lost)
    holdings = holdings_of_targets(manifest.shapes, targets, placed)
    pieces, bucket, sizes = _fill_buckets(manifest, column(tensors), bucket_bytes)
    copies, origins, piece = _copies(manifest, holdings, pieces)
    piece_counts = torch.bincount(bucket, minlength=len(sizes)).tolist()
    copy_counts = torch.bincount(bucket[piece], minlength=len(sizes)).tolist()
    columns = (
        torch.split(values, counts)
        for values, counts in ((copies.rows, copy_counts), (pieces, piece_counts), (origins, copy_counts))
    )
    parts = zip(sizes, *columns, strict=True)
    return LoadPlan(
        buckets=tuple(Bucket(nbytes, CopyTable(rows), Pieces(own), of_rows) for nbytes, rows, own, of_rows in parts),
        holdings=holdings,
        copies=copies,
        tensor_count=len(torch.unique(pieces[:, 0])),
        payload=int(pieces[:, 3].sum()),
        fingerprint=_fingerprint(
            manifest, targets, [pieces, bucket], repr((bucket_bytes, options, () if required else tied_pairs))
        ),
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        mismatched=mismatched,
        unfilled=(*missing, *(targets.names[i] for i in sorted(lost))),
        tied=tied,
        tied_pairs=tied_pairs,
        casts=casts,
        targets=replace(targets, tensors=[]),
        scalings=scalings,
        quantized=quantized,
    )


def _fill_buckets(manifest: Metadata, tensors: Tensor, bucket_bytes: int) -> tuple[Tensor, Tensor, list[int]]:
    """Cuts tensors into pieces that fill buckets.

    Args:
        tensors: int64 [t], those that are loaded, as indices into the manifest.

    Returns:
        The pieces in the order of the buckets, see :class:`Pieces` (int64 [n, 4]); the bucket of each, ascending (int64 [n]);
        and the bytes of each bucket.
    """
    kinds, kind_of = manifest.kinds
    used, number_of = torch.unique(kind_of[tensors], return_inverse=True)
    own_kinds = (kinds[number] for number in used.tolist())
    extents = [_C.extent_of(shape, dtype.itemsize, bucket_bytes - HEADER_BYTES) for shape, dtype in own_kinds]
    columns, sizes = _C.plan_buckets(extents, bucket_bytes, ALIGNMENT, HEADER_BYTES, to_raw(number_of))
    number, tensor_offset, bucket, bucket_offset, nbytes = map(from_raw, columns)
    return torch.stack([tensors[number], tensor_offset, bucket_offset, nbytes], 1), bucket, sizes


def _copies(manifest: Metadata, holdings: Holdings, pieces: Tensor) -> tuple[CopyTable, Tensor, Tensor]:
    """Returns this rank's copies of pieces, in their order; the origin of each (see :class:`Bucket`); and its piece."""
    tensor, begin, bucket_offset, nbytes = pieces.T.contiguous()
    class_of = holdings.class_of[tensor]
    # Everything that the copies of a piece depend on but for where the piece lies in the bucket.
    template_of = numbered_rows([manifest.kinds[1][tensor], class_of - NO_PART, begin, nbytes])
    templates = []
    for i in first_of_each(template_of).tolist():
        number, first, _, size = pieces[i].tolist()
        templates.append(copies_of_range(holdings, int(class_of[i]), manifest.dtypes[number], first, size))
    copies, piece = expand_copies(holdings, templates, tensor, template_of)
    origins = torch.stack([tensor[piece], begin[piece] + copies.offset], 1)
    copies.offset.add_(bucket_offset[piece])
    return copies, origins, piece


def _fingerprint(manifest: Metadata, targets: Targets, columns: Sequence[Tensor], options: str) -> bytes:
    """Returns a digest of all that decides where tensors go on each rank; ``options`` names the mapping."""
    digest = hashlib.blake2b(digest_size=32)
    digest.update(manifest.digest)
    digest.update("\n".join(f"{name}: {text}" for name, text in targets.describe().items()).encode(errors="backslashreplace"))
    for values in columns:
        digest.update(to_raw(values))
    digest.update(options.encode())
    return digest.digest()
