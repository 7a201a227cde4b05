"""The local tensors that a sync packs or fills, or a save packs, on CPU and on a device.

On CPU, what depends on the tensors' layouts is prepared natively once, and kept. Between host memory and a device, a bucket
passes through a buffer there, on a stream of its own, and the host waits for it: so nothing is left to wait for when a sync ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from epload.core import dtypes
from epload.core.copy_table import CopyTable
from epload.errors import LoadError
from epload.native import ops
from epload.planning.buckets import HEADER_BYTES


class PackBucket(Protocol):
    """The copies between a bucket and some of the local tensors."""

    nbytes: int

    @property
    def targets(self) -> Sequence[int]:
        """The numbers of these tensors."""
        ...

    @property
    def copies(self) -> CopyTable:
        """Targets count in :attr:`targets`."""
        ...


class PackPlan(Protocol):
    """An ``ExchangePlan``, or what a save writes."""

    @property
    def buckets(self) -> Sequence[PackBucket]: ...

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        ...

    def describe(self, numbers: Sequence[int]) -> str:
        """What is in some consecutive buckets, for messages."""
        ...


class PreparedExchange:
    """What is prepared of a plan for CPU tensors of some layouts. Keeps no tensor alive."""

    def __init__(self, plan: PackPlan, layouts: ops.Layouts) -> None:
        self.plan = plan
        self.layouts = layouts
        self.copies: dict[int, ops.PreparedCopies] = {}
        """Of each bucket."""


class Shards:
    """The local tensors of one rank, for one sync."""

    def __init__(
        self,
        plan: PackPlan,
        tensors: list[Tensor],
        known: PreparedExchange | None,
        device_buffer: DeviceBuffer | None,
        prove: bool,
        who: str,
        direct: bool = False,
    ) -> None:
        """
        Args:
            plan: whose buckets' targets count in ``tensors``.
            tensors: on CPU, on one accelerator, or on both.
            known, device_buffer: of the sync before.
            prove: whether each copy is followed by a comparison of digests.
            who: whose they are, for messages.
            direct: whether buckets are on the device, too. What is queued on them is on the current stream.
        """
        self._plan = plan
        self._tensors = tensors
        self._prove = prove
        self._who = who
        self.prepared: PreparedExchange | None = None
        """For the next sync."""
        device = next((tensor.device for tensor in tensors if not tensor.is_cpu), None)
        self.device_buffer = device_buffer
        if device is not None:
            if direct:
                return
            if device_buffer is None or device_buffer.device != device:
                self.device_buffer = DeviceBuffer(device, plan)
            assert self.device_buffer is not None
            self.device_buffer.wait_for_caller()
            return
        self._list, foreign = ops.tensor_list(tensors, known.layouts if known is not None else None)
        if not foreign:
            if known is None or known.plan is not plan or not ops.has_layouts(self._list, known.layouts):
                known = PreparedExchange(plan, ops.layouts(self._list))
            self.prepared = known

    def pack(self, number: int, bucket: Tensor) -> None:
        """Copies this rank's boxes of a bucket into it, behind its header."""
        self._copy(number, bucket, _PACK)

    def unpack(self, number: int, bucket: Tensor) -> None:
        """Copies what this rank keeps out of a bucket."""
        self._copy(number, bucket, _UNPACK)

    def _copy(self, number: int, bucket: Tensor, direction: _Direction) -> None:
        planned = self._plan.buckets[number]
        if not planned.targets:
            return
        if not bucket.is_cpu:
            direction.plain(bucket, [self._tensors[target] for target in planned.targets], planned.copies.rows)
        elif self.prepared is not None:
            direction.prepared(bucket, self._list, self._copies(self.prepared, number, planned))
        else:
            on_cpu, on_device = self._divide(planned)
            if self.device_buffer is not None and on_device is not None:
                direction.on_device(self.device_buffer, bucket, *on_device)
            if on_cpu is not None:
                direction.plain(bucket, on_cpu[0], on_cpu[1].rows)
        if self._prove:
            self._compare(number, bucket.cpu(), direction.done)

    def _copies(self, prepared: PreparedExchange, number: int, planned: PackBucket) -> ops.PreparedCopies:
        copies = prepared.copies.get(number)
        if copies is None:
            copies = ops.prepare_copies(self._list, planned.targets, planned.copies.rows, planned.nbytes)
            prepared.copies[number] = copies
        return copies

    def _divide(self, planned: PackBucket) -> list[tuple[list[Tensor], CopyTable] | None]:
        """The tensors and copies of a bucket on CPU, and those on the device; None for none."""
        there = torch.tensor([not self._tensors[target].is_cpu for target in planned.targets])
        found: list[tuple[list[Tensor], CopyTable] | None] = []
        for mask in (~there, there):
            table = planned.copies.select(mask[planned.copies.target]).clone()
            which = table.renumber_targets()
            tensors = [self._tensors[planned.targets[i]] for i in which]
            found.append((tensors, table) if tensors else None)
        return found

    def _compare(self, number: int, bucket: Tensor, what: str) -> None:
        """Raises LoadError if the tensors do not hold what the bucket does, or the bucket not what the tensors do."""
        planned = self._plan.buckets[number]
        rows = planned.copies
        wire = dict(zip(rows.target.tolist(), map(dtypes.from_code, rows.dtype.tolist()), strict=True))
        tensors = [self._tensors[target].cpu() for target in planned.targets]
        if what == "packed":  # a narrower bucket holds what the tensors become
            tensors = [tensor.to(wire[i]).to(tensor.dtype) for i, tensor in enumerate(tensors)]
        codes = torch.tensor([dtypes.code(tensor.dtype) for tensor in tensors], dtype=torch.int64)
        table = rows.clone()
        table.target[:] = codes[rows.target]
        if not torch.equal(ops.digest_bucket(bucket, table.rows), ops.digest_tensors(tensors, rows.rows)):
            raise LoadError(
                f"{self._who} {what} {self._plan.describe([number])}, but the bucket and the tensors differ: the memory of this "
                "machine changes bits, or the tensors were changed meanwhile"
            )


