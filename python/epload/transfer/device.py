"""Holds what a load into a device needs there: its stream, the pipe through which bytes come from the host, and the device
buffers of buckets that move between ranks, with the events that say when a buffer may be used again.

A bucket is filled through the pipe on the stream for copies; everything after that is on the load's one stream. While a buffer is
in use, the other is filled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from epload.planning.buckets import HEADER_BYTES
from epload.transfer.device_pipe import DevicePipe

BUCKETS = 2
"""Device buffers."""
_POLL_SECONDS = 50e-6
"""Between two looks at an event; a bucket takes some milliseconds."""
DRAIN_SECONDS = 0.5
"""Maximum seconds that an aborted communicator may take to leave the device."""
_ABANDONED: list[DeviceStaging] = []


class StagingNeeds(NamedTuple):
    """The device resources that a load requires."""

    device: torch.device
    nbytes: int
    """Bytes of one device buffer; 0 where no bucket comes to the device."""
    ranks: int
    """Number of ranks of the node, which share its processors, if this rank brings bytes to the device; else 0."""

    def covers(self, other: StagingNeeds) -> bool:
        """Returns True if a staging made for these serves a load that needs the other."""
        return self.device == other.device and self.nbytes >= other.nbytes and (self.ranks > 0 or other.ranks == 0)


class DeviceStaging:
    """Kept between loads. The events are recorded and waited for by one thread at a time."""

    def __init__(self, needs: StagingNeeds, stream: torch.Stream) -> None:
        """``stream``: of the device."""
        self.needs = needs
        self.device = device = needs.device
        self.stream = stream
        self.copies = torch.Stream(device)
        """Stream on which buckets are filled, concurrently with the load's stream."""
        self.pipe = DevicePipe.of(device, needs.ranks) if needs.ranks > 0 else None
        self.header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        with stream:  # so that what was here before is over before a bucket is
            count = BUCKETS if needs.nbytes > 0 else 0
            self.buckets = [torch.empty(needs.nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
        self._filled = [torch.Event(device) for _ in self.buckets]
        """Event of the last fill of each buffer."""
        self._used = [torch.Event(device) for _ in self.buckets]
        """Event of the last use of each buffer's content."""
        for used in self._used:
            used.record(stream)
        self._arrived = torch.Event(device)

    @property
    def footprint(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buckets) + (self.pipe.footprint if self.pipe is not None else 0)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Queues what is done inside on the load's stream, between the waits for and of the caller's."""
        self.enter()
        try:
            with self.stream:
                yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Orders this load after what the caller has queued."""
        caller = torch.accelerator.current_stream(self.device)
        self.copies.wait_stream(caller)  # buckets may be filled from tensors on the device
        if caller != self.stream:
            self.stream.wait_stream(caller)

    def leave(self) -> None:
        """Orders what the caller queues from now on, and the memory's next use, after this load."""
        self.stream.wait_stream(self.copies)
        caller = torch.accelerator.current_stream(self.device)
        if caller != self.stream:
            caller.wait_stream(self.stream)

    def wait_until_used(self, bucket: int, check: Callable[[], None]) -> None:
        """The host and the stream for copies wait until nothing uses a buffer any more. ``check``: as for :func:`wait_for`."""
        wait_for(self._used[bucket], check)
        self.copies.wait_event(self._used[bucket])

    def filled(self, bucket: int) -> None:
        """Says that what is queued on the stream for copies so far is what has filled a buffer."""
        self._filled[bucket].record(self.copies)

    def wait_until_filled(self, bucket: int) -> None:
        """The load's stream waits for what filled a buffer last."""
        self.stream.wait_event(self._filled[bucket])

    def used(self, bucket: int) -> None:
        """Everything queued on the load's stream so far is what used a buffer."""
        self._used[bucket].record(self.stream)

    def fetch_header(self, bucket: int, check: Callable[[], None]) -> Tensor:
        """The first HEADER_BYTES of a buffer, on the host, which waits for them alone. Called on the load's stream.

        ``check``: as for :func:`wait_for`.
        """
        self.header.copy_(self.buckets[bucket][:HEADER_BYTES], non_blocking=True)
        self.wait(check)
        return self.header

    def wait(self, check: Callable[[], None]) -> None:
        """The host waits for all that is queued on the load's stream. ``check``: as for :func:`wait_for`."""
        self._arrived.record(self.stream)
        wait_for(self._arrived, check)

    def drained(self) -> bool:
        """Returns True if all that is queued on the streams is done, after ``DRAIN_SECONDS`` at most."""
        return all_done(self.device, (self.stream, self.copies), DRAIN_SECONDS)

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
    """Returns True if all that is queued on the streams is done, after so long at most."""
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
