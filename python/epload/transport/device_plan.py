"""Determines which regions a rank keeps on a device and which on CPU, once per plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epload.core.copy_table import CopyTable
from epload.core.regions import Regions
from epload.native import ops
from epload.planning.plan import LoadPlan


class DevicePart:
    """Regions of a plan's targets; see :class:`~epload.core.regions.Regions`."""

    def __init__(self, targets: Sequence[int], copies: CopyTable, origins: Tensor, mask: Tensor) -> None:
        """``mask``: which of the rows."""
        self._copies = copies.select(mask)
        self._origins = origins[mask]
        self.targets = [targets[i] for i in self._copies.renumber_targets()]

    def of(self, tensors: Sequence[Tensor], pipe: ops.Pipe | None = None) -> Regions:
        """``tensors``: of all targets of the plan."""
        return Regions([tensors[target] for target in self.targets], self._copies, self._origins, pipe)


class DevicePlan:
    """Divides the regions of one plan into those on CPU and those on a device."""

    def __init__(self, plan: LoadPlan, on_cpu: tuple[bool, ...]) -> None:
        """``on_cpu``: for each target of the plan."""
        self._plan = plan
        self._on_cpu = on_cpu
        self._parts: dict[range, tuple[DevicePart, DevicePart]] = {}

    @classmethod
    def of(cls, plan: LoadPlan, tensors: Sequence[Tensor], known: DevicePlan | None) -> DevicePlan:
        """``known``, that of the load before, if it is for the same."""
        on_cpu = tuple(tensor.is_cpu for tensor in tensors)
        if known is not None and known._plan is plan and known._on_cpu == on_cpu:
            return known
        return cls(plan, on_cpu)

    def parts(self, numbers: range) -> tuple[DevicePart, DevicePart]:
        """Returns what this rank keeps of some buckets on CPU, and on the device."""
        if numbers not in self._parts:
            targets, copies, origins = self._plan.taken(numbers)
            there = torch.tensor([self._on_cpu[target] for target in targets], dtype=torch.bool, device="cpu")[
                copies.target
            ]
            self._parts[numbers] = (
                DevicePart(targets, copies, origins, there),
                DevicePart(targets, copies, origins, ~there),
            )
        return self._parts[numbers]
