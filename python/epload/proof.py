"""Proving after a load that the shards hold what the checkpoint says.

Each rank digests the regions that it holds, where they lie, and sends the digests with its copy table to the ranks that verify.
Those read the checkpoint once more, a bucket each in turn, and work out the same digests from it. Nothing that the load itself
had in its buffers is used, so that a bit that changed anywhere between the file and a shard is found.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cached_property
from itertools import pairwise
from queue import SimpleQueue
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from epload import dtypes, ops
from epload.checkpoint import Checkpoint, Pieces
from epload.errors import LoadError
from epload.manifest import Manifest
from epload.plan import FIXED_COLUMNS, Bucket, LoadPlan

VERIFY = ("off", "buckets", "sample", "full")
SAMPLED = 16
"""With "sample", one in so many pieces of tensors is proven; which ones follows from the plan."""
BLOCK_BYTES = 8 << 20
"""Read at a time, so that what was read is digested out of the processor's cache; a longer piece of a tensor is not cut."""
_THREADS = 2
"""Each reads and digests; where only one may read, the other digests meanwhile."""
_KEPT_ROWS = 1 << 20
"""What was said of no more regions is kept for the next proof, at some 90 bytes each."""
_SHOWN = 10


class _Held(NamedTuple):
    """What one rank holds of one bucket."""

    bucket: int
    targets: list[int]
    table: Tensor
    """A copy table; its tensors are the targets, in this order."""


class _Claim(NamedTuple):
    """Some of a rank's digests, and what they are of: rows of a block's table."""

    holder: int
    which: Tensor
    """Of its digests, by number."""
    rows: slice


class _Block(NamedTuple):
    """Some pieces of tensors of one bucket that are read at a time."""

    pieces: Pieces
    nbytes: int
    table: Tensor
    claims: list[_Claim]

    def differing(self, data: Tensor, digests: Mapping[int, Tensor]) -> list[tuple[int, int]]:
        """The tensors, by number, that are not as some rank claims, each with that rank."""
        known = ops.digest_bucket(data, self.table)
        found = []
        for holder, which, rows in self.claims:
            bad = self.table[rows, 1][known[rows] != digests[holder][which]]
            if len(bad):
                tensor, _, begin, _ = self.pieces.columns.T.contiguous()
                at = torch.searchsorted(begin, bad, right=True) - 1
                found += [(number, holder) for number in tensor[at].tolist()]
        return found


