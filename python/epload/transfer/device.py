"""Holds what a transfer into a device needs there: its streams, the pipe through which bytes come from the host, and the device
buffers of buckets that move between ranks, with the events that say when a buffer may be used again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from epload.planning.buckets import HEADER_BYTES
from epload.transfer.device_pipe import DevicePipe

BUFFERS = 2
_POLL_SECONDS = 50e-6
"""Between two looks at an event; a bucket takes some milliseconds."""
DRAIN_SECONDS = 0.5
"""Maximum seconds that an aborted communicator may take to leave the device."""
_LEAKED: list[DeviceStaging] = []


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
        self.copies = torch.Stream(device)
        """Stream on which buffers are filled."""
        self.entry = stream or torch.Stream(device)
        """Stream on which buckets come from their senders."""
        self.forwarding = stream or torch.Stream(device)
        """Stream on which buckets go on to other ranks."""
        self.stream = stream or self.copies
        """Stream of all other work."""
        self.pipe = DevicePipe.of(device, ranks) if ranks > 0 else None
        buffers = range(BUFFERS if nbytes > 0 else 0)
        with self.stream, torch.inference_mode(False):  # so that what was here before is over before a bucket is
            self.headers = torch.empty(BUFFERS, per_wave, HEADER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
            """Headers of the buckets in each buffer, once they have arrived."""
            self.buckets = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in buffers]
        self.moved, self.filled, self.used = ([torch.Event(device) for _ in buffers] for _ in range(3))
        """Events of the last move, the last fill and the last use of each buffer."""
        for event in self.used:
            event.record(self.stream)

    @property
    def streams(self) -> set[torch.Stream]:
        return {self.copies, self.entry, self.forwarding, self.stream}

    @property
    def footprint(self) -> int:
        """Bytes of all buffers."""
        return len(self.buckets) * self.nbytes + (self.pipe.footprint if self.pipe is not None else 0)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Queues what is done inside on the stream, after what the caller has queued; orders what the caller queues from then on,
        and the memory's next use, after that. After an error, the memory is kept until the process ends if something may still
        use it."""
        caller = torch.accelerator.current_stream(self.device)
        for stream in self.streams - {caller}:
            stream.wait_stream(caller)
        try:
            with self.stream:
                yield
        except BaseException:
            if not self._drained():
                _LEAKED.append(self)
            raise
        finally:
            for stream in self.streams - {self.stream}:
                self.stream.wait_stream(stream)
            if caller != self.stream:
                caller.wait_stream(self.stream)

    def _drained(self) -> bool:
        """Returns True if all that is queued on the streams is done, after ``DRAIN_SECONDS`` at most."""
        until = time.monotonic() + DRAIN_SECONDS
        try:
            events = [stream.record_event() for stream in self.streams]
            while not all(event.query() for event in events):
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
