"""Holds what a transfer into a device needs there: its streams, the pipe through which bytes come from the host, and the device
buffers of buckets that move between ranks, with the events that say when a buffer may be used again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from epload.core import threads
from epload.errors import LoadError
from epload.native import ops
from epload.planning.buckets import HEADER_BYTES
from epload.transfer.device_pipe import DevicePipe

BUFFERS = 2
_POLL_SECONDS = 50e-6
"""Between two looks at an event; a bucket takes some milliseconds."""
DRAIN_SECONDS = 0.5
"""Maximum seconds that an aborted communicator may take to leave the device."""
_ABANDONED: list[DeviceStaging] = []


class DeviceStaging:
    """Kept between transfers. Each event is recorded and waited for by one thread at a time."""

    def __init__(
        self, device: torch.device, nbytes: int, stream: torch.Stream | None = None, per_wave: int = 1, ranks: int = 0
    ) -> None:
        """
        Args:
            nbytes: of one buffer; 0 where no bucket comes to the device.
            stream: for all but filling buffers. If None, what comes from a sender, what is passed on, and packing and unpacking
                have streams of their own.
            per_wave: maximum number of buckets in a buffer.
            ranks: of the node, which share its processors, if this rank brings bytes to the device; else 0.
        """
        self.device = device
        self.nbytes = nbytes
        self.ranks = ranks
        if stream is not None:
            self.stream = self.entry = self.spread = stream
            self.copies = torch.Stream(device)
        else:
            self.entry, self.spread, self.copies = (torch.Stream(device) for _ in range(3))
            self.stream = self.copies
        self.pipe = DevicePipe.of(device, ranks) if ranks > 0 else None
        self.headers = torch.empty(BUFFERS, per_wave, HEADER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        """Headers of the buckets in each buffer, once they have arrived."""
        count = BUFFERS if nbytes > 0 else 0
        with self.stream:  # so that what was here before is over before a bucket is
            self.buckets = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
        self.moved, self._filled, self._used = ([torch.Event(device) for _ in range(count)] for _ in range(3))
        """Events of the last move, the last fill and the last use of each buffer."""
        for event in self._used:
            event.record(self.stream)

    def covers(self, device: torch.device, nbytes: int, ranks: int) -> bool:
        """Returns True if it serves a transfer that needs this; see the arguments of ``__init__``."""
        return self.device == device and self.nbytes >= nbytes and (self.ranks > 0 or ranks == 0)

    @property
    def streams(self) -> set[torch.Stream]:
        return {self.copies, self.entry, self.spread, self.stream}

    @property
    def footprint(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buckets) + (self.pipe.footprint if self.pipe is not None else 0)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Queues what is done inside on the stream, between the waits for and of the caller's. After an error, the memory is kept
        until the process ends if something may still use it."""
        self.enter()
        try:
            with self.stream:
                yield
        except BaseException:
            if not self._drained():
                _ABANDONED.append(self)
            raise
        finally:
            self.leave()

    def enter(self) -> None:
        """Orders the transfer after what the caller has queued."""
        caller = torch.accelerator.current_stream(self.device)
        for stream in self.streams - {caller}:
            stream.wait_stream(caller)

    def leave(self) -> None:
        """Orders what the caller queues from now on, and the memory's next use, after the transfer."""
        for stream in self.streams - {self.stream}:
            self.stream.wait_stream(stream)
        caller = torch.accelerator.current_stream(self.device)
        if caller != self.stream:
            caller.wait_stream(self.stream)

    def wait_until_used(self, bucket: int, check: Callable[[], None]) -> None:
        """Waits on the host, as :func:`wait_for` does, until nothing uses a buffer any more."""
        wait_for(self._used[bucket], check)
        self.copies.wait_event(self._used[bucket])

    def wait_until_free(self, bucket: int) -> None:
        """Has the streams that buckets arrive on wait until nothing uses a buffer any more."""
        for stream in {self.entry, self.spread}:
            stream.wait_event(self._used[bucket])

    def filled(self, bucket: int) -> None:
        """Says that what is queued on the stream for copies so far is what has filled a buffer."""
        self._filled[bucket].record(self.copies)

    def wait_until_filled(self, bucket: int) -> None:
        """Has the stream that passes a bucket on wait for what filled it."""
        self.entry.wait_event(self._filled[bucket])

    def used(self, bucket: int) -> None:
        """Says that what is queued on the stream so far is what used a buffer."""
        self._used[bucket].record(self.stream)

    def _drained(self) -> bool:
        """Returns True if all that is queued on the streams is done, after ``DRAIN_SECONDS`` at most."""
        events = [(stream, torch.Event(self.device)) for stream in self.streams]
        until = time.monotonic() + DRAIN_SECONDS
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


def wait_for(event: torch.Event, check: Callable[[], None]) -> None:
    """Waits on the host for an event, but not in the driver, which no other thread could end: a collective before the event does
    not end if another rank has.

    ``check``: called again and again meanwhile; an error that it raises ends the wait.
    """
    while not event.query():
        check()
        time.sleep(_POLL_SECONDS)
    check()  # it may be that the collective was aborted
    event.synchronize()  # raises the error of what was queued before it, if there was one


class DeviceResources:
    """Keeps one loader's stream and staging from load to load, made when first needed."""

    def __init__(self, stream: torch.Stream | None) -> None:
        """``stream``: the caller's, if one was passed."""
        self._given = stream
        self._own: dict[torch.device, torch.Stream] = {}
        self.staging: DeviceStaging | None = None
        self._preparing: threading.Thread | None = None
        self._pipe: DevicePipe | None = None
        """Made beforehand, until the staging has it."""

    def stream(self, device: torch.device) -> torch.Stream:
        """Returns the caller's stream, or the loader's own."""
        if self._given is not None:
            return self._given
        if device not in self._own:
            self._own[device] = torch.Stream(device)
        return self._own[device]

    def describe_stream(self, device: torch.device) -> str:
        """Describes the stream for the report."""
        stream = self.stream(device)
        return f"{stream.device} {stream.stream_id}, {'the loader' if self._given is None else 'the caller'}'s"

    def prepare(self, device: torch.device, ranks: int) -> None:
        """Begins to make the pipe of a first load's staging, and to open what the device runs, while the load is planned."""
        if self.staging is not None or self._preparing is not None:
            return

        def make() -> None:
            torch.accelerator.set_device_index(device)
            with suppress(Exception):  # it is made again, and fails again, where that is reported
                if device.type == "cuda":
                    ops.cuda_obstacle(device)
                self._pipe = DevicePipe.of(device, ranks)

        with suppress(LoadError):  # the process has reached its limit on threads
            self._preparing = threads.start("epload-pipe", make)

    def _prepared(self) -> None:
        """Waits for what :meth:`prepare` has begun."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def reserve(self, device: torch.device, nbytes: int, ranks: int) -> DeviceStaging:
        """Returns staging that is kept for the next load; see the arguments of :class:`DeviceStaging`."""
        self._prepared()
        staging, self.staging = self.staging, None
        if staging is None or not staging.covers(device, nbytes, ranks):
            staging = None  # before more is allocated
            staging = DeviceStaging(device, nbytes, self.stream(device), ranks=ranks)
        self.staging, self._pipe = staging, None
        return staging

    def forget(self) -> None:
        """Drops the staging, and what was to become one."""
        self._prepared()
        self.staging = self._pipe = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enters the staging, if there is one."""
        if self.staging is None:
            yield
            return
        with self.staging.entered():
            yield
