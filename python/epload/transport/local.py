"""The local tensors that a load fills. On CPU, what follows from their layouts is worked out natively once, and kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.core.regions import Regions
from epload.native import ops
from epload.planning.plan import LoadPlan, Taken


class Local:
    """The local tensors of a plan's targets, for one load."""

    bound: Bound | None = None
    """For the next load."""

    def __init__(self, plan: LoadPlan, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._plan = plan

    @staticmethod
    def on_cpu(plan: LoadPlan, tensors: list[Tensor], known: Bound | None) -> Local:
        """``tensors``: all on CPU. ``known``: of the load before."""
        gathered, foreign = ops.gather(tensors, known.layouts if known is not None else None)
        if foreign:  # only their own class knows where their data is
            return Local(plan, tensors)
        if known is None or known.plan is not plan or not ops.has_layouts(gathered, known.layouts):
            known = Bound(plan, ops.layouts(gathered))
        return _BoundLocal(plan, tensors, gathered, known)

    def regions(self, number: int) -> Regions:
        """All that this rank takes out of a bucket."""
        return self._regions(range(number, number + 1))

    def _regions(self, numbers: range) -> Regions:
        targets, copies, origins = self._plan.taken(numbers)
        return Regions([self.tensors[t] for t in targets], copies, origins)

    def unpack(self, number: int, bucket: Tensor) -> None:
        """Takes it out of the bucket, which is on the tensors' device."""
        self.regions(number).unpack(bucket)

    def read(self, numbers: range, checkpoint: Checkpoint) -> int | None:
        """Reads it for some buckets, on CPU; returns the bytes read, None if the checkpoint cannot.

        Raises:
            CheckpointError: a file is gone, cannot be read or ends too early.
        """
        regions = self._regions(numbers)
        return checkpoint.read_regions(regions) if regions.targets else 0

    def digests(self, number: int, which: Sequence[int], table: Tensor) -> Tensor:
        """Of regions that this rank takes out of a bucket; see ``ops.digest_tensors``.

        Args:
            number: of the bucket.
            which: numbers of tensors.
            table: a copy table; column 0 counts in ``which``. What follows from it is kept for the same object.
        """
        some = [self.tensors[i] for i in which]
        return ops.digest_tensors([tensor if tensor.is_cpu else tensor.cpu() for tensor in some], table)


class Bound:
    """What has been worked out of a plan for tensors on CPU of some layouts. Holds no tensor."""

    def __init__(self, plan: LoadPlan, layouts: ops.Layouts) -> None:
        """``layouts``: see ``ops.layouts``."""
        self.plan = plan
        self.layouts = layouts
        self.copies: dict[int, ops.BoundCopies] = {}
        """Of each bucket."""
        self.reads: dict[range, _BoundReads] = {}
        """Of some buckets."""
        self.digests: dict[int, tuple[Tensor, ops.BoundDigests]] = {}
        """Of each bucket, with the copy table that they follow from."""


class _BoundLocal(Local):
    """On CPU, and handed over once: nothing is handed over with every bucket."""

    bound: Bound

    def __init__(self, plan: LoadPlan, tensors: list[Tensor], gathered: ops.Gathered, bound: Bound) -> None:
        super().__init__(plan, tensors)
        self._gathered = gathered
        self.bound = bound

    def unpack(self, number: int, bucket: Tensor) -> None:
        copies = self.bound.copies.get(number)
        if copies is None:
            planned = self._plan.buckets[number]
            copies = ops.bind_copies(self._gathered, planned.targets, planned.copies.rows, planned.nbytes)
            self.bound.copies[number] = copies
        ops.unpack_bound(bucket, self._gathered, copies)

    def read(self, numbers: range, checkpoint: Checkpoint) -> int | None:
        reads = self.bound.reads.get(numbers)
        if reads is None:
            reads = self.bound.reads[numbers] = _BoundReads(self._plan.taken(numbers))
        return checkpoint.read_regions(_Readable(self._gathered, reads)) if reads.taken.targets else 0

    def digests(self, number: int, which: Sequence[int], table: Tensor) -> Tensor:
        known = self.bound.digests.get(number)
        if known is None or known[0] is not table:
            known = self.bound.digests[number] = table, ops.bind_digests(self._gathered, which, table)
        return ops.digest_bound(self._gathered, known[1])


class _BoundReads:
    """Regions as they are read from the files of a checkpoint, and from those of the next if its tensors lie as there."""

    def __init__(self, taken: Taken) -> None:
        self.taken = taken
        self._places: tuple[Tensor, Tensor, int] | None = None
        self._reads: ops.BoundReads | None = None

    def of(self, gathered: ops.Gathered, files: Tensor, offsets: Tensor, file_count: int) -> ops.BoundReads:
        known = self._places
        if known is None or not (torch.equal(known[0], files) and torch.equal(known[1], offsets)):
            self._reads = None
        if self._reads is None or known is None or known[2] != file_count:
            targets, copies, origins = self.taken
            self._reads = ops.bind_reads(gathered, targets, copies.rows, files, offsets, origins, file_count)
            self._places = files, offsets, file_count
        return self._reads


class _Readable:
    """See ``byte_store.Readable``."""

    def __init__(self, gathered: ops.Gathered, reads: _BoundReads) -> None:
        self.origins = reads.taken.origins
        self._gathered = gathered
        self._reads = reads

    def read(
        self, descriptors: Sequence[int], files: Tensor, offsets: Tensor, threads: int
    ) -> tuple[int, int, int, int]:
        reads = self._reads.of(self._gathered, files, offsets, len(descriptors))
        return ops.read_bound(descriptors, self._gathered, reads, threads)
