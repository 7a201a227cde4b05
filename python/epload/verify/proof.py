"""Proving after a load that the shards hold what the checkpoint says.

Each rank digests the regions that it holds, where they lie, and sends the digests with its copy table to the ranks that verify.
Those read the checkpoint once more, a bucket each in turn, and work out the same digests from it. Nothing that the load itself
had in its buffers is used, so that a bit that changed anywhere between the file and a shard is found.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.core import dtypes
from epload.core.copy_table import CopyTable
from epload.core.pieces import Pieces
from epload.errors import LoadError
from epload.native import ops
from epload.planning.buckets import Bucket
from epload.planning.plan import LoadPlan
from epload.transport.local import Local

VERIFY = ("off", "buckets", "sample", "full")
SAMPLED = 16
"""With "sample", one in so many pieces of tensors is proven; which ones follows from the plan."""
_THREADS = 4
"""Of a rank, that read and digest files."""
_KEPT_ROWS = 1 << 20
"""What was said of no more regions is kept for the next proof, at some 100 bytes each."""
_SHOWN = 10


class _Held(NamedTuple):
    """What one rank holds of one bucket."""

    bucket: int
    targets: list[int]
    table: Tensor
    """A copy table; its tensors are the targets, in this order."""


class _Claimed(NamedTuple):
    """What is claimed of one bucket."""

    bucket: int
    table: Tensor
    """A copy table of the holders' regions, with the dtype of each shard in place of its number."""
    origins: Tensor
    """See ``plan.Bucket.origins``."""
    holders: list[tuple[int, slice, slice]]
    """Ranks; which of the digests of each they are; which rows they are of. Ranks that hold the same share rows."""

    def differing(self, right: Tensor, digests: Mapping[int, Tensor]) -> list[tuple[int, int]]:
        """The tensors, by number, that are not as some rank claims, each with that rank. ``right``: their digests."""
        found = []
        for holder, which, rows in self.holders:
            bad = right[rows] != digests[holder][which]
            found += [(number, holder) for number in self.origins[rows][bad, 0].tolist()]
        return found


class _FileDigests:
    """What the files of a checkpoint say of regions. See ``safetensors_file.Readable``."""

    found: Tensor

    def __init__(self, claimed: _Claimed) -> None:
        self.origins = claimed.origins
        self._table = claimed.table

    def read(
        self, descriptors: Sequence[int], files: Tensor, offsets: Tensor, threads: int
    ) -> tuple[int, int, int, int]:
        self.found, outcome = ops.digest_files(
            descriptors, files, offsets, self.origins, self._table, max(threads, _THREADS)
        )
        return outcome


