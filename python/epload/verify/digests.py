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
from epload.errors import LoadError
from epload.native import ops
from epload.planning.buckets import Bucket
from epload.planning.plan import LoadPlan

_MAX_SHOWN = 10


def check_verify(verify: object) -> None:
    """Raises TypeError unless the option is a bool."""
    if not isinstance(verify, bool):
        advice = "False not to" if verify == "off" else "True to"
        raise TypeError(
            f"expected verify to be a bool, got {verify!r}; pass verify={advice} prove what the tensors hold"
        )


def digest_shards(plan: LoadPlan, verifiers: Sequence[int], tensors: Sequence[Tensor]) -> dict[int, bytes]:
    """Returns the digests of the regions that this rank holds, with their copy tables, by the rank that verifies them.

    Args:
        verifiers: ranks that can read the checkpoint; they take buckets in turn.
        tensors: this rank's, of the plan's targets.
    """
    tables: dict[int, list[Tensor]] = {rank: [] for rank in verifiers}
    digests: dict[int, list[Tensor]] = {rank: [] for rank in verifiers}
    for number, bucket in enumerate(plan.buckets):
        copies = bucket.copies.clone()
        if len(copies):
            verifier = verifiers[number % len(verifiers)]
            targets = [bucket.targets[t] for t in copies.renumber_targets()]
            shards = [tensors[t] if tensors[t].is_cpu else tensors[t].cpu() for t in targets]
            digests[verifier].append(ops.digest_tensors(shards, copies.rows))
            # The verifier needs the dtype of the shard instead of its number, and not the position in it.
            copies.target[:] = column([dtypes.code(tensors[t].dtype) for t in targets])[copies.target]
            copies.start[:] = 0
            # Column by column: most values in a column are equal, and are compressed.
            tables[verifier] += [column([number, *copies.rows.shape]), copies.rows.T.reshape(-1)]
    return {rank: _encode(tables[rank], digests[rank]) if tables[rank] else b"" for rank in verifiers}


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
        content = scratch[: bucket.nbytes]
        checkpoint.fill(content, bucket.pieces)
        expected: dict[bytes, Tensor] = {}  # ranks that hold the same regions have equal tables
        for holder, table, digests in by_bucket[number]:
            if (key := to_raw(table)) not in expected:
                expected[key] = ops.digest_bucket(content, table)
            origins = _origins(bucket, table)
            for tensor in origins[expected[key] != digests, 0].tolist():
                wrong[manifest.names[tensor]].add(holder)
        yield bucket.nbytes
    if wrong:
        shown = [
            f"{name} on rank{'s' * (len(holders) > 1)} {', '.join(map(str, sorted(holders)))}"
            for name, holders in wrong.items()
        ]
        more = f" and {len(shown) - _MAX_SHOWN} more tensors" if len(shown) > _MAX_SHOWN else ""
        raise LoadError(
            f"after the load, shards differ from {manifest.source} as rank {rank} reads it: "
            f"{', '.join(shown[:_MAX_SHOWN])}{more}; the memory, the network or the storage of a machine corrupted bits, or "
            "something wrote to the model during the load"
        )


def _origins(bucket: Bucket, table: Tensor) -> Tensor:
    """Returns the tensor of each row of a copy table and where in it it starts. See ``buckets.Bucket.origins``."""
    tensor, tensor_offset, begin, _ = bucket.pieces.columns.T.contiguous()
    offset = table[:, 1].contiguous()
    piece = torch.searchsorted(begin, offset, right=True) - 1
    return torch.stack([tensor[piece], tensor_offset[piece] + offset - begin[piece]], 1)


def _encode(tables: Sequence[Tensor], digests: Sequence[Tensor]) -> bytes:
    """``tables``: for each bucket its number and the shape of its table, and the table itself, column by column."""
    compressed = zlib.compress(to_raw(torch.cat(list(tables))), level=1)
    return len(compressed).to_bytes(8, "little") + compressed + to_raw(torch.cat(list(digests)))


def _decode(message: bytes) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields number, table and digests of each bucket."""
    begin = 8 + int.from_bytes(message[:8], "little")
    words = from_raw(bytearray(zlib.decompress(message[8:begin]) if message else b""))
    digests = from_raw(bytearray(message[begin:]))
    while len(words):
        number, rows, columns = words[:3].tolist()
        yield number, words[3 : 3 + rows * columns].view(columns, rows).T.contiguous(), digests[:rows]
        words, digests = words[3 + rows * columns :], digests[rows:]
