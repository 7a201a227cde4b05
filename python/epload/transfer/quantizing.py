"""Quantizes weights while a load goes on: each as soon as all of it has arrived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from epload.mapping.quantized_targets import QuantizedTarget, quantize_target
from epload.planning.plan import LoadPlan


class Quantizing:
    """Memory for what is quantized: it is made when the first bucket of a weight comes, and freed after the last one. Not
    thread-safe; what is queued on a device is on the current stream."""

    def __init__(self, plan: LoadPlan, tensors: list[Tensor], keeps: bool) -> None:
        """
        Args:
            tensors: the local tensors of all targets but those that this makes, which are appended.
            keeps: whether weights wait for :meth:`finish`, so that what has arrived can be verified.
        """
        self._plan, self._tensors, self._keeps = plan, tensors, keeps
        self._tensors += [torch.empty(0)] * (len(plan.targets.names) - len(tensors))
        owner = {number: target for target in plan.quantized for number, _ in target.boxes}
        self._in_bucket: list[list[QuantizedTarget]] = []
        """The weights that this rank takes parts of out of each bucket."""
        for bucket in plan.buckets if owner else ():
            numbers = set(bucket.rows.target.tolist())
            of_weights = {owner[number].weight: owner[number] for number in numbers if number in owner}
            self._in_bucket.append(list(of_weights.values()))
        self._left = Counter(target.weight for targets in self._in_bucket for target in targets)
        """Buckets yet to come, by weight."""

    def begin(self, numbers: Iterable[int]) -> None:
        """Makes the memory for some buckets."""
        for target in self._targets(numbers):
            for number, (_, size) in target.boxes:
                if tuple(self._tensors[number].shape) != size:
                    dtype, device = self._plan.targets.dtypes[number], self._tensors[target.weight].device
                    self._tensors[number] = torch.empty(size, dtype=dtype, device=device)

    def end(self, numbers: Iterable[int]) -> None:
        """Quantizes the weights that some buckets, which have arrived, complete."""
        for target in self._targets(numbers):
            self._left[target.weight] -= 1
            if not self._left[target.weight] and not self._keeps:
                self._quantize(target)

    def finish(self) -> None:
        """Quantizes what was kept."""
        assert not any(self._left.values()), "a load has ended before all weights have arrived"
        for target in self._plan.quantized if self._keeps else ():
            self._quantize(target)

    def _targets(self, numbers: Iterable[int]) -> list[QuantizedTarget]:
        """Returns the weights in some buckets, each once for every bucket."""
        if not self._in_bucket:
            return []
        return [target for number in numbers for target in self._in_bucket[number]]

    def _quantize(self, target: QuantizedTarget) -> None:
        quantize_target(target, self._plan.targets, self._tensors)
        for number, _ in target.boxes:
            self._tensors[number] = torch.empty(0)
