"""Compares what a sender sends with the version before, its base, which becomes what receivers make of theirs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from epload.core import dtypes
from epload.core.columns import column
from epload.native import ops
from epload.planning.buckets import HEADER_BYTES
from epload.planning.changes import ChangedBucket, ChangesPlan
from epload.planning.holdings import Holdings
from epload.planning.streams import ExchangePlan
from epload.transfer.shards import Shards

T = TypeVar("T")
DENSE = 0.5
"""The share of a version's bytes above which encoded changes are not sent, with ``delta="auto"``."""
_HOPELESS = 0.9
"""The share of encoded changes in an eighth of the bytes after which no more are compared."""
MAX_WORKERS = 4
"""Threads that compare buckets, each of which may encode a whole one."""
TOO_MANY = "too many"
"""View of a sender that has too many changes."""


@dataclass(eq=False)
class Comparison:
    """A sender's buckets, compared with those of its base. Entry i of each list is about bucket i of the plan."""

    plan: ExchangePlan
    base: Shards
    changed: list[ChangedBucket]
    encoded: list[Tensor]
    """Encoded changes, uint8; empty where there are none."""

    def is_in_place(self, number: int) -> bool:
        """Returns True if a bucket's regions are compared, and change, where they lie in the base."""
        return self.plan.buckets[number].is_dense and self.base.are_plain(number)

    def apply(self) -> None:
        """Applies the changes to the base, except :meth:`left_out`."""

        def apply_bucket(number: int) -> None:
            if self.changed[number].elements and self.is_in_place(number):
                bucket, tensors = self.plan.buckets[number], self.base.counted(number)
                ops.apply_regions(self.encoded[number], tensors, bucket.copies.rows, HEADER_BYTES, bucket.nbytes)

        for _ in _in_threads(apply_bucket, len(self.encoded), _workers()):
            pass

    def left_out(self, holdings: Holdings) -> list[int]:
        """Returns the local tensors of which this rank does not send all that it has, or not in their own dtypes.

        Args:
            holdings: this rank's.
        """
        tensors = self.base.tensors
        sent = torch.zeros(len(tensors), dtype=torch.int64, device="cpu")
        for number, bucket in enumerate(self.plan.buckets):
            if self.is_in_place(number):
                sent.index_add_(0, bucket.rows.target, bucket.rows.nbytes())
        held = holdings.elements_of_targets(len(tensors)) * column([tensor.itemsize for tensor in tensors])
        return [int(number) for number in (sent != held).nonzero()]


def compare(plan: ExchangePlan, tensors: Shards, base: Shards, verify: bool, limit: float) -> Comparison | None:
    """Compares the local tensors of a sender with a copy of what they were.

    Args:
        plan: of the sender's buckets.
        base: the copy, in host memory.
        verify: whether receivers check the buckets that they make of the base.
        limit: bytes of encoded changes.

    Returns:
        None if the changes have more than ``limit`` bytes.
    """
    full, scratch = threading.Event(), _Scratch(plan)
    comparison, total, compared = Comparison(plan, base, [], []), 0, 0

    def compare_bucket(number: int) -> tuple[ChangedBucket, Tensor] | None:
        return None if full.is_set() else _compare_bucket(comparison, number, tensors, verify, scratch)

    for outcome in _in_threads(compare_bucket, len(plan.buckets), _workers()):
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


class _Scratch(threading.local):
    """Memory of each thread that compares, used again for each bucket."""

    def __init__(self, plan: ExchangePlan) -> None:
        regions = max((len(bucket.rows) for bucket in plan.buckets), default=0)
        self.encoded = _allocate(ops.encoded_limit(plan.largest, regions))
        self.old, self.new = _allocate(plan.largest), _allocate(plan.largest)


def _allocate(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _workers() -> int:
    return min(torch.get_num_threads(), MAX_WORKERS)


def _in_threads(call: Callable[[int], T], count: int, workers: int) -> Iterator[T]:
    """Yields what a function returns for each number below ``count``."""
    if workers == 1:
        yield from map(call, range(count))
    else:
        with ThreadPoolExecutor(workers, "epload-compare") as pool:
            yield from pool.map(call, range(count))


def _compare_bucket(
    comparison: Comparison, number: int, tensors: Shards, verify: bool, scratch: _Scratch
) -> tuple[ChangedBucket, Tensor]:
    """Returns what has changed in a bucket, and its encoded changes."""
    base, in_place, packed = comparison.base, comparison.is_in_place(number), None
    bucket, out = comparison.plan.buckets[number], scratch.encoded
    if verify or not in_place or not tensors.are_plain(number):
        packed = scratch.new[: bucket.nbytes]
        tensors.pack(number, packed)
    if in_place:
        new = tensors.counted(number) if packed is None else packed
        old = base.counted(number)
        nbytes, elements = ops.encode_regions(old, new, bucket.copies.rows, HEADER_BYTES, bucket.nbytes, out)
    else:
        assert packed is not None
        old_packed = scratch.old[: bucket.nbytes]
        base.pack(number, old_packed)
        unit = min(8, int(torch.tensor(dtypes.ITEMSIZES)[bucket.rows.dtype].min()))
        nbytes, elements = ops.encode_changes(old_packed[HEADER_BYTES:], packed[HEADER_BYTES:], unit, out)
    checksum = ops.checksum(packed[HEADER_BYTES:]) if verify and packed is not None else 0
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
