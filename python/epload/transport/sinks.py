"""Sinks: where a transfer's bytes end up. A model's tensors on CPU, or on a device by way of a bucket there or of host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.native.region_tables import Guard
from epload.report import TransferReport
from epload.staging.affinity import near
from epload.staging.device import PINNED
from epload.transport.device_plan import DevicePlan, Kept, Pinned
from epload.transport.framing import Framing, list_numbers
from epload.transport.local import Local


class Sink(Protocol):
    """Used by one thread, within :meth:`entered`."""

    def entered(self) -> AbstractContextManager[None]:
        """Around the whole transfer."""
        ...

    def guards(self, number: int, bucket: Tensor) -> bool:
        """Whether :meth:`unpack` can check the bucket's header where the bucket is, when its turn comes. It then takes nothing
        out of one that is not the expected one, or comes after such a one, and is called even if the rank keeps nothing of it."""
        ...

    def unpack(self, number: int, bucket: Tensor, guarded: bool = False) -> None:
        """Takes what this rank keeps, if anything, out of a bucket (uint8). The sink no longer needs it when this returns, or
        when the work that it has queued on its stream is done. ``guarded``: as :meth:`guards` has said."""
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
    """What a :class:`Sink` is that is done with a bucket when :meth:`Sink.unpack` returns, once the host has seen its header."""

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def guards(self, number: int, bucket: Tensor) -> bool:
        return False

    def abandon(self) -> None:
        pass


class HostSink(PlainSink):
    """Tensors on CPU, out of buckets in host memory."""

    def __init__(self, local: Local, report: TransferReport) -> None:
        self._local = local
        self._report = report

    def unpack(self, number: int, bucket: Tensor, guarded: bool = False) -> None:
        self._local.unpack(number, bucket)

    def read(self, numbers: range, checkpoint: Checkpoint) -> int | None:
        with self._report.timed("read", list_numbers("bucket", numbers)) as span:
            nbytes = self._local.read(numbers, checkpoint)
            span.nbytes = nbytes or 0
            return nbytes


class DeviceSink:
    """Tensors on a device (and some on CPU), out of buckets on that device, on the staging's stream for the node."""

    def __init__(self, plan: DevicePlan, local: Local, framing: Framing) -> None:
        self._plan = plan
        self._tensors = local.tensors
        self._framing = framing

    def entered(self) -> AbstractContextManager[None]:
        return self._plan.staging.entered()

    def guards(self, number: int, bucket: Tensor) -> bool:
        kept = self._plan.kept(range(number, number + 1))
        return self._plan.staging.guards and not kept.on_cpu.targets and kept.can_guard(bucket, self._tensors)

    def unpack(self, number: int, bucket: Tensor, guarded: bool = False) -> None:
        kept = self._plan.kept(range(number, number + 1))
        staging, guard = self._plan.staging, None
        if guarded:
            guard = Guard(self._framing.expected(number), staging.stopped, staging.refused)
        if guarded or kept.on_device.targets:
            kept.unpack(bucket, self._tensors, guard)
        if kept.on_cpu.targets:
            kept.on_cpu.of(self._tensors).unpack(bucket.cpu())

    def abandon(self) -> None:
        pass  # the ring has the same staging


class UploadSink:
    """Tensors on a device (and some on CPU), out of buckets in host memory or out of files: each rank copies the regions that it
    keeps, and no others.

    They are packed into a pinned buffer of the rank's own, so that the bucket may be filled again at once, cross the rank's own
    link in one copy, and are unpacked on the load's stream.
    """

    def __init__(self, plan: DevicePlan, local: Local, report: TransferReport) -> None:
        """``plan``: with a staging of at least ``upload_bytes``."""
        self._plan = plan
        self._staging = plan.staging
        self._tensors = local.tensors
        self._report = report
        self._turn = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        with near(self._staging.device), self._staging.entered():
            yield

    def guards(self, number: int, bucket: Tensor) -> bool:
        return False  # the host has seen the header before it copies anything to the device

    def unpack(self, number: int, bucket: Tensor, guarded: bool = False) -> None:
        kept = self._plan.kept(range(number, number + 1))
        if kept.on_cpu.targets:
            kept.on_cpu.of(self._tensors).unpack(bucket)
        if kept.on_device.targets:
            self._pinned_for(kept).unpack(bucket)
            self._upload(kept)

    def read(self, numbers: range, checkpoint: Checkpoint) -> int | None:
        total = 0
        for group in self._plan.merged(numbers):
            kept = self._plan.kept(group)
            for part in (kept.on_cpu, kept.on_device):
                if not part.targets:
                    continue
                uploads = part is kept.on_device
                regions = self._pinned_for(kept).regions() if uploads else part.of(self._tensors)
                with self._report.timed("read", list_numbers("bucket", group)) as span:
                    nbytes = checkpoint.read_regions(regions)
                    span.nbytes = nbytes or 0
                if nbytes is None:
                    return None
                total += nbytes
                if uploads:
                    self._upload(kept)
        return total

    def abandon(self) -> None:
        self._staging.abandon()

    def _pinned_for(self, kept: Kept) -> Pinned:
        """The next pinned buffer, once nothing reads it any more."""
        turn = self._turn % PINNED
        with self._report.timed("host_to_device"):
            self._staging.wait_until_copied(turn)
        return kept.pinned(turn)

    def _upload(self, kept: Kept) -> None:
        """Queues the copy of the pinned buffer to the device, and unpacking it there."""
        turn = self._turn % PINNED
        self._turn += 1
        nbytes = kept.packed_bytes
        with self._report.timed("host_to_device") as span:
            self._staging.copy(turn, turn, nbytes)
            span.nbytes = nbytes
        with self._staging.node_stream:
            self._staging.wait_for_copy(turn)
            kept.unpack_packed(self._staging.buckets[turn], self._tensors)
            self._staging.unpacked(turn)
