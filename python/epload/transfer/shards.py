"""The local tensors that a sync packs or fills, or a save packs, on CPU and on a device.

Between host memory and a device, regions cross through the device's pipe, on a stream of the shards' own; the host waits for
it in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from epload.core import dtypes
from epload.core.copy_table import CopyTable
from epload.errors import LoadError
from epload.native import ops
from epload.planning.buckets import BucketCopies
from epload.transfer.device_pipe import DevicePipe


class PackPlan(Protocol):
    """An ``ExchangePlan``, or what a save writes."""

    @property
    def buckets(self) -> Sequence[BucketCopies]: ...

    def describe(self, numbers: Sequence[int]) -> str:
        """Describes the content of some consecutive buckets, for messages."""
        ...


class Shards:
    """The local tensors of one rank, for one sync."""

    def __init__(
        self, plan: PackPlan, tensors: list[Tensor], prove: bool, who: str, ranks: int, direct: bool = False
    ) -> None:
        """
        Args:
            plan: whose buckets' targets count in ``tensors``.
            tensors: on CPU, on one accelerator, or on both.
            prove: whether each copy is followed by a comparison of digests.
            who: whose they are, for messages.
            ranks: of this node, which share its processors.
            direct: whether buckets are on the device, too. What is queued on them is on the current stream.
        """
        self._plan = plan
        self._tensors = tensors
        self._prove = prove
        self._who = who
        self.pipe: DevicePipe | None = None
        """Pipe of the device, kept for the next sync; None if there is no device or ``direct`` is set."""
        self._stream: torch.Stream | None = None
        """Stream of the device; None if there is no device or ``direct`` is set."""
        device = next((tensor.device for tensor in tensors if not tensor.is_cpu), None)
        if device is not None and not direct:
            self.pipe = DevicePipe.of(device, ranks)
            self._stream = torch.Stream(device)
            self._stream.wait_stream(torch.accelerator.current_stream(device))

    def pack(self, number: int, bucket: Tensor) -> None:
        """Copies this rank's boxes of a bucket into it, behind its header."""
        self._copy(number, bucket, packs=True)

    def unpack(self, number: int, bucket: Tensor) -> None:
        """Copies what this rank keeps out of a bucket."""
        self._copy(number, bucket, packs=False)

    def finish(self) -> None:
        """Waits until what was unpacked is in the tensors."""
        if self._stream is not None:
            self._stream.synchronize()

    def _copy(self, number: int, bucket: Tensor, packs: bool) -> None:
        planned = self._plan.buckets[number]
        if not planned.targets:
            return
        plain = ops.pack if packs else ops.unpack
        if not bucket.is_cpu or self._stream is None:
            plain(bucket, [self._tensors[target] for target in planned.targets], planned.copies.rows)
        else:
            on_device = torch.tensor([not self._tensors[target].is_cpu for target in planned.targets])
            for mask in (on_device, ~on_device):
                table = planned.copies.select(mask[planned.copies.target]).clone()
                tensors = [self._tensors[planned.targets[i]] for i in table.renumber_targets()]
                if tensors and tensors[0].is_cpu:
                    plain(bucket, tensors, table.rows)
                elif tensors:
                    self._cross(bucket, tensors, table, packs)
        if self._prove:
            self.finish()
            self._compare(number, bucket.cpu(), "packed" if packs else "unpacked")

    def _cross(self, bucket: Tensor, tensors: list[Tensor], copies: CopyTable, packs: bool) -> None:
        assert self.pipe is not None
        assert self._stream is not None
        with self._stream:
            if packs:
                ops.download(tensors, copies.rows, [bucket], copies.in_bucket(), self.pipe.native)
            else:
                ops.upload([bucket], copies.in_bucket(), tensors, copies.rows, self.pipe.native)

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