class Proof:
    """Of the loads of one plan. The same on all ranks but for the shards; what follows from the plan is found out once."""

    def __init__(self, plan: LoadPlan, verifiers: Sequence[int], sampled: bool) -> None:
        """``verifiers``: ranks that have the checkpoint, which take buckets in turn."""
        self._plan = plan
        self._verifiers = tuple(verifiers)
        self._every = SAMPLED if sampled else 1
        self._phase = int.from_bytes(plan.fingerprint[:4], "little") % self._every
        self._said: dict[int, bytes] = {}
        self._heard: tuple[dict[int, bytes], list[_Claimed]] = {}, []

    def fits(self, plan: LoadPlan, verifiers: Sequence[int]) -> bool:
        """Whether a load like this can be proven by what is known already."""
        return plan is self._plan and tuple(verifiers) == self._verifiers

    def claims(self, local: Local) -> dict[int, bytes]:
        """What this rank holds, for each verifier."""
        if not self._said:
            self._said = self._tables(local.tensors)
        parts: dict[int, list[Tensor]] = {rank: [] for rank in self._verifiers}
        for held in self._held:
            parts[self._verifier(held.bucket)].append(local.digests(*held))
        return {rank: _letter(self._said[rank], part) for rank, part in parts.items()}

    @cached_property
    def _held(self) -> list[_Held]:
        """By this rank."""
        found = []
        for number, bucket in enumerate(self._plan.buckets):
            copies = bucket.copies.select(self._chosen(bucket, bucket.copies.offset))
            if len(copies):
                targets = [bucket.targets[t] for t in copies.renumber_targets()]
                found.append(_Held(number, targets, copies.rows))
        return found

    def _tables(self, local: Sequence[Tensor]) -> dict[int, bytes]:
        """For each verifier, of what it gets digests."""
        parts: dict[int, list[Tensor]] = {rank: [] for rank in self._verifiers}
        for held in self._held:
            copies = CopyTable(held.table).clone()
            if self._plan.casts:
                copies.target[:] = torch.tensor([dtypes.code(local[t].dtype) for t in held.targets])[copies.target]
            else:
                copies.target[:] = copies.dtype
            copies.start[:] = 0  # where in the tensor, which means nothing there
            table = copies.rows
            # Column by column, as a column is mostly one value over and over.
            parts[self._verifier(held.bucket)] += [torch.tensor([held.bucket, *table.shape]), table.T.reshape(-1)]
        return {rank: zlib.compress(_raw(torch.cat(part)), level=1) if part else b"" for rank, part in parts.items()}

    def check(
        self, rank: int, claims: Mapping[int, bytes], checkpoint: Checkpoint, manifest: Manifest
    ) -> Iterator[int]:
        """Compares the claims of all ranks that were sent to ``rank`` with the checkpoint. Yields the bytes of each bucket.

        Raises:
            LoadError: some differ; it names the tensors and the ranks that hold them.
        """
        tables, digests = {}, {}
        for holder, letter in claims.items():
            if letter:
                tables[holder], digests[holder] = _opened(letter)
        claimed = self._heard[1]
        if self._heard[0] != tables:
            claimed = list(self._claimed(tables))
            if sum(map(len, digests.values())) <= _KEPT_ROWS:
                self._heard = tables, claimed
        # Where only a file's regions are digested, not a page of it is touched.
        scratch = torch.empty(max((self._nbytes(each) for each in claimed), default=0), dtype=torch.uint8)
        wrong: dict[str, set[int]] = {}
        for each in claimed:
            right = self._right(each, checkpoint, scratch[: self._nbytes(each)])
            for tensor, holder in each.differing(right, digests):
                wrong.setdefault(manifest.names[tensor], set()).add(holder)
            yield self._nbytes(each)
        if wrong:
            said = [f"{name} on {_ranks(holders)}" for name, holders in wrong.items()]
            more = f" and {len(said) - _SHOWN} more tensors" if len(said) > _SHOWN else ""
            raise LoadError(
                f"after the load, shards differ from {manifest.source} as rank {rank} reads it: "
                f"{', '.join(said[:_SHOWN])}{more}; memory, the network or the storage of a machine changed bits, or something "
                "wrote to the model during the load"
            )

    def _right(self, claimed: _Claimed, checkpoint: Checkpoint, scratch: Tensor) -> Tensor:
        """The digests that the checkpoint has. ``scratch``: as large as the bucket."""
        from_files = _FileDigests(claimed)
        if checkpoint.read_regions(from_files) is not None:
            return from_files.found
        bucket = self._plan.buckets[claimed.bucket]
        columns = self._plan.pieces(bucket).columns
        checkpoint.fill(scratch, Pieces(columns[self._chosen(bucket, columns[:, 2])]))
        return ops.digest_bucket(scratch, claimed.table)

    def _nbytes(self, claimed: _Claimed) -> int:
        return self._plan.buckets[claimed.bucket].nbytes

    def _claimed(self, tables: Mapping[int, bytes]) -> Iterator[_Claimed]:
        """Bucket by bucket. ``tables``: what was said by each holder."""
        parsed = {holder: list(_parsed(data)) for holder, data in tables.items()}
        # A rank's rows are as wide as its own targets need.
        widest = max((table.shape[1] for said in parsed.values() for _, table in said), default=0)
        of_bucket: dict[int, list[tuple[int, slice, Tensor]]] = {}
        for holder, said in parsed.items():
            first = 0
            for number, table in said:
                which = slice(first, first + len(table))
                of_bucket.setdefault(number, []).append((holder, which, _widened(table, widest)))
                first = which.stop
        for number, said_of in sorted(of_bucket.items()):
            table, holders = _merged(said_of)
            tensor, tensor_offset, begin, _ = self._plan.pieces(self._plan.buckets[number]).columns.T.contiguous()
            offset = table[:, 1].contiguous()
            at = torch.searchsorted(begin, offset, right=True) - 1
            origins = torch.stack([tensor[at], tensor_offset[at] + offset - begin[at]], 1)
            yield _Claimed(number, table, origins, holders)

    def _verifier(self, number: int) -> int:
        return self._verifiers[number % len(self._verifiers)]

    def _chosen(self, bucket: Bucket, offsets: Tensor) -> Tensor:
        """Which of some offsets in a bucket lie in pieces that are proven."""
        if self._every == 1:
            return torch.arange(len(offsets))
        begins = self._plan.pieces(bucket).columns[:, 2].contiguous()
        slot = torch.searchsorted(begins, offsets.contiguous(), right=True) - 1 + bucket.slots.start
        return ((slot + self._phase) % self._every == 0).nonzero().view(-1)


def _merged(said_of: Sequence[tuple[int, slice, Tensor]]) -> tuple[Tensor, list[tuple[int, slice, slice]]]:
    """One table of all regions, and who holds which; see :class:`_Claimed`."""
    known: dict[bytes, slice] = {}
    tables: list[Tensor] = []
    holders = []
    length = 0
    for holder, which, table in said_of:
        raw = _raw(table)
        if raw not in known:
            known[raw] = slice(length, length + len(table))
            tables.append(table)
            length += len(table)
        holders.append((holder, which, known[raw]))
    return torch.cat(tables), holders


def _widened(table: Tensor, columns: int) -> Tensor:
    """A copy table with room for more dims."""
    return table if table.shape[1] == columns else CopyTable(table).widened(columns)


def _raw(words: Tensor) -> bytes:
    """``words`` is contiguous."""
    return ctypes.string_at(words.data_ptr(), words.nbytes)


def _letter(tables: bytes, digests: Sequence[Tensor]) -> bytes:
    return len(tables).to_bytes(8, "little") + tables + _raw(torch.cat(list(digests))) if digests else b""


def _opened(letter: bytes) -> tuple[bytes, Tensor]:
    """Tables and digests."""
    begin = 8 + int.from_bytes(letter[:8], "little")
    return letter[8:begin], torch.frombuffer(bytearray(letter[begin:]), dtype=torch.int64)


def _parsed(tables: bytes) -> Iterator[tuple[int, Tensor]]:
    """Number of a bucket and copy table."""
    words = torch.frombuffer(bytearray(zlib.decompress(tables)), dtype=torch.int64)
    at = 0
    while at < len(words):
        number, rows, columns = words[at : at + 3].tolist()
        at += 3
        yield number, words[at : at + rows * columns].view(columns, rows).T.contiguous()
        at += rows * columns


def _ranks(ranks: set[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
