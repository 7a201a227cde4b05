"""The buffers through which a load reaches a device, its streams, and the events that say when a buffer may be used again.

A bucket goes from a pinned host buffer over the copy stream into a device buffer; everything after that is on the load's
one stream. There are two buffers of each kind: while one is in use, the other is filled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from epload.planning.buckets import HEADER_BYTES
from epload.staging.affinity import near

BUFFERS = 2
_POLL_SECONDS = 50e-6
"""Between two looks at an event; a bucket takes some milliseconds."""
_ABANDONED: list[DeviceStaging] = []


class DeviceStaging:
    """Kept between loads. The events are recorded and waited for by one thread at a time."""

    def __init__(self, device: torch.device, stream: torch.Stream, nbytes: int, reads: bool) -> None:
        """
        Args:
            stream: of ``device``; all work but the copies to the device is on it.
            nbytes: of one buffer.
            reads: whether this rank brings buckets to the device, and so needs pinned memory.
        """
        self.device = device
        self.nbytes = nbytes
        self.reads = reads
        self.stream = stream
        self.copies = torch.Stream(device)
        with near(device):
            self.pinned = [_pinned(nbytes) for _ in range(BUFFERS * reads)]
            self.header = _pinned(HEADER_BYTES)
        with self.stream:  # so that what was here before is over before a bucket is
            self.buckets = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self._copied = [torch.Event(device) for _ in range(BUFFERS)]
        """By pinned buffer: the last copy out of it."""
        self._unpacked = [torch.Event(device) for _ in range(BUFFERS)]
        """By device buffer: the last use of what was in it."""
        self._arrived = torch.Event(device)

    @property
    def footprint(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in (*self.pinned, *self.buckets))

    def serves(self, device: torch.device, nbytes: int, reads: bool) -> bool:
        """Whether a load with these needs can use it."""
        return self.device == device and self.nbytes >= nbytes and self.reads >= reads

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What is queued inside is on the stream, between the waits for and of the caller's."""
        self.enter()
        try:
            with self.stream:
                yield
        finally:
            self.leave()

    def enter(self) -> None:
        """What the caller has queued, and earlier loads, come before this load."""
        caller = torch.accelerator.current_stream(self.device)
        if caller != self.stream:
            self.stream.wait_stream(caller)
        for event in self._unpacked:
            event.record(self.stream)

    def leave(self) -> None:
        """What the caller queues from now on comes after this load, and so does the memory's next use."""
        self.stream.wait_stream(self.copies)
        caller = torch.accelerator.current_stream(self.device)
        if caller != self.stream:
            caller.wait_stream(self.stream)

    def wait_until_copied(self, pinned: int, check: Callable[[], None] = lambda: None) -> None:
        """The host waits until nothing reads a pinned buffer any more. ``check``: as for :func:`wait_for`."""
        wait_for(self._copied[pinned], check)

    def copy(self, pinned: int, bucket: int, nbytes: int) -> None:
        """Host to device, on the copy stream, once the last use of the device buffer has been queued."""
        self.wait_until_unpacked(bucket)
        with self.copies:
            self.buckets[bucket][:nbytes].copy_(self.pinned[pinned][:nbytes], non_blocking=True)
        self._copied[pinned].record(self.copies)

    def wait_until_unpacked(self, bucket: int) -> None:
        """The copy stream waits until nothing uses a device buffer any more."""
        self.copies.wait_event(self._unpacked[bucket])

    def wait_for_copy(self, pinned: int) -> None:
        """The stream waits for what was copied out of a pinned buffer last."""
        self.stream.wait_event(self._copied[pinned])

    def unpacked(self, bucket: int) -> None:
        """Everything queued on the stream so far is what used a device buffer."""
        self._unpacked[bucket].record(self.stream)

    def fetch_header(self, bucket: int, check: Callable[[], None]) -> Tensor:
        """The first HEADER_BYTES of a device buffer, on the host, which waits for them alone. Called on the stream.

        ``check``: as for :func:`wait_for`.
        """
        self.header.copy_(self.buckets[bucket][:HEADER_BYTES], non_blocking=True)
        self._arrived.record(self.stream)
        wait_for(self._arrived, check)
        return self.header

    def wait_for_stream(self, check: Callable[[], None]) -> None:
        """The host waits for all that is queued on the stream. ``check``: as for :func:`wait_for`."""
        self._arrived.record(self.stream)
        wait_for(self._arrived, check)

    def abandon(self) -> None:
        """Keeps the memory until the process ends: a transfer that failed may still use it."""
        _ABANDONED.append(self)


def wait_for(event: torch.Event, check: Callable[[], None]) -> None:
    """The host waits for an event, but not in the driver, which no other thread could end: a collective before the event does not
    end if another rank has.

    ``check``: called again and again meanwhile; an error that it raises ends the wait.
    """
    while not event.query():
        check()
        time.sleep(_POLL_SECONDS)
    check()  # it may be that the collective was aborted
    event.synchronize()  # raises the error of what was queued before it, if there was one


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
