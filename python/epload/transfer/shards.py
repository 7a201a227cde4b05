"""The local tensors that a sync packs or fills, on CPU and on a device.

Between host memory and a device, regions cross through the device's pipe, on a stream of the shards' own; the host waits for
it in the end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from epload.core import dtypes
from epload.core.columns import column
from epload.core.copy_table import regions_on_cpu
from epload.core.regions import Regions
from epload.errors import LoadError
from epload.native import ops
from epload.planning.streams import ExchangePlan
from epload.transfer.affinity import near
from epload.transfer.context import Sink
from epload.transfer.device_pipe import DevicePipe
from epload.transfer.local import split_by_device


class Shards(Sink):
    """The local tensors of one rank, for one sync."""

    def __init__(
        self,
        plan: ExchangePlan,
        tensors: list[Tensor] | Mapping[int, Tensor],
        verify: bool,
        who: str,
        ranks: int,
        direct: bool = False,
    ) -> None:
        """
        Args:
            plan: whose buckets' targets count in ``tensors``.
            tensors: on CPU, on one accelerator, or on both; by number, if only some are to be filled.
            verify: whether each copy is followed by a comparison of digests.
            who: whose they are, for messages.
            ranks: of this node, which share its processors.
            direct: whether buckets are on the device, too. What is queued on them is on the current stream.
        """
        self._plan = plan
        self.tensors: Any = tensors
        self._verify = verify
        self._who = who
        self.pipe: DevicePipe | None = None
        """Pipe of the device, kept for the next sync; None if there is no device or ``direct`` is set."""
        self._stream: torch.Stream | None = None
        """Stream of the device; None if there is no device or ``direct`` is set."""
        self._lock = threading.Lock()
        """Held by the thread that has entered the stream."""
        own = tensors if isinstance(tensors, list) else tensors.values()
        device = next((tensor.device for tensor in own if not tensor.is_cpu), None)
        if device is not None and not direct:
            self.pipe = DevicePipe.of(device, ranks)
            self._stream = torch.Stream(device)
            self._stream.wait_stream(torch.accelerator.current_stream(device))

    @contextmanager
    def entered(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.finish()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            with self._lock, near(self._stream.device), self._stream:
                yield

    def pack(self, number: int, bucket: Tensor) -> None:
        """Copies this rank's boxes of a bucket into it, behind its header. May be called by several threads."""
        with self._on_stream():
            for regions in self._regions(number):
                regions.pack(bucket)
            if len(padding := self._plan.buckets[number].padding):
                bucket[padding] = 0
        if self._verify:
            self._compare(number, bucket, "packed")

    @cached_property
    def _codes(self) -> Tensor:
        """The dtype of each tensor as :func:`epload.core.dtypes.code`; -1 if it is not on CPU."""
        kinds = [tensor.dtype if tensor.is_cpu else None for tensor in self.tensors]
        codes = {dtype: -1 if dtype is None else dtypes.code(dtype) for dtype in set(kinds)}
        return column([codes[kind] for kind in kinds])

    def counted(self, number: int) -> list[Tensor]:
        """Returns the tensors that a bucket's copies count."""
        return [self.tensors[target] for target in self._plan.buckets[number].targets]

    def are_plain(self, number: int) -> bool:
        """Returns True if these are on CPU, and their elements are not converted."""
        bucket = self._plan.buckets[number]
        return torch.equal(self._codes[column(bucket.targets)][bucket.copies.target], bucket.copies.dtype)

    def unpack(self, number: int, bucket: Tensor) -> None:
        """Copies what this rank keeps out of a bucket."""
        with self._on_stream():
            for regions in self._regions(number):
                regions.unpack(bucket)
        if self._verify:
            self._compare(number, bucket, "unpacked")

    def finish(self) -> None:
        """Waits until what was unpacked is in the tensors."""
        if self._stream is not None:
            self._stream.synchronize()

    def _regions(self, number: int) -> list[Regions]:
        bucket, tensors = self._plan.buckets[number], self.counted(number)
        pipe = self.pipe.native if self.pipe is not None else None
        return split_by_device(tensors, bucket.copies, bucket.copies.in_bucket(), pipe)

    def _compare(self, number: int, bucket: Tensor, what: str) -> None:
        """Raises LoadError if the tensors do not hold what the bucket does, or the bucket not what the tensors do."""
        planned = self._plan.buckets[number]
        if not planned.targets:
            return
        self.finish()
        regions, table = regions_on_cpu([self.tensors[target] for target in planned.targets], planned.copies)
        if what == "packed":  # a narrower bucket holds what the tensors become
            packed = map(dtypes.from_code, planned.copies.dtype.tolist())
            regions = [region.to(dtype).to(region.dtype) for region, dtype in zip(regions, packed, strict=True)]
        digests = ops.digest_tensors(regions, table.rows)
        table.target[:] = torch.tensor([dtypes.code(region.dtype) for region in regions])
        if not torch.equal(ops.digest_bucket(bucket.cpu(), table.rows), digests):
            raise LoadError(
                f"{self._who} {what} {self._plan.describe([number])}, but the bucket and the tensors differ: the memory of this "
                "machine changes bits, or the tensors were changed meanwhile"
            )
