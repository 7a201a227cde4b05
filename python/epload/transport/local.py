"""The local tensors that a load fills."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.core.regions import Regions
from epload.native import ops
from epload.planning.plan import LoadPlan


class Local:
    """The local tensors of a plan's targets, for one load."""

    def __init__(self, plan: LoadPlan, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._plan = plan

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

    def digests(self, which: Sequence[int], table: Tensor) -> Tensor:
        """Returns the digests of regions of these tensors; see ``ops.digest_tensors``.

        Args:
            which: numbers of tensors.
            table: a copy table; column 0 counts in ``which``.
        """
        some = [self.tensors[i] for i in which]
        return ops.digest_tensors([tensor if tensor.is_cpu else tensor.cpu() for tensor in some], table)
