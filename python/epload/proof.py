"""Proving after a load that the shards hold what the checkpoint says.

Each rank digests the regions that it holds, where they lie, and sends the digests with its copy table to the ranks that verify.
Those read the checkpoint once more, a bucket each in turn, and work out the same digests from it. Nothing that the load itself
had in its buffers is used, so that a bit that changed anywhere between the file and a shard is found.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from epload import dtypes, ops
from epload.checkpoint import Checkpoint
from epload.errors import LoadError
from epload.manifest import Manifest
from epload.plan import FIXED_COLUMNS, Bucket, LoadPlan

VERIFY = ("off", "buckets", "sample", "full")
SAMPLED = 16
"""With "sample", one in so many pieces of tensors is proven; which ones follows from the plan."""
_SHOWN = 10


class Proof:
    """Of one load. The same on all ranks but for the shards."""

    def __init__(self, plan: LoadPlan, verifiers: Sequence[int], sampled: bool) -> None:
        """``verifiers``: ranks that have the checkpoint, which take buckets in turn."""
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
            digests = ops.digest_tensors([target if target.is_cpu else target.cpu() for target in targets], table)
            table[:, 0] = torch.tensor([dtypes.code(target.dtype) for target in targets])[table[:, 0]]
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
        of_bucket: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        for holder, data in claims.items():
            for number, table, digests in _from_bytes(data):
                of_bucket.setdefault(number, {})[holder] = table, digests
        scratch = torch.empty(self._plan.largest if of_bucket else 0, dtype=torch.uint8)
        wrong: dict[str, set[int]] = {}
        for number in sorted(of_bucket):
            bucket = self._plan.buckets[number]
            buffer = scratch[: bucket.nbytes]
            pieces = self._plan.pieces(bucket)
            begins = torch.tensor([piece.bucket_offset for piece in pieces])
            checkpoint.fill(buffer, [pieces[i] for i in self._chosen(bucket, begins).tolist()])
            known: dict[bytes, Tensor] = {}  # ranks that hold the same regions ask the same
            for holder, (table, digests) in of_bucket[number].items():
                key = ctypes.string_at(table.data_ptr(), table.nbytes)
                if key not in known:
                    known[key] = ops.digest_bucket(buffer, table)
                bad = table[:, 1][known[key] != digests]
                for slot in (torch.searchsorted(begins, bad, right=True) - 1).tolist():
                    wrong.setdefault(manifest.names[pieces[slot].tensor], set()).add(holder)
            yield bucket.nbytes
        if wrong:
            said = [f"{name} on {_ranks(holders)}" for name, holders in wrong.items()]
            more = f" and {len(said) - _SHOWN} more tensors" if len(said) > _SHOWN else ""
            raise LoadError(
                f"after the load, shards differ from {manifest.source} as rank {rank} reads it: "
                f"{', '.join(said[:_SHOWN])}{more}; memory, the network or the storage of a machine changed bits, or something "
                "wrote to the model during the load"
            )

    def _verifier(self, number: int) -> int:
        return self._verifiers[number % len(self._verifiers)]

    def _chosen(self, bucket: Bucket, offsets: Tensor) -> Tensor:
        """Which of some offsets in a bucket lie in pieces that are proven."""
        slots = self._plan.slots.bucket_offset[bucket.slots.start : bucket.slots.stop]
        slot = torch.searchsorted(torch.tensor(slots), offsets.contiguous(), right=True) - 1 + bucket.slots.start
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
