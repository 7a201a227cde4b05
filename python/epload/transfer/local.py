"""This rank's tensors of a load, on CPU, on a device, or on both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.core.copy_table import CopyTable
from epload.core.regions import Regions
from epload.mapping.quantized_targets import QuantizedTarget, quantize_target
from epload.mapping.scales import dequantize
from epload.native import ops
from epload.planning.plan import LoadPlan
from epload.transfer.affinity import near
from epload.transfer.context import Sink
from epload.transfer.device import DeviceStaging


class Local(Sink):
    """The local tensors of a plan's targets, for one load.

    What goes to a device is on the staging's stream. Bytes of the host get there through the staging's pipe, and no more than
    what this rank keeps. Memory for a weight that is quantized is made when its first bucket comes, and freed when the weight is
    quantized, after its last one.
    """

    def __init__(self, plan: LoadPlan, tensors: list[Tensor], staging: DeviceStaging | None = None, keeps: bool = False) -> None:
        """
        Args:
            tensors: of the plan's targets but for what is quantized, which is made when it is needed.
            staging: of the device that tensors are on; None if all are on CPU.
            keeps: whether what is quantized stays as it has arrived until :meth:`rescale`, so that it can be verified.
        """
        self.tensors = tensors + [torch.empty(0)] * (len(plan.targets.names) - len(tensors))
        self._plan, self._staging, self._keeps = plan, staging, keeps
        owner = {number: target for target in plan.quantized for number, _ in target.boxes}
        self._quantized_in: list[list[QuantizedTarget]] = []
        """The weights to quantize that this rank takes parts of out of each bucket; empty if there are none at all."""
        for bucket in plan.buckets if owner else ():
            numbers = set(bucket.rows.target.tolist())
            of_weights = {owner[number].weight: owner[number] for number in numbers if number in owner}
            self._quantized_in.append(list(of_weights.values()))
        self._left = Counter(target.weight for targets in self._quantized_in for target in targets)
        """Buckets yet to come, by weight."""

    @property
    def quantizes(self) -> bool:
        """True if weights take memory in full from their first bucket to their last."""
        return bool(self._quantized_in)

    @contextmanager
    def entered(self) -> Iterator[None]:
        if self._staging is None:
            yield
            return
        with near(self._staging.device), self._staging.entered():
            yield

    def unpack(self, number: int, bucket: Tensor) -> None:
        for regions in self.regions(range(number, number + 1)):
            regions.unpack(bucket.cpu() if regions.targets[0].is_cpu else bucket)
        self._arrived(range(number, number + 1))

    def rescale(self) -> None:
        """Multiplies weights by the scales that came with them, and quantizes what has been kept as it had arrived."""
        assert not any(self._left.values()), "a load has ended before all weights have arrived"
        quantized = self._plan.quantized if self._keeps else ()
        staging = self._staging if self._plan.scalings or quantized else None
        with staging.entered() if staging is not None else nullcontext():
            for scaling in self._plan.scalings:
                dequantize(scaling, self.tensors[scaling.target], self.tensors[scaling.scale])
            for target in quantized:
                self._quantize(target)

    def read(self, numbers: range, checkpoint: Checkpoint) -> int | None:
        """Reads what this rank keeps of some buckets; returns the bytes read, None if the checkpoint gives whole buckets only.

        Raises:
            CheckpointError: a file is gone, cannot be read or ends too early.
        """
        total = 0
        for regions in self.regions(numbers):
            nbytes = checkpoint.read_regions(regions)
            if nbytes is None:
                return None
            total += nbytes
        self._arrived(numbers)
        return total

    def regions(self, numbers: range) -> list[Regions]:
        """Returns what this rank takes out of some buckets."""
        for target in self._quantized(numbers):
            for number, (_, size) in target.boxes:
                if tuple(self.tensors[number].shape) != size:
                    dtype, device = self._plan.targets.dtypes[number], self.tensors[target.weight].device
                    self.tensors[number] = torch.empty(size, dtype=dtype, device=device)
        targets, copies, origins = self._plan.taken(numbers)
        pipe = self._staging.pipe if self._staging is not None else None
        tensors = [self.tensors[target] for target in targets]
        return split_by_device(tensors, copies, origins, pipe.native if pipe is not None else None)

    def _quantized(self, numbers: Iterable[int]) -> list[QuantizedTarget]:
        """Returns the weights to quantize in some buckets, each once for every bucket."""
        return [target for number in numbers for target in self._quantized_in[number]] if self._quantized_in else []

    def _arrived(self, numbers: Iterable[int]) -> None:
        """Quantizes the weights that some buckets, which have arrived, complete."""
        for target in self._quantized(numbers):
            self._left[target.weight] -= 1
            if not self._left[target.weight] and not self._keeps:
                self._quantize(target)

    def _quantize(self, target: QuantizedTarget) -> None:
        quantize_target(target, self._plan.targets, self.tensors)
        for number, _ in target.boxes:
            self.tensors[number] = torch.empty(0)


def split_by_device(tensors: list[Tensor], copies: CopyTable, origins: Tensor, pipe: ops.Pipe | None) -> list[Regions]:
    """Returns the regions of tensors on CPU and those of tensors on a device, where there are any."""
    on_cpu = torch.tensor([tensor.is_cpu for tensor in tensors], dtype=torch.bool, device="cpu")
    regions = []
    for mask, its_pipe in ((on_cpu, None), (~on_cpu, pipe)):
        if mask.all() and tensors:
            return [Regions(tensors, copies, origins, its_pipe)]
        if mask.any():
            rows = mask[copies.target]
            part = copies.select(rows)
            targets = [tensors[i] for i in part.renumber_targets()]
            regions.append(Regions(targets, part, origins[rows], its_pipe))
    return regions
