"""The buffers through which a load reaches a device, its streams, and the events that say when a buffer may be used again.

A bucket goes from a pinned host buffer over the copy stream into a device buffer; everything after that is on the load's one
stream, or on two where broadcasts between nodes and inside the node may overlap. While a buffer is in use, another is filled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from epload.planning.buckets import HEADER_BYTES
from epload.staging.affinity import near

PINNED = 2
"""Pinned buffers."""
BUCKETS = 2
"""Device buffers, where the host looks at a bucket's header before the next bucket moves."""
GUARDED_BUCKETS = 3
"""Device buffers, where the host looks two buckets later, so that nothing waits for it."""
_POLL_SECONDS = 50e-6
"""Between two looks at an event; a bucket takes some milliseconds."""
DRAIN_SECONDS = 0.5
"""What a communicator that was aborted may take to leave the device."""
_ABANDONED: list[DeviceStaging] = []


class StagingNeeds(NamedTuple):
    """What a load needs of a staging."""

    device: torch.device
    nbytes: int
    """Of one buffer."""
    reads: bool
    """Whether this rank brings buckets to the device, and so needs pinned memory."""
    buckets: int
    """Device buffers."""

    def covers(self, other: StagingNeeds) -> bool:
        """Whether a staging made for these serves a load that needs the other."""
        same = self.device == other.device and self.buckets == other.buckets
        return same and self.nbytes >= other.nbytes and self.reads >= other.reads


class DeviceStaging:
    """Kept between loads. The events are recorded and waited for by one thread at a time."""

    def __init__(self, needs: StagingNeeds, stream: torch.Stream, node_stream: torch.Stream) -> None:
        """
        Args:
            stream: of the device; broadcasts between nodes are on it.
            node_stream: broadcasts inside the node and unpacking are on it; may be the same.
        """
        self.needs = needs
        self.device = device = needs.device
        self.nbytes = nbytes = needs.nbytes
        self.stream = stream
        self.node_stream = node_stream
        self.copies = torch.Stream(device)
        with near(device):
            self.pinned = [_pinned(nbytes) for _ in range(PINNED * needs.reads)]
            self.header = _pinned(HEADER_BYTES)
            self.refused = torch.zeros(1, dtype=torch.int32, pin_memory=True)
            """Set by the device when it does not unpack a bucket because of its header: the expected number + 1."""
        with stream:  # so that what was here before is over before a bucket is
            self.buckets = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(needs.buckets)]
            self.stopped = torch.zeros(1, dtype=torch.int32, device=device)
            """Set with it, for the device: what comes after such a bucket is not unpacked either."""
        self._copied = [torch.Event(device) for _ in range(PINNED)]
        """By pinned buffer: the last copy out of it."""
        self._filled = [torch.Event(device) for _ in self.buckets]
        """By device buffer: the last copy into it."""
        self._streams = (stream,) if node_stream == stream else (stream, node_stream)
        self._used = [[torch.Event(device) for _ in self._streams] for _ in self.buckets]
        """By device buffer: the last use of what was in it, on each stream."""
        self._arrived = torch.Event(device)

    @property
    def guards(self) -> bool:
        """Whether it is made for buckets whose headers the device checks."""
        return self.needs.buckets == GUARDED_BUCKETS

    @property
    def footprint(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in (*self.pinned, *self.buckets))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What is queued inside is on the node's stream, between the waits for and of the caller's."""
        self.enter()
        try:
            with self.node_stream:
                yield
        finally:
            self.leave()

    def enter(self) -> None:
        """What the caller has queued, and earlier loads, come before this load."""
        caller = torch.accelerator.current_stream(self.device)
        for stream in self._streams:
            if caller != stream:
                stream.wait_stream(caller)
        self.refused.zero_()
        with self.node_stream:
            self.stopped.zero_()
        for used in self._used:
            self._record(used)

    def leave(self) -> None:
        """What the caller queues from now on comes after this load, and so does the memory's next use."""
        self.stream.wait_stream(self.copies)
        if self.node_stream != self.stream:
            self.stream.wait_stream(self.node_stream)
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
        self._filled[bucket].record(self.copies)

    def wait_until_unpacked(self, bucket: int) -> None:
        """The copy stream waits until nothing uses a device buffer any more."""
        for event in self._used[bucket]:
            self.copies.wait_event(event)

    def wait_for_copy(self, bucket: int) -> None:
        """The streams wait for what was copied into a device buffer last."""
        for stream in self._streams:
            stream.wait_event(self._filled[bucket])

    def wait_for_each_other(self, bucket: int) -> None:
        """Each stream waits until the other does not use a device buffer any more."""
        if len(self._streams) > 1:
            for stream, event in zip(reversed(self._streams), self._used[bucket], strict=True):
                stream.wait_event(event)

    def unpacked(self, bucket: int) -> None:
        """Everything queued on the streams so far is what used a device buffer."""
        self._record(self._used[bucket])

    def finish_unpacking(self, bucket: int, check: Callable[[], None]) -> None:
        """The host waits until a device buffer is unpacked. ``check``: as for :func:`wait_for`."""
        wait_for(self._used[bucket][-1], check)

    def _record(self, events: list[torch.Event]) -> None:
        for stream, event in zip(self._streams, events, strict=True):
            event.record(stream)

    def fetch_header(self, bucket: int, check: Callable[[], None]) -> Tensor:
        """The first HEADER_BYTES of a device buffer, on the host, which waits for them alone. Called on the node's stream.

        ``check``: as for :func:`wait_for`.
        """
        self.header.copy_(self.buckets[bucket][:HEADER_BYTES], non_blocking=True)
        self._arrived.record(self.node_stream)
        wait_for(self._arrived, check)
        return self.header

    def wait_for_streams(self, check: Callable[[], None]) -> None:
        """The host waits for all that is queued on the streams. ``check``: as for :func:`wait_for`."""
        for stream in self._streams:
            self._arrived.record(stream)
            wait_for(self._arrived, check)

    def drained(self, seconds: float) -> bool:
        """Whether all that is queued on the streams is done, after so long at most."""
        return all_done(self.device, (*self._streams, self.copies), seconds)

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


def all_done(device: torch.device, streams: Sequence[torch.Stream], seconds: float) -> bool:
    """Whether all that is queued on the streams is done, after so long at most."""
    events = [(stream, torch.Event(device)) for stream in streams]
    until = time.monotonic() + seconds
    try:
        for stream, event in events:
            event.record(stream)
        while not all(event.query() for _, event in events):
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_SECONDS)
    except Exception:  # of what was queued; the device is of no more use
        return False
    return True


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
