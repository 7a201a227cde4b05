"""Changes between two versions: a sender compares its tensors with the version before, and receivers apply what has changed.

Nothing is applied before the version has been committed, so that a version that fails leaves the one before as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epload.core import dtypes
from epload.errors import LoadError, WaitTimeout, message_of
from epload.native import ops
from epload.planning.buckets import HEADER_BYTES
from epload.planning.changes import ChangedBucket, ChangesPlan
from epload.planning.streams import ExchangePlan
from epload.ranks.control import Control
from epload.sync.node_version import NodeVersion
from epload.transfer.shards import Shards
from epload.transfer.shared_memory import NodeMemory
from epload.transfer.sinks import Sink

DENSE = 0.5
"""The share of a version's bytes above which encoded changes are not sent, with ``delta="auto"``."""
_HOPELESS = 0.9
"""The share of encoded changes in an eighth of the bytes after which no more are compared."""
MAX_WORKERS = 4
"""Threads that compare buckets, each of which may encode a whole one."""
TOO_MANY = "too many"
"""View of a sender that has too many changes."""
_POLL_SECONDS = 0.5


class Comparison(NamedTuple):
    """A sender's buckets, compared with those of the version before. Entry i is about bucket i of its plan."""

    changed: list[ChangedBucket]
    encoded: list[Tensor]
    """Encoded changes, uint8; empty where there are none."""


def compare(plan: ExchangePlan, tensors: Shards, base: Shards, verify: bool, limit: float) -> Comparison | None:
    """Compares the local tensors of a sender with a copy of what they were.

    Args:
        plan: of the sender's buckets.
        verify: whether receivers check the buckets that they make of the base.
        limit: bytes of encoded changes.

    Returns:
        None if the changes have more than ``limit`` bytes.
    """
    full, scratch = threading.Event(), threading.local()
    workers = (
        min(torch.get_num_threads(), MAX_WORKERS) if tensors.pipe is None else 1
    )  # a pipe is one thread's at a time
    room = ops.encoded_limit(plan.largest, max((len(bucket.rows) for bucket in plan.buckets), default=0))
    comparison, total, compared = Comparison([], []), 0, 0
    with ThreadPoolExecutor(workers, "epload-compare") if workers > 1 else nullcontext() as pool:

        def compare_bucket(number: int) -> tuple[ChangedBucket, Tensor] | None:
            if full.is_set():
                return None
            if not hasattr(scratch, "out"):
                scratch.out = torch.empty(room, dtype=torch.uint8, device="cpu")
            return _compare_bucket(plan, number, tensors, base, verify, scratch.out)

        for outcome in (pool.map if pool is not None else map)(compare_bucket, range(len(plan.buckets))):
            if outcome is None:
                break
            comparison.changed.append(outcome[0])
            comparison.encoded.append(outcome[1])
            total += outcome[1].nbytes
            compared += plan.buckets[len(comparison.changed) - 1].nbytes
            too_many = compared * _HOPELESS < total < limit < plan.nbytes and compared > plan.nbytes / 8
            if total > limit or too_many:
                full.set()
    return None if full.is_set() else comparison


def _compare_bucket(
    plan: ExchangePlan, number: int, tensors: Shards, base: Shards, verify: bool, out: Tensor
) -> tuple[ChangedBucket, Tensor]:
    """Returns what has changed in a bucket, and its encoded changes. ``out``: room for them."""
    bucket, checksum = plan.buckets[number], 0
    in_place = bucket.is_dense and tensors.are_plain(number)  # so is the copy
    packed = []
    for shards in (tensors, base)[: 2 if not in_place else int(verify)]:
        packed.append(torch.empty(bucket.nbytes, dtype=torch.uint8, device="cpu"))
        shards.pack(number, packed[-1])
    if in_place:
        old, new = base.counted(number), tensors.counted(number)
        nbytes, elements = ops.encode_regions(old, new, bucket.copies.rows, HEADER_BYTES, bucket.nbytes, out)
    else:
        unit = min(8, int(torch.tensor(dtypes.ITEMSIZES)[bucket.rows.dtype].min()))
        nbytes, elements = ops.encode_changes(packed[1][HEADER_BYTES:], packed[0][HEADER_BYTES:], unit, out)
    if verify:
        checksum = ops.checksum(packed[0][HEADER_BYTES:])
    encoded = out[: nbytes if elements else 0].clone()
    return ChangedBucket(bucket.stream.number, bucket.wave, elements, encoded.nbytes, checksum), encoded


