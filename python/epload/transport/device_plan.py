"""What a load into a device prepares once per plan: which regions a rank keeps on the device and which on CPU, and how those for
the device lie in a pinned buffer, out of which they cross its link in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from epload.core import dtypes
from epload.core.copy_table import CopyTable
from epload.core.regions import BoundRegions, PreparedRegions, Regions
from epload.native import ops, region_tables
from epload.native.region_tables import Guard, RegionTable
from epload.planning.plan import LoadPlan, Taken
from epload.planning.waves import group_buckets
from epload.staging.device import DeviceStaging

MERGED = 32 << 20
"""Bytes of one copy to a device, where a rank reads only what it keeps: a bucket may give each of many ranks far less, and each
copy costs a wait, two events and a launch."""


def upload_bytes(plan: LoadPlan, merged: bool) -> int:
    """Bytes of one staging buffer for uploads. ``merged``: whether those of several buckets may go together."""
    packed = plan.packed_by_bucket
    return max((*packed, min(MERGED, sum(packed)) if merged else 0), default=0)


class DevicePlan:
    """Of one plan, for tensors of which some are on CPU, and for the buffers of one staging."""

    def __init__(self, plan: LoadPlan, on_cpu: tuple[bool, ...], staging: DeviceStaging) -> None:
        """``on_cpu``: for each target of the plan."""
        self._plan = plan
        self._on_cpu = on_cpu
        self.staging = staging
        self._kept: dict[range, Kept] = {}
        self._merged: dict[range, list[range]] = {}

    @classmethod
    def of(
        cls, plan: LoadPlan, tensors: Sequence[Tensor], staging: DeviceStaging, known: DevicePlan | None
    ) -> DevicePlan:
        """``known``, that of the load before, if it is for the same."""
        on_cpu = tuple(tensor.is_cpu for tensor in tensors)
        if known is not None and known._plan is plan and known._on_cpu == on_cpu and known.staging is staging:
            return known
        return cls(plan, on_cpu, staging)

    def kept(self, numbers: range) -> Kept:
        """What this rank keeps of some buckets."""
        if numbers not in self._kept:
            self._kept[numbers] = Kept(self._plan.taken(numbers), self._on_cpu, self.staging)
        return self._kept[numbers]

    def merged(self, numbers: range) -> list[range]:
        """The same buckets in groups, of which each fits in a pinned buffer."""
        if numbers not in self._merged:
            limit = min(MERGED, self.staging.nbytes)
            self._merged[numbers] = group_buckets(numbers, self._plan.packed_by_bucket, limit)
        return self._merged[numbers]


class Part(NamedTuple):
    """Regions of a plan's targets; see :class:`~epload.core.regions.Regions`."""

    targets: list[int]
    copies: CopyTable
    origins: Tensor

    def of(self, tensors: Sequence[Tensor]) -> Regions:
        """``tensors``: of all targets of the plan."""
        return Regions([tensors[target] for target in self.targets], self.copies, self.origins)


class Kept:
    """What a rank keeps of some buckets."""

    def __init__(self, taken: Taken, on_cpu: Sequence[bool], staging: DeviceStaging) -> None:
        """``on_cpu``: for each target of the plan."""
        self._staging = staging
        self._pinned: dict[int, Pinned] = {}
        of_row = torch.tensor([on_cpu[target] for target in taken.targets], dtype=torch.bool)[taken.copies.target]
        self.on_cpu, self.on_device = (_select(taken, rows) for rows in (of_row, ~of_row))

    def can_guard(self, bucket: Tensor, tensors: Sequence[Tensor]) -> bool:
        """Whether :meth:`unpack` takes a guard. Arguments as there."""
        return region_tables.can_guard_table(bucket, self._on_device(tensors), self._table)

    def unpack(self, bucket: Tensor, tensors: Sequence[Tensor], guard: Guard | None = None) -> None:
        """Takes the regions on the device out of a bucket there.

        ``tensors``: of all targets of the plan.
        """
        region_tables.unpack_table(bucket, self._on_device(tensors), self._table, guard)

    def unpack_packed(self, packed: Tensor, tensors: Sequence[Tensor]) -> None:
        """The same out of a buffer on the device in which they lie one after the other."""
        region_tables.unpack_table(packed, self._on_device(tensors), self._packed_table)

    @property
    def packed_bytes(self) -> int:
        """Of that buffer."""
        return self._packed[1]

    def _on_device(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[target] for target in self.on_device.targets]

    @cached_property
    def _table(self) -> RegionTable:
        return region_tables.region_table(self.on_device.copies.rows)

    @cached_property
    def _packed(self) -> tuple[CopyTable, int]:
        return self.on_device.copies.packed()

    @cached_property
    def _packed_table(self) -> RegionTable:
        return region_tables.region_table(self._packed[0].rows)

    def pinned(self, turn: int) -> Pinned:
        """Of the pinned buffer whose turn it is."""
        if turn not in self._pinned:
            self._pinned[turn] = Pinned(self.on_device, self._packed[0], self._staging.pinned[turn])
        return self._pinned[turn]


class Pinned:
    """The places of regions in a pinned buffer, each as a tensor."""

    def __init__(self, part: Part, packed: CopyTable, buffer: Tensor) -> None:
        """``packed``: the regions of ``part`` as they lie in the buffer."""
        self._copies = part.copies.clone()
        self._copies.target[:] = torch.arange(len(self._copies))
        self._copies.start[:] = 0
        views = []
        columns = (packed.offset, packed.dtype, packed.ndim, packed.size)
        for at, code, ndim, size in zip(*(column.tolist() for column in columns), strict=True):
            dtype, shape = dtypes.from_code(code), size[:ndim]
            views.append(buffer[at : at + prod(shape) * dtype.itemsize].view(dtype).view(shape))
        self._tensors, _ = ops.tensor_list(views)
        self._regions = PreparedRegions(range(len(views)), self._copies, part.origins)
        self._unpacked: tuple[int, ops.PreparedCopies] | None = None

    def regions(self) -> BoundRegions:
        """For reading the regions out of files to their places."""
        return BoundRegions(self._regions, self._tensors)

    def unpack(self, bucket: Tensor) -> None:
        """Copies the regions out of a bucket (uint8, on CPU) to their places."""
        if self._unpacked is None or self._unpacked[0] != bucket.nbytes:
            which = range(len(self._copies))
            copies = ops.prepare_copies(self._tensors, which, self._copies.rows, bucket.nbytes)
            self._unpacked = bucket.nbytes, copies
        ops.unpack_prepared(bucket, self._tensors, self._unpacked[1])


def _select(taken: Taken, rows: Tensor) -> Part:
    copies = taken.copies.select(rows)
    return Part([taken.targets[i] for i in copies.renumber_targets()], copies, taken.origins[rows])
