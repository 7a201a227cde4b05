"""The local tensors that a load fills. On CPU, what follows from their layouts is bound to them natively and kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epload import dtensor, ops
from epload.checkpoint import Checkpoint
from epload.plan import LoadPlan, Taken
from epload.regions import Regions

Outcome = tuple[int, int, int, int]


class Local:
    """The local tensors of a plan's targets."""

    def __init__(self, plan: LoadPlan, tensors: list[Tensor], bound: Bound | None = None) -> None:
        """``bound``: these, if they are on CPU."""
        self.tensors = tensors
        self._plan = plan
        self._bound = bound

    def regions(self, number: int) -> Regions:
        """All that this rank takes out of a bucket."""
        bucket = self._plan.buckets[number]
        return Regions([self.tensors[t] for t in bucket.targets], bucket.copies, bucket.origins)

    def unpack(self, number: int, bucket: Tensor) -> None:
        """Takes it out of the bucket. On CPU."""
        assert self._bound is not None
        self._bound.unpack(number, bucket)

    def read(self, numbers: range, checkpoint: Checkpoint) -> int | None:
        """Reads it for some buckets, on CPU; returns the bytes read, None if the checkpoint cannot.

        Raises:
            CheckpointError: a file is gone, cannot be read or ends too early.
        """
        assert self._bound is not None
        regions = self._bound.regions(numbers)
        return checkpoint.read_regions(regions) if regions.targets else 0


class Bound:
    """Tensors on CPU, not kept alive, and what of a plan has been bound to them."""

    def __init__(self, plan: LoadPlan, tensors: list[Tensor]) -> None:
        """
        Raises:
            ValueError: the memory of a tensor cannot be used.
        """
        self._plan = plan
        self._identities = dtensor.identities(tensors)
        self._tensors = ops.bind_tensors(tensors)
        self._copies: dict[int, torch.ScriptObject] = {}
        self._regions: dict[range, BoundRegions] = {}
        self._refresh()

    @staticmethod
    def to(plan: LoadPlan, tensors: list[Tensor], known: Bound | None) -> Bound:
        """The one of the load before, if it fits. Raises as the constructor does."""
        # An identity is that of no other tensor as long as the native side refers to the one that had it.
        fits = known is not None and known._plan is plan and known._identities == dtensor.identities(tensors)
        return known if known is not None and fits and known._refresh() else Bound(plan, tensors)

    def _refresh(self) -> bool:
        """Whether what has been bound holds."""
        same, bad, why = ops.refresh(self._tensors)
        if bad >= 0:
            raise ValueError(f"{self._plan.targets.names[bad]} cannot be filled: {why}")
        return same

    def unpack(self, number: int, buffer: Tensor) -> None:
        """All that this rank takes out of a bucket."""
        copies = self._copies.get(number)
        if copies is None:
            bucket = self._plan.buckets[number]
            copies = ops.bind_copies(self._tensors, bucket.targets, bucket.copies, bucket.nbytes)
            self._copies[number] = copies
        ops.unpack_bound(buffer, copies)

    def regions(self, numbers: range) -> BoundRegions:
        """All that this rank takes out of some buckets."""
        regions = self._regions.get(numbers)
        if regions is None:
            regions = self._regions[numbers] = BoundRegions(self._tensors, self._plan.taken(numbers))
        return regions


class BoundRegions:
    """Regions of bound tensors, as they are read from files."""

    def __init__(self, tensors: torch.ScriptObject, taken: Taken) -> None:
        self.targets, self._copies, self.origins = taken
        self._tensors = tensors
        self._from: tuple[Tensor, Tensor, int] | None = None
        self._reads: torch.ScriptObject | None = None

    def read(self, descriptors: Sequence[int], files: Tensor, offsets: Tensor, threads: int) -> Outcome:
        """See ``ops.read_regions``. Kept are the reads of tensors that lie as they did the time before."""
        known = self._from
        if known is None or known[2] != len(descriptors) or not (_same(known[0], files) and _same(known[1], offsets)):
            self._reads = ops.bind_reads(
                self._tensors, self.targets, self._copies, files, offsets, self.origins, len(descriptors)
            )
            self._from = files, offsets, len(descriptors)
        assert self._reads is not None
        return ops.read_bound(descriptors, self._reads, threads)


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or torch.equal(a, b)