def merge_comparisons(views: Mapping[int, Any]) -> Any:
    """Returns the changed buckets of each sender; None if one has too many changes. Views of receivers are None."""
    of_senders = {rank: view for rank, view in views.items() if view is not None}
    return None if TOO_MANY in of_senders.values() else of_senders


class EncodedChanges:
    """Fills the messages of a sender's changes."""

    def __init__(self, changes: ChangesPlan, comparison: Comparison) -> None:
        self._changes = changes
        self._comparison = comparison

    def fill(self, number: int, buffer: Tensor) -> None:
        """See :data:`~epload.transfer.context.Fill`."""
        for part in self._changes.parts[number]:
            buffer[part.begin : part.end] = self._comparison.encoded[part.bucket]


class ReceivedChanges(Sink):
    """The changes that this rank applies to the version in its node's memory: those of every n-th bucket of n ranks."""

    def __init__(
        self, changes: ChangesPlan, version: NodeVersion, generation: int, ranks: Sequence[int], rank: int, verify: bool
    ) -> None:
        """
        Args:
            version: the one before, which becomes the one that is received.
            ranks: of the node, in this generation.
            rank: this process's.
            verify: whether buckets are compared with what the sender has packed.
        """
        self._plan = changes.version
        self._changes = changes
        self._version = version
        self._generation = generation
        self._ranks = ranks
        self._position = ranks.index(rank)
        self._rank = rank
        self._verify = verify
        self._encoded: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that wait to be applied."""
        return sum(encoded.nbytes for encoded in self._encoded.values())

    def _is_own(self, bucket: int) -> bool:
        return bucket % len(self._ranks) == self._position

    def unpack(self, number: int, bucket: Tensor) -> None:
        for part in self._changes.parts[number]:
            if self._is_own(part.bucket):
                encoded = bucket[part.begin : part.end].clone()
                ops.check_changes(encoded, self._plan.buckets[part.bucket].nbytes - HEADER_BYTES)
                self._check(part.bucket, encoded, part.checksum)
                self._encoded[part.bucket] = encoded

    def check_unchanged(self) -> None:
        """Raises LoadError if a bucket that does not change is not what the sender has packed."""
        for number, checksum in self._changes.unchanged.items():
            if self._is_own(number):
                self._check(number, None, checksum)

    def _check(self, number: int, encoded: Tensor | None, checksum: int) -> None:
        if not self._verify:
            return
        payload = self._version.bucket(self._plan.buckets[number], self._generation)[HEADER_BYTES:]
        if encoded is not None:
            payload = payload.clone()
            ops.apply_changes(encoded, payload)
        if ops.checksum(payload) != checksum:
            self._version.key = ""
            raise LoadError(
                f"rank {self._rank} has applied the changes of {self._plan.describe([number])} to the version before, and the "
                "result is not what the sender has: the memory of a machine changes bits; the next version comes in full"
            )

    def apply(self, control: Control, counted: NodeMemory) -> None:
        """Applies the changes, once the version is committed. Returns when all ranks of the node have.

        Args:
            counted: memory of the node through which the changes came.

        Raises:
            LoadError: a rank of the node has ended, or takes longer than the timeout.
        """
        try:
            for number, encoded in self._encoded.items():
                self._version.apply(self._plan.buckets[number], self._generation, encoded)
        except BaseException:
            counted.fail()  # ends the wait of the others
            raise
        self._encoded.clear()
        counted.waves_before += 1
        counted.post("unpack", counted.waves_before)
        until = monotonic() + control.timeout.total_seconds()
        while True:
            try:
                counted.wait("unpack", counted.waves_before, self._ranks, timedelta(seconds=_POLL_SECONDS))
                return
            except WaitTimeout as error:
                if monotonic() > until or any(rank in control.processes.ended for rank in self._ranks):
                    raise LoadError(
                        f"rank {self._rank} has applied its part of the changes, but a rank of its node has not: "
                        f"{message_of(error)}; the next version comes in full"
                    ) from error
