"""Proving after a load that the shards hold what the checkpoint contains.

Each rank computes digests of the regions it holds, in place, and sends them with their copy table to the ranks that verify. These
read the checkpoint once more, taking buckets in turn, and compute the same digests from it. They use nothing that the load had in
its buffers, so that a bit that changed anywhere between the file and a shard is detected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.core import dtypes
from epload.core.copy_table import CopyTable
from epload.errors import LoadError
from epload.native import ops
from epload.planning.plan import LoadPlan
from epload.transport.local import Local
from epload.verify import digests
from epload.verify.digests import BucketClaims, LocalRegions

_MAX_CACHED_ROWS = 1 << 20
"""The claims of at most this many regions are kept decoded for the next proof, at about 100 bytes each."""
_MAX_SHOWN = 10


def check_verify(verify: object) -> None:
    """Raises TypeError unless the option is a bool."""
    if not isinstance(verify, bool):
        advice = "False not to" if verify == "off" else "True to"
        raise TypeError(
            f"expected verify to be a bool, got {verify!r}; pass verify={advice} prove what the tensors hold"
        )


class Proof:
    """Proves the loads of one plan. Equal on all ranks except for the shards; what depends only on the plan is computed once."""

    def __init__(self, plan: LoadPlan, verifiers: Sequence[int]) -> None:
        """
        Args:
            plan: of the loads.
            verifiers: ranks that can read the checkpoint; they take buckets in turn.
        """
        self._plan = plan
        self._verifiers = tuple(verifiers)
        self._sent_tables: dict[int, bytes] = {}
        self._received: tuple[dict[int, bytes], list[BucketClaims]] = {}, []
        """The tables of the last proof, encoded and decoded."""

    def fits(self, plan: LoadPlan, verifiers: Sequence[int]) -> bool:
        """Returns True if this object can prove a load of ``plan``."""
        return plan is self._plan and tuple(verifiers) == self._verifiers

    def claims(self, local: Local) -> dict[int, bytes]:
        """The digests of the regions that this rank holds, encoded, by the rank that verifies them."""
        if not self._sent_tables:
            self._sent_tables = self._encoded_tables(local.tensors)
        parts: dict[int, list[Tensor]] = {rank: [] for rank in self._verifiers}
        for regions in self._local_regions:
            parts[self._verifier(regions.bucket)].append(local.digests(regions.targets, regions.table))
        return {rank: digests.encode(self._sent_tables[rank], part) for rank, part in parts.items()}

    @cached_property
    def _local_regions(self) -> list[LocalRegions]:
        found = []
        for index, bucket in enumerate(self._plan.buckets):
            copies = bucket.copies.clone()
            if len(copies):
                targets = [bucket.targets[t] for t in copies.renumber_targets()]
                found.append(LocalRegions(index, targets, copies.rows))
        return found

    def _encoded_tables(self, tensors: Sequence[Tensor]) -> dict[int, bytes]:
        """The tables of this rank's regions, encoded, by the rank that verifies them. ``tensors``: of the plan's targets."""
        parts: dict[int, list[tuple[int, Tensor]]] = {rank: [] for rank in self._verifiers}
        for regions in self._local_regions:
            copies = CopyTable(regions.table).clone()
            if self._plan.casts:
                copies.target[:] = torch.tensor([dtypes.code(tensors[t].dtype) for t in regions.targets])[copies.target]
            else:
                copies.target[:] = copies.dtype
            copies.start[:] = 0  # the position in the shard, which verifiers do not use
            parts[self._verifier(regions.bucket)].append((regions.bucket, copies.rows))
        return {rank: digests.encode_tables(part) for rank, part in parts.items()}

    def check(
        self, rank: int, claims: Mapping[int, bytes], checkpoint: Checkpoint, manifest: Manifest
    ) -> Iterator[int]:
        """Compares the claims of all ranks with the checkpoint, bucket by bucket. Yields the size of each bucket in bytes.

        Args:
            rank: this rank, for the error message.
            claims: what :meth:`claims` returned for this rank, on each rank.
            checkpoint: open on this rank.
            manifest: of the checkpoint.

        Raises:
            CheckpointError: the checkpoint cannot be read.
            LoadError: digests differ; it names the tensors and the ranks that hold them.
        """
        tables, received = {}, {}
        for holder, message in claims.items():
            if message:
                tables[holder], received[holder] = digests.decode(message)
        all_claims = self._received[1]
        if self._received[0] != tables:
            all_claims = list(self._claims_of(tables))
            if sum(map(len, received.values())) <= _MAX_CACHED_ROWS:
                self._received = tables, all_claims
        scratch = torch.empty(max((self._nbytes(each) for each in all_claims), default=0), dtype=torch.uint8)
        wrong: dict[str, set[int]] = {}
        for each in all_claims:
            expected = self._expected(each, checkpoint, scratch[: self._nbytes(each)])
            for tensor, holder in each.mismatches(expected, received):
                wrong.setdefault(manifest.names[tensor], set()).add(holder)
            yield self._nbytes(each)
        if wrong:
            shown = [f"{name} on {_ranks(holders)}" for name, holders in wrong.items()]
            more = f" and {len(shown) - _MAX_SHOWN} more tensors" if len(shown) > _MAX_SHOWN else ""
            raise LoadError(
                f"after the load, shards differ from {manifest.source} as rank {rank} reads it: "
                f"{', '.join(shown[:_MAX_SHOWN])}{more}; the memory, the network or the storage of a machine corrupted bits, or "
                "something wrote to the model during the load"
            )

    def _expected(self, claims: BucketClaims, checkpoint: Checkpoint, scratch: Tensor) -> Tensor:
        """The digests that the checkpoint has. ``scratch``: as large as the bucket."""
        bucket = self._plan.buckets[claims.bucket]
        checkpoint.fill(scratch, self._plan.pieces(bucket))
        return ops.digest_bucket(scratch, claims.table)

    def _nbytes(self, claims: BucketClaims) -> int:
        return self._plan.buckets[claims.bucket].nbytes

    def _claims_of(self, tables: Mapping[int, bytes]) -> Iterator[BucketClaims]:
        """Bucket by bucket. ``tables``: encoded, of each rank."""
        for index, (table, claims) in digests.claims_by_bucket(tables).items():
            tensor, tensor_offset, begin, _ = self._plan.pieces(self._plan.buckets[index]).columns.T.contiguous()
            offset = table[:, 1].contiguous()
            piece = torch.searchsorted(begin, offset, right=True) - 1
            origins = torch.stack([tensor[piece], tensor_offset[piece] + offset - begin[piece]], 1)
            yield BucketClaims(index, table, origins, claims)

    def _verifier(self, bucket: int) -> int:
        return self._verifiers[bucket % len(self._verifiers)]


def _ranks(ranks: set[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