class DeviceBuffer:
    """A buffer on a device for one bucket after the other, on a stream of its own. For one thread at a time."""

    def __init__(self, device: torch.device, plan: PackPlan) -> None:
        self.device = device
        self._stream = torch.Stream(device)
        with self._stream:
            self._buffer = torch.empty(plan.largest, dtype=torch.uint8, device=device)

    def wait_for_caller(self) -> None:
        """What the caller has queued on its current stream comes before what follows."""
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))

    def pack(self, bucket: Tensor, tensors: list[Tensor], copies: CopyTable) -> None:
        part = self._buffer[: bucket.nbytes]
        with self._stream:
            ops.pack(part, tensors, copies.rows)
            bucket[HEADER_BYTES:].copy_(part[HEADER_BYTES:])
        self._stream.synchronize()

    def unpack(self, bucket: Tensor, tensors: list[Tensor], copies: CopyTable) -> None:
        part = self._buffer[: bucket.nbytes]
        with self._stream:
            part.copy_(bucket)
            ops.unpack(part, tensors, copies.rows)
        self._stream.synchronize()


class _Direction(NamedTuple):
    prepared: Callable[[Tensor, ops.TensorList, ops.PreparedCopies], None]
    on_device: Callable[[DeviceBuffer, Tensor, list[Tensor], CopyTable], None]
    plain: Callable[[Tensor, list[Tensor], Tensor], None]
    """Where the bucket is where the tensors are."""
    done: str
    """In messages."""


_PACK = _Direction(ops.pack_prepared, DeviceBuffer.pack, ops.pack, "packed")
_UNPACK = _Direction(ops.unpack_prepared, DeviceBuffer.unpack, ops.unpack, "unpacked")
