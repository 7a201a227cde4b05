"""The local tensors that a load fills. On CPU, what depends on their layouts is prepared natively once, and kept."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.core.regions import BoundRegions, PreparedRegions, Regions
from epload.native import ops
from epload.planning.plan import LoadPlan


class Local:
    """The local tensors of a plan's targets, for one load."""

    prepared: PreparedPlan | None = None
    """For the next load."""

    def __init__(self, plan: LoadPlan, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._plan = plan

    @staticmethod
    def on_cpu(plan: LoadPlan, tensors: list[Tensor], known: PreparedPlan | None) -> Local:
        """``tensors``: all on CPU. ``known``: of the load before."""
        tensor_list, foreign = ops.tensor_list(tensors, known.layouts if known is not None else None)
        if foreign:  # only their own class knows where their data is
            return Local(plan, tensors)
        if known is None or known.plan is not plan or not ops.has_layouts(tensor_list, known.layouts):
            known = PreparedPlan(plan, ops.layouts(tensor_list))
        return _PreparedLocal(plan, tensors, tensor_list, known)

    def regions(self, number: int) -> Regions:
        """All that this rank takes out of a bucket."""
        return self._regions(range(number, number + 1))

    def _regions(self, numbers: range) -> Regions:
        targets, copies, origins = self._plan.taken(numbers)
        return Regions([self.tensors[t] for t in targets], copies, origins)

    def unpack(self, number: int, bucket: Tensor) -> None:
        """Takes it out of the bucket, which is on the tensors' device."""
        if self._plan.buckets[number].targets:
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


class PreparedPlan:
    """What is prepared of a plan for CPU tensors of some layouts. Keeps no tensor alive."""

    def __init__(self, plan: LoadPlan, layouts: ops.Layouts) -> None:
        """``layouts``: see ``ops.layouts``."""
        self.plan = plan
        self.layouts = layouts
        self.copies: dict[int, ops.PreparedCopies] = {}
        """Of each bucket."""
        self.reads: dict[range, PreparedRegions] = {}
        """Of some buckets."""
        self.digests: dict[int, tuple[Tensor, ops.PreparedDigests]] = {}
        """Of each bucket, with the copy table that they follow from."""


class _PreparedLocal(Local):
    """On CPU: the tensors are passed to the native library once per load, not with every bucket."""

    prepared: PreparedPlan

    def __init__(
        self, plan: LoadPlan, tensors: list[Tensor], tensor_list: ops.TensorList, prepared: PreparedPlan
    ) -> None:
        super().__init__(plan, tensors)
        self._tensor_list = tensor_list
        self.prepared = prepared

    def unpack(self, number: int, bucket: Tensor) -> None:
        planned = self._plan.buckets[number]
        if not planned.targets:
            return
        copies = self.prepared.copies.get(number)
        if copies is None:
            copies = ops.prepare_copies(self._tensor_list, planned.targets, planned.copies.rows, planned.nbytes)
            self.prepared.copies[number] = copies
        ops.unpack_prepared(bucket, self._tensor_list, copies)

    def read(self, numbers: range, checkpoint: Checkpoint) -> int | None:
        reads = self.prepared.reads.get(numbers)
        if reads is None:
            reads = self.prepared.reads[numbers] = PreparedRegions(*self._plan.taken(numbers))
        return checkpoint.read_regions(BoundRegions(reads, self._tensor_list)) if reads.targets else 0

    def digests(self, number: int, which: Sequence[int], table: Tensor) -> Tensor:
        known = self.prepared.digests.get(number)
        if known is None or known[0] is not table:
            known = self.prepared.digests[number] = table, ops.prepare_digests(self._tensor_list, which, table)
        return ops.digest_prepared(self._tensor_list, known[1])
