"""Proving after a load that the shards hold what the checkpoint says.

Each rank digests the regions that it holds, where they lie, and sends the digests with its copy table to the ranks that verify.
Those read the checkpoint once more, a bucket each in turn, and work out the same digests from it. Nothing that the load itself
had in its buffers is used, so that a bit that changed anywhere between the file and a shard is found.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
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
_SHOWN = 10


class _Claim(NamedTuple):
    """What one rank says of the regions that it holds of some bytes."""

    holder: int
    table: Tensor
    digests: Tensor


class _Block(NamedTuple):
    """Some pieces of tensors of one bucket that are read at a time."""

    pieces: Pieces
    nbytes: int
    claims: list[_Claim]

    def differing(self, data: Tensor) -> list[tuple[int, int]]:
        """The tensors, by number, that are not as some rank claims, each with that rank."""
        known: dict[bytes, Tensor] = {}  # ranks that hold the same regions ask the same
        found = []
        for holder, table, digests in self.claims:
            key = ctypes.string_at(table.data_ptr(), table.nbytes)
            if key not in known:
                known[key] = ops.digest_bucket(data, table)
            bad = table[:, 1][known[key] != digests]
            if len(bad):
                tensor, _, begin, _ = self.pieces.columns.T.contiguous()
                at = torch.searchsorted(begin, bad, right=True) - 1
                found += [(number, holder) for number in tensor[at].tolist()]
        return found


class Proof:
    """Of one load. The same on all ranks but for the shards."""

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

    def claims(self, local: Sequence[Tensor]) -> dict[int, bytes]:
        """What this rank holds, for each verifier. ``local``: the targets' local tensors."""
        parts: dict[int, list[Tensor]] = {rank: [] for rank in self._verifiers}
        for number, bucket in enumerate(self._plan.buckets):
            table = bucket.copies[self._chosen(bucket, bucket.copies[:, 1])]
            if not len(table):
                continue
            wanted, table[:, 0] = torch.unique(table[:, 0], return_inverse=True)
            targets = [local[bucket.targets[t]] for t in wanted.tolist()]
            on_cpu = targets if self._on_cpu else [target.cpu() for target in targets]
            digests = ops.digest_tensors(on_cpu, table)
            if self._plan.casts:
                table[:, 0] = torch.tensor([dtypes.code(target.dtype) for target in targets])[table[:, 0]]
            else:
                table[:, 0] = table[:, 2]
            dims = (table.shape[1] - FIXED_COLUMNS) // 3
            table[:, FIXED_COLUMNS : FIXED_COLUMNS + dims] = 0  # where in the tensor, which says nothing there
            head = torch.tensor([number, *table.shape])
            # Column by column, as a column is mostly one value over and over.
            parts[self._verifier(number)] += [head, table.T.reshape(-1), digests]
        return {rank: _to_bytes(torch.cat(part)) if part else b"" for rank, part in parts.items()}

    def check(
        self, rank: int, claims: Mapping[int, bytes], checkpoint: Checkpoint, manifest: Manifest
    ) -> Iterator[int]:
        """Compares the claims of all ranks that were sent to ``rank`` with the checkpoint. Yields bytes as they are done.

        Raises:
            LoadError: some differ; it names the tensors and the ranks that hold them.
        """
        of_bucket: dict[int, list[_Claim]] = {}
        for holder, data in claims.items():
            for number, table, digests in _from_bytes(data):
                of_bucket.setdefault(number, []).append(_Claim(holder, table, digests))
        blocks = [block for number in sorted(of_bucket) for block in self._blocks(number, of_bucket[number])]
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
                return block.differing(scratch)
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

    def _blocks(self, number: int, claims: list[_Claim]) -> Iterator[_Block]:
        """What is claimed of one bucket, in the order of the bucket."""
        bucket = self._plan.buckets[number]
        pieces = self._plan.pieces(bucket)
        columns = pieces.columns[self._chosen(bucket, pieces.columns[:, 2])]
        begin, end = columns[:, 2], columns[:, 2] + columns[:, 3]
        cell = begin // (BLOCK_BYTES * self._every)  # about as much to read, however much lies between
        first = torch.cat([torch.zeros(1, dtype=torch.int64), (cell[1:] != cell[:-1]).nonzero().view(-1) + 1])
        base = begin[first]
        parts = []
        for holder, table, digests in claims:
            offset, order = table[:, 1].sort()
            table, digests = table[order], digests[order]
            table[:, 1] -= base[torch.searchsorted(base, offset, right=True) - 1]
            cuts = [*torch.searchsorted(offset, base).tolist(), len(table)]
            parts.append([_Claim(holder, table[a:b], digests[a:b]) for a, b in pairwise(cuts)])
        columns = columns.clone()
        columns[:, 2] -= base.repeat_interleave(torch.diff(first, append=torch.tensor([len(columns)])))
        for (low, high), here in zip(pairwise([*first.tolist(), len(columns)]), zip(*parts, strict=True), strict=True):
            nbytes = int(end[high - 1] - begin[low])
            yield _Block(Pieces(columns[low:high]), nbytes, list(here))

    def _verifier(self, number: int) -> int:
        return self._verifiers[number % len(self._verifiers)]

    def _chosen(self, bucket: Bucket, offsets: Tensor) -> Tensor:
        """Which of some offsets in a bucket lie in pieces that are proven."""
        if self._every == 1:
            return torch.arange(len(offsets))
        begins = self._plan.pieces(bucket).columns[:, 2].contiguous()
        slot = torch.searchsorted(begins, offsets.contiguous(), right=True) - 1 + bucket.slots.start
        return ((slot + self._phase) % self._every == 0).nonzero().view(-1)


def _to_bytes(words: Tensor) -> bytes:
    return zlib.compress(ctypes.string_at(words.data_ptr(), words.nbytes), level=1)


def _from_bytes(data: bytes) -> list[tuple[int, Tensor, Tensor]]:
    """Number of a bucket, copy table and digests."""
    if not data:
        return []
    words = torch.frombuffer(bytearray(zlib.decompress(data)), dtype=torch.int64)
    found, at = [], 0
    while at < len(words):
        number, rows, columns = words[at : at + 3].tolist()
        at += 3
        table = words[at : at + rows * columns].view(columns, rows).T.contiguous()
        at += rows * columns
        found.append((number, table, words[at : at + rows]))
        at += rows
    return found


def _ranks(ranks: set[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