class Proof:
    """Of the loads of one plan. The same on all ranks but for the shards; what follows from the plan is found out once."""

    def __init__(self, plan: LoadPlan, verifiers: Sequence[int], sampled: bool, on_cpu: bool) -> None:
        """
        Args:
            verifiers: ranks that have the checkpoint, which take buckets in turn.
            on_cpu: whether all shards of this rank are.
        """
        self._on_cpu = on_cpu
        self._plan = plan
        self._verifiers = tuple(verifiers)
        self._every = SAMPLED if sampled else 1
        self._phase = int.from_bytes(plan.fingerprint[:4], "little") % self._every
        self._said: dict[int, bytes] = {}
        self._heard: tuple[dict[int, bytes], list[_Block]] = {}, []

    def fits(self, plan: LoadPlan, verifiers: Sequence[int], on_cpu: bool) -> bool:
        """Whether a load like this can be proven by what is known already."""
        return plan is self._plan and tuple(verifiers) == self._verifiers and on_cpu == self._on_cpu

    def claims(self, local: Sequence[Tensor]) -> dict[int, bytes]:
        """What this rank holds, for each verifier. ``local``: the targets' local tensors."""
        if not self._said:
            self._said = self._tables(local)
        parts: dict[int, list[Tensor]] = {rank: [] for rank in self._verifiers}
        for held in self._held:
            targets = [local[t] for t in held.targets]
            on_cpu = targets if self._on_cpu else [target.cpu() for target in targets]
            parts[self._verifier(held.bucket)].append(ops.digest_tensors(on_cpu, held.table))
        return {rank: _letter(self._said[rank], part) for rank, part in parts.items()}

    @cached_property
    def _held(self) -> list[_Held]:
        """By this rank."""
        found = []
        for number, bucket in enumerate(self._plan.buckets):
            table = bucket.copies[self._chosen(bucket, bucket.copies[:, 1])]
            if len(table):
                wanted, table[:, 0] = torch.unique(table[:, 0], return_inverse=True)
                found.append(_Held(number, [bucket.targets[t] for t in wanted.tolist()], table))
        return found

    def _tables(self, local: Sequence[Tensor]) -> dict[int, bytes]:
        """For each verifier, of what it gets digests."""
        parts: dict[int, list[Tensor]] = {rank: [] for rank in self._verifiers}
        for held in self._held:
            table = held.table.clone()
            if self._plan.casts:
                table[:, 0] = torch.tensor([dtypes.code(local[t].dtype) for t in held.targets])[table[:, 0]]
            else:
                table[:, 0] = table[:, 2]
            dims = (table.shape[1] - FIXED_COLUMNS) // 3
            table[:, FIXED_COLUMNS : FIXED_COLUMNS + dims] = 0  # where in the tensor, which says nothing there
            # Column by column, as a column is mostly one value over and over.
            parts[self._verifier(held.bucket)] += [torch.tensor([held.bucket, *table.shape]), table.T.reshape(-1)]
        return {rank: zlib.compress(_raw(torch.cat(part)), level=1) if part else b"" for rank, part in parts.items()}

    def check(
        self, rank: int, claims: Mapping[int, bytes], checkpoint: Checkpoint, manifest: Manifest
    ) -> Iterator[int]:
        """Compares the claims of all ranks that were sent to ``rank`` with the checkpoint. Yields bytes as they are done.

        Raises:
            LoadError: some differ; it names the tensors and the ranks that hold them.
        """
        tables, digests = {}, {}
        for holder, letter in claims.items():
            if letter:
                tables[holder], digests[holder] = _opened(letter)
        blocks = self._heard[1]
        if self._heard[0] != tables:
            blocks = list(self._blocks(tables))
            if sum(map(len, digests.values())) <= _KEPT_ROWS:
                self._heard = tables, blocks
        largest = max((block.nbytes for block in blocks), default=0)
        free = SimpleQueue[Tensor]()  # memory that has been touched: fresh pages cost as much as reading
        for _ in range(_THREADS):
            free.put(torch.empty(largest, dtype=torch.uint8))
        reading = nullcontext() if checkpoint.concurrent else Lock()

        def differing(block: _Block) -> list[tuple[int, int]]:
            scratch = free.get()
            try:
                with reading:
                    checkpoint.fill(scratch[: block.nbytes], block.pieces)
                return block.differing(scratch, digests)
            finally:
                free.put(scratch)

        wrong: dict[str, set[int]] = {}
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="epload-verify")
        try:
            for block, found in zip(blocks, pool.map(differing, blocks), strict=True):
                for tensor, holder in found:
                    wrong.setdefault(manifest.names[tensor], set()).add(holder)
                yield block.nbytes
        finally:
            pool.shutdown(cancel_futures=True)
        if wrong:
            said = [f"{name} on {_ranks(holders)}" for name, holders in wrong.items()]
            more = f" and {len(said) - _SHOWN} more tensors" if len(said) > _SHOWN else ""
            raise LoadError(
                f"after the load, shards differ from {manifest.source} as rank {rank} reads it: "
                f"{', '.join(said[:_SHOWN])}{more}; memory, the network or the storage of a machine changed bits, or something "
                "wrote to the model during the load"
            )

    def _blocks(self, tables: Mapping[int, bytes]) -> Iterator[_Block]:
        """What is claimed, bucket by bucket. ``tables``: what was said by each holder."""
        parsed = {holder: list(_parsed(data)) for holder, data in tables.items()}
        # A rank's rows are as wide as its own targets need.
        widest = max((table.shape[1] for said in parsed.values() for _, table in said), default=0)
        of_bucket: dict[int, list[tuple[int, Tensor, int]]] = {}
        for holder, said in parsed.items():
            first = 0
            for number, table in said:
                of_bucket.setdefault(number, []).append((holder, _widened(table, widest), first))
                first += len(table)
        for number in sorted(of_bucket):
            yield from self._blocks_of(self._plan.buckets[number], of_bucket[number])

    def _blocks_of(self, bucket: Bucket, claimed: list[tuple[int, Tensor, int]]) -> Iterator[_Block]:
        """What is claimed of one bucket, in its order. ``claimed``: holder, table and the number of the first digest."""
        pieces = self._plan.pieces(bucket)
        columns = pieces.columns[self._chosen(bucket, pieces.columns[:, 2])]
        begin, end = columns[:, 2], columns[:, 2] + columns[:, 3]
        cell = begin // (BLOCK_BYTES * self._every)  # about as much to read, however much lies between
        first = torch.cat([torch.zeros(1, dtype=torch.int64), (cell[1:] != cell[:-1]).nonzero().view(-1) + 1])
        base = begin[first]
        parts = []
        for holder, table, before in claimed:
            offset, order = table[:, 1].sort()
            table = table[order]
            table[:, 1] -= base[torch.searchsorted(base, offset, right=True) - 1]
            cuts = [*torch.searchsorted(offset, base).tolist(), len(table)]
            parts.append([(holder, table[a:b], before + order[a:b]) for a, b in pairwise(cuts)])
        columns = columns.clone()
        columns[:, 2] -= base.repeat_interleave(torch.diff(first, append=torch.tensor([len(columns)])))
        for (low, high), here in zip(pairwise([*first.tolist(), len(columns)]), zip(*parts, strict=True), strict=True):
            nbytes = int(end[high - 1] - begin[low])
            yield _Block(Pieces(columns[low:high]), nbytes, *_merged(here))

    def _verifier(self, number: int) -> int:
        return self._verifiers[number % len(self._verifiers)]

    def _chosen(self, bucket: Bucket, offsets: Tensor) -> Tensor:
        """Which of some offsets in a bucket lie in pieces that are proven."""
        if self._every == 1:
            return torch.arange(len(offsets))
        begins = self._plan.pieces(bucket).columns[:, 2].contiguous()
        slot = torch.searchsorted(begins, offsets.contiguous(), right=True) - 1 + bucket.slots.start
        return ((slot + self._phase) % self._every == 0).nonzero().view(-1)


def _merged(claimed: Iterable[tuple[int, Tensor, Tensor]]) -> tuple[Tensor, list[_Claim]]:
    """One table of all regions; ranks that hold the same ask for the same rows of it."""
    known: dict[bytes, slice] = {}
    tables: list[Tensor] = []
    claims = []
    length = 0
    for holder, table, which in claimed:
        raw = _raw(table)
        if raw not in known:
            known[raw] = slice(length, length + len(table))
            tables.append(table)
            length += len(table)
        claims.append(_Claim(holder, which, known[raw]))
    return torch.cat(tables), claims


def _widened(table: Tensor, columns: int) -> Tensor:
    """A copy table with room for more dims."""
    if table.shape[1] == columns:
        return table
    have, wanted = (table.shape[1] - FIXED_COLUMNS) // 3, (columns - FIXED_COLUMNS) // 3
    wide = table.new_zeros(len(table), columns)
    wide[:, :FIXED_COLUMNS] = table[:, :FIXED_COLUMNS]
    wide[:, FIXED_COLUMNS:].view(-1, 3, wanted)[:, :, :have] = table[:, FIXED_COLUMNS:].reshape(-1, 3, have)
    return wide


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
