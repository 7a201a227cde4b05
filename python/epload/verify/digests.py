"""Proves after a load that the shards hold what the checkpoint contains.

Each rank computes digests of the regions it holds, in place, and sends them with their copy table to the ranks that verify. These
read the checkpoint once more, taking buckets in turn, and compute the same digests from it. They use nothing that the load had in
its buffers, so that a bit that changed anywhere between the file and a shard is detected.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.core import dtypes
from epload.core.columns import column, from_raw, to_raw
from epload.core.copy_table import regions_on_cpu
from epload.errors import LoadError
from epload.native import ops
from epload.observe.render import list_first
from epload.planning.plan import LoadPlan


def check_verify(verify: object) -> None:
    """Raises TypeError unless the option is a bool."""
    if not isinstance(verify, bool):
        advice = "False not to" if verify == "off" else "True to"
        raise TypeError(f"expected verify to be a bool, got {verify!r}; pass verify={advice} prove what the tensors hold")


def digest_shards(plan: LoadPlan, verifiers: Sequence[int], tensors: Sequence[Tensor]) -> dict[int, bytes]:
    """Returns the digests of the regions that this rank holds, with their copy tables, by the rank that verifies them.

    Args:
        verifiers: ranks that can read the checkpoint; they take buckets in turn.
        tensors: this rank's, of the plan's targets.
    """
    rows: dict[int, list[Tensor]] = {rank: [] for rank in verifiers}
    for number, bucket in enumerate(plan.buckets):
        if len(bucket.copies):
            regions, copies = regions_on_cpu([tensors[t] for t in bucket.targets], bucket.copies)
            digests = ops.digest_tensors(regions, copies.rows)
            # The verifier needs the dtype of the shard instead of its number.
            copies.target[:] = column([dtypes.code(region.dtype) for region in regions])
            of_bucket = torch.full((len(copies), 1), number, device="cpu")
            rows[verifiers[number % len(verifiers)]].append(torch.cat([of_bucket, copies.rows, digests[:, None]], 1))
    return {rank: _encode(of_rank) for rank, of_rank in rows.items()}


def verify_digests(
    plan: LoadPlan, rank: int, messages: Mapping[int, bytes], checkpoint: Checkpoint, manifest: Manifest
) -> Iterator[int]:
    """Compares the digests of all ranks with the checkpoint, bucket by bucket. Yields the size of each bucket in bytes.

    Args:
        rank: this rank, for the error message.
        messages: what :func:`digest_shards` returned for this rank, on each rank.
        checkpoint: open on this rank.
        manifest: of the checkpoint.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        LoadError: digests differ; it names the tensors and the ranks that hold them.
    """
    by_bucket: dict[int, list[tuple[int, Tensor, Tensor]]] = defaultdict(list)
    for holder, message in messages.items():
        for number, table, digests in _decode(message):
            by_bucket[number].append((holder, table, digests))
    scratch = torch.empty(max((plan.buckets[i].nbytes for i in by_bucket), default=0), dtype=torch.uint8)
    wrong: dict[str, set[int]] = defaultdict(set)
    for number in sorted(by_bucket):
        bucket = plan.buckets[number]
        tensor, _, begin, _ = bucket.pieces.columns.T.contiguous()
        content = scratch[: bucket.nbytes]
        checkpoint.fill(content, bucket.pieces)
        expected: dict[bytes, Tensor] = {}  # ranks that hold the same regions have equal tables
        for holder, table, digests in by_bucket[number]:
            if (key := to_raw(table)) not in expected:
                expected[key] = ops.digest_bucket(content, table)
            piece = torch.searchsorted(begin, table[:, 1].contiguous(), right=True) - 1
            for index in tensor[piece[expected[key] != digests]].tolist():
                wrong[manifest.names[index]].add(holder)
        yield bucket.nbytes
    if wrong:
        shown = [
            f"{name} on rank{'s' * (len(holders) > 1)} {', '.join(map(str, sorted(holders)))}" for name, holders in wrong.items()
        ]
        raise LoadError(
            f"after the load, shards differ from {manifest.source} as rank {rank} reads it: {list_first(shown)}; the memory, "
            "the network or the storage of a machine corrupted bits, or something wrote to the model during the load"
        )


def _encode(rows: Sequence[Tensor]) -> bytes:
    """``rows``: of each bucket; each is the number of the bucket, a row of the copy table, and a digest."""
    if not rows:
        return b""
    # Column by column: most values in a column are equal, and are compressed.
    table = torch.cat(list(rows)).T
    return zlib.compress(to_raw(torch.cat([column([len(table)]), table.reshape(-1)])), level=1)


def _decode(message: bytes) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields number, table and digests of each bucket."""
    if not message:
        return
    words = from_raw(bytearray(zlib.decompress(message)))
    table = words[1:].view(int(words[0]), -1).T.contiguous()
    numbers, counts = torch.unique_consecutive(table[:, 0], return_counts=True)
    for number, rows in zip(numbers.tolist(), torch.split(table, counts.tolist()), strict=True):
        yield number, rows[:, 1:-1].contiguous(), rows[:, -1]
