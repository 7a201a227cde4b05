"""Sinks: where a transfer's bytes end up. A model's tensors on CPU, or on a device by way of a bucket there or of host memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.core.regions import Regions
from epload.planning.plan import LoadPlan
from epload.report import LoadReport
from epload.staging.device import BUFFERS, DeviceStaging
from epload.transport.local import Local


class Sink(Protocol):
    """Used by one thread, within :meth:`entered`."""

    def entered(self) -> AbstractContextManager[None]:
        """Around the whole transfer."""
        ...

    def unpack(self, number: int, bucket: Tensor) -> None:
        """Takes what this rank keeps out of a bucket (uint8). The sink no longer needs it when this returns, or when the
        work that it has queued on its stream is done."""
        ...

    def abandon(self) -> None:
        """Keeps memory that may still be in use until the process ends."""
        ...


class DirectSink(Sink, Protocol):
    """One that can also read for itself."""

    def read(self, numbers: range, checkpoint: Checkpoint) -> int | None:
        """Reads what this rank keeps of some buckets; returns the bytes read, None if the checkpoint gives whole buckets only."""
        ...


class HostSink:
    """Tensors on CPU, out of buckets in host memory."""

    def __init__(self, local: Local, report: LoadReport) -> None:
        self.unpack = local.unpack
        self._local = local
        self._report = report

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def read(self, numbers: range, checkpoint: Checkpoint) -> int | None:
        with self._report.timed("read"):
            return self._local.read(numbers, checkpoint)

    def abandon(self) -> None:
        pass


class DeviceSink:
    """Tensors on a device (and some on CPU), out of buckets on that device, on the staging's stream."""

    def __init__(self, staging: DeviceStaging, local: Local) -> None:
        self._staging = staging
        self._local = local

    def entered(self) -> AbstractContextManager[None]:
        return self._staging.entered()

    def unpack(self, number: int, bucket: Tensor) -> None:
        on_cpu, on_device = self._local.regions(number).by_device()
        if on_device.targets:
            on_device.unpack(bucket)
        if on_cpu.targets:
            on_cpu.unpack(bucket.cpu())

    def abandon(self) -> None:
        pass  # the ring has the same staging


class UploadSink:
    """Tensors on a device (and some on CPU), out of buckets in host memory or out of files: each rank copies the regions that it
    keeps, and no others.

    They are packed into a pinned buffer of the rank's own, so that the bucket may be filled again at once, cross the rank's own
    link in one copy, and are unpacked on the load's stream.
    """

    def __init__(self, staging: DeviceStaging, local: Local, report: LoadReport) -> None:
        """``staging``: with buffers of at least ``upload_bytes(plan)``."""
        self._staging = staging
        self._local = local
        self._report = report
        self._turn = 0

    def entered(self) -> AbstractContextManager[None]:
        return self._staging.entered()

    def unpack(self, number: int, bucket: Tensor) -> None:
        on_cpu, on_device = self._local.regions(number).by_device()
        if on_cpu.targets:
            on_cpu.unpack(bucket)
        if on_device.targets:
            self._pinned_for(on_device).unpack(bucket)
            self._upload(on_device)

    def read(self, numbers: range, checkpoint: Checkpoint) -> int | None:
        total = 0
        for number in numbers:
            on_cpu, on_device = self._local.regions(number).by_device()
            for regions, uploads in ((on_cpu, False), (on_device, True)):
                if not regions.targets:
                    continue
                into = self._pinned_for(regions) if uploads else regions
                with self._report.timed("read"):
                    nbytes = checkpoint.read_regions(into)
                if nbytes is None:
                    return None
                total += nbytes
                if uploads:
                    self._upload(regions)
        return total

    def abandon(self) -> None:
        self._staging.abandon()

    def _pinned_for(self, regions: Regions) -> Regions:
        """The same regions with pieces of the next pinned buffer as their targets, once nothing reads that any more."""
        turn = self._turn % BUFFERS
        with self._report.timed("host_to_device"):
            self._staging.wait_until_copied(turn)
        return regions.read_into(self._staging.pinned[turn])

    def _upload(self, regions: Regions) -> None:
        """Queues the copy of the pinned buffer to the device, and unpacking it there."""
        turn = self._turn % BUFFERS
        self._turn += 1
        moved, nbytes = regions.packed()
        self._staging.copy(turn, turn, nbytes)
        with self._staging.stream:
            self._staging.wait_for_copy(turn)
            moved.unpack(self._staging.buckets[turn])
            self._staging.unpacked(turn)
        self._report.phases["host_to_device"].nbytes += nbytes


def upload_bytes(plan: LoadPlan) -> int:
    """Bytes of one staging buffer of an UploadSink."""
    return max((bucket.copies.packed()[1] for bucket in plan.buckets), default=0)
