"""Sinks: where a transfer's bytes end up. A model's tensors on CPU, or on a device by way of a bucket there or of host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.core.regions import Regions
from epload.report import TransferReport
from epload.staging.affinity import near
from epload.staging.device import DeviceStaging
from epload.transport.device_plan import DevicePlan
from epload.transport.framing import list_numbers
from epload.transport.local import Local


class Sink(Protocol):
    """Used by one thread, within :meth:`entered`."""

    def entered(self) -> AbstractContextManager[None]:
        """Around the whole transfer."""
        ...

    def unpack(self, number: int, bucket: Tensor) -> None:
        """Takes what this rank keeps, if anything, out of a bucket (uint8). The sink no longer needs it when this returns, or
        when the work that it has queued on its stream is done."""
        ...

    def abandon(self) -> None:
        """Keeps memory that may still be in use until the process ends."""
        ...


class DirectSink(Sink, Protocol):
    """One that can also read for itself."""

    def read(self, numbers: range, checkpoint: Checkpoint) -> int | None:
        """Reads what this rank keeps of some buckets; returns the bytes read, None if the checkpoint gives whole buckets only."""
        ...


class PlainSink:
    """Implements what is common to every :class:`Sink` that is done with a bucket when :meth:`Sink.unpack` returns."""

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def abandon(self) -> None:
        pass


class HostSink(PlainSink):
    """Tensors on CPU, out of buckets in host memory."""

    def __init__(self, local: Local, report: TransferReport) -> None:
        self._local = local
        self._report = report

    def unpack(self, number: int, bucket: Tensor) -> None:
        self._local.unpack(number, bucket)

    def read(self, numbers: range, checkpoint: Checkpoint) -> int | None:
        with self._report.timed("read", list_numbers("bucket", numbers)) as span:
            nbytes = self._local.read(numbers, checkpoint)
            span.nbytes = nbytes or 0
            return nbytes


class DeviceSink:
    """Tensors on a device, and some on CPU, on the staging's stream: out of buckets there or in host memory, or out of files.
    What comes from the host goes through the staging's pipe, and no more than what this rank keeps."""

    def __init__(self, plan: DevicePlan, local: Local, staging: DeviceStaging, report: TransferReport) -> None:
        self._plan = plan
        self._tensors = local.tensors
        self._staging = staging
        self._report = report

    @contextmanager
    def entered(self) -> Iterator[None]:
        with near(self._staging.device), self._staging.entered():
            yield

    def unpack(self, number: int, bucket: Tensor) -> None:
        on_cpu, on_device = self._parts(range(number, number + 1))
        if on_cpu.targets:
            on_cpu.unpack(bucket.cpu())
        if on_device.targets:
            on_device.unpack(bucket)

    def read(self, numbers: range, checkpoint: Checkpoint) -> int | None:
        total = 0
        for regions in self._parts(numbers):
            if not regions.targets:
                continue
            with self._report.timed("read", list_numbers("bucket", numbers)) as span:
                nbytes = checkpoint.read_regions(regions)
                span.nbytes = nbytes or 0
            if nbytes is None:
                return None
            total += nbytes
        return total

    def abandon(self) -> None:
        self._staging.abandon()

    def _parts(self, numbers: range) -> tuple[Regions, Regions]:
        """Returns the regions on CPU, and those on the device."""
        on_cpu, on_device = self._plan.parts(numbers)
        pipe = self._staging.pipe.native if self._staging.pipe is not None else None
        return on_cpu.of(self._tensors), on_device.of(self._tensors, pipe)
