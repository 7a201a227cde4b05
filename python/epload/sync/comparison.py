"""Compares what a sender sends with the version before, its base, which becomes what receivers make of theirs."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from epload.core import dtypes, threads
from epload.core.columns import column
from epload.native import ops
from epload.planning.buckets import HEADER_BYTES
from epload.planning.changes import ChangedBucket
from epload.planning.holdings import Holdings
from epload.planning.streams import ExchangePlan
from epload.transfer.shards import Shards

DENSE = 0.5
"""The share of a version's bytes above which encoded changes are not sent, with ``delta="auto"``."""
_HOPELESS = 0.9
"""The share of encoded changes in an eighth of the bytes after which no more are compared."""
MAX_WORKERS = 4
"""Threads that compare buckets, each of which may encode a whole one."""


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
        changed = [number for number, bucket in enumerate(self.changed) if bucket.elements]
        _in_threads([partial(self._apply, number) for number in changed if self.is_in_place(number)])

    def _apply(self, number: int) -> None:
        bucket, tensors = self.plan.buckets[number], self.base.counted(number)
        ops.apply_regions(self.encoded[number], tensors, bucket.copies.rows, HEADER_BYTES, bucket.nbytes)

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
    comparison, outcomes = Comparison(plan, base, [], []), dict[int, tuple[ChangedBucket, Tensor]]()
    too_many, lock, scratch = False, threading.Lock(), _Scratch(plan)
    total = compared = 0

    def compare_bucket(number: int) -> None:
        nonlocal too_many, total, compared
        if too_many:
            return
        outcome = _compare_bucket(comparison, number, tensors, verify, scratch)
        with lock:
            outcomes[number] = outcome
            while (following := len(comparison.changed)) in outcomes:  # so that the data alone decides
                changed, encoded = outcomes.pop(following)
                comparison.changed.append(changed)
                comparison.encoded.append(encoded)
                total += encoded.nbytes
                compared += plan.buckets[following].nbytes
                is_hopeless = compared * _HOPELESS < total < limit < plan.nbytes and compared > plan.nbytes / 8
                too_many = too_many or total > limit or is_hopeless

    _in_threads([partial(compare_bucket, number) for number in range(len(plan.buckets))])
    return None if too_many else comparison


class _Scratch(threading.local):
    """Memory of each thread that compares, used again for each bucket."""

    def __init__(self, plan: ExchangePlan) -> None:
        regions = max((len(bucket.rows) for bucket in plan.buckets), default=0)
        self.encoded = _allocate(ops.encoded_limit(plan.largest, regions))
        self.old, self.new = _allocate(plan.largest), _allocate(plan.largest)


def _allocate(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _in_threads(steps: list[partial[None]]) -> None:
    threads.run_all("epload-compare", steps, min(torch.get_num_threads(), MAX_WORKERS))


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
