"""The staging buffers of a sync on one rank's device: each takes a wave, which is packed, passed on and unpacked on streams of
their own, in an order that events keep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from epload.errors import RemoteFailure, WaitTimeout
from epload.planning.buckets import HEADER_BYTES
from epload.planning.schedule import Roles
from epload.planning.waves import Wave
from epload.report import TransferReport
from epload.transfer.affinity import move_thread
from epload.transfer.device import DRAIN_SECONDS, all_done, wait_for

BUFFERS = 2
_ABANDONED: list[ExchangeStaging] = []


class ExchangeStaging:
    """Device memory for two waves, and streams. Kept from version to version."""

    def __init__(self, device: torch.device, nbytes: int, most: int) -> None:
        """
        Args:
            nbytes: of the largest wave.
            most: buckets in a wave.
        """
        self.device = device
        self.entry, self.spread, self.local = (torch.Stream(device) for _ in range(3))
        """Streams: for data from a sender; for data passed on, between nodes and inside the node; for packing and unpacking."""
        with self.local:
            self.buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self.headers = torch.empty(BUFFERS, most, HEADER_BYTES, dtype=torch.uint8, pin_memory=True)
        """Headers of the buckets in each buffer, once they have arrived."""
        self.filled, self.moved, self.unpacked = ([torch.Event(device) for _ in range(BUFFERS)] for _ in range(3))
        """Events of each buffer: packed; passed on and received; unpacked."""

    @property
    def streams(self) -> tuple[torch.Stream, ...]:
        return self.entry, self.spread, self.local

    @property
    def footprint(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def enter(self) -> None:
        """Orders what follows after what the caller has queued on its current stream."""
        caller = torch.accelerator.current_stream(self.device)
        for stream in self.streams:
            stream.wait_stream(caller)
        for event in self.unpacked:
            event.record(self.local)


class ExchangeRing:
    """See :class:`~epload.transfer.ring.Ring`. A rank either reads all of its waves or receives them."""

    lanes = (("read",), ("move",), ("unpack",))
    checks_moved = False

    def __init__(
        self, staging: ExchangeStaging, flow: Roles, report: TransferReport, seconds: float, verifies: bool
    ) -> None:
        """
        Args:
            seconds: within which a wave has to arrive once it is its turn.
            verifies: whether checksums are of what is in these buffers, and not of what the sink has made of it.
        """
        self._staging = staging
        self._flow = flow
        self._report = report
        self._seconds = seconds
        self._verifies = verifies
        self._turn = threading.Condition()
        self._ready = self._moved = self._released = 0
        """Waves whose packing is queued, whose moving is queued, and whose buffers may be used again."""
        self._failed = False
        staging.enter()

    def enter_thread(self) -> None:
        torch.accelerator.set_device_index(self._staging.device)
        move_thread(self._staging.device)

    def wait(self, step: str, wave: Wave) -> None:
        staging, place = self._staging, self._place(wave)
        if step == "read":
            torch.accelerator.set_stream(staging.local)  # of the thread that packs, until it ends
        if step == "unpack":
            with self._report.timed("inter_node"):
                self._wait_until(lambda: self._moved > wave.index)
                self._wait_for(staging.moved[place], wave)
        elif step == "end":
            for stream in staging.streams:
                event = torch.Event(staging.device)
                event.record(stream)
                self._wait_for(event, None)
        elif step == "move" and self._reads(wave):
            self._wait_until(lambda: self._ready > wave.index)
            staging.entry.wait_event(staging.filled[place])
        else:
            self._wait_until(lambda: self._released > wave.index - BUFFERS)
            for stream in (staging.entry, staging.spread) if step == "move" else ():
                stream.wait_event(staging.unpacked[place])

    def done(self, step: str, wave: Wave, last: bool = False) -> None:
        staging, place = self._staging, self._place(wave)
        if step == "read":
            staging.filled[place].record(staging.local)
        elif step == "move":
            if not self._reads(wave):
                with staging.spread:
                    for i in range(len(wave.numbers)):
                        header = self.bucket(wave, i)[:HEADER_BYTES]
                        staging.headers[place, i].copy_(header, non_blocking=True)
            staging.moved[place].record(staging.spread)
        elif step == "unpack":
            staging.unpacked[place].record(staging.local)
        with self._turn:
            self._ready += step == "read"
            self._moved += step == "move"
            self._released += step == "unpack"
            self._turn.notify_all()

    def bucket(self, wave: Wave, i: int) -> Tensor:
        return self._staging.buffers[self._place(wave)][wave.begins[i] : wave.ends[i]]

    def header(self, wave: Wave, i: int) -> Tensor:
        return self._staging.headers[self._place(wave), i]

    def verify(self, wave: Wave, check: Callable[[int], None]) -> None:
        if self._verifies and not self._reads(wave):
            for i in range(len(wave.numbers)):
                check(i)

    def stop(self, failed: bool = True) -> None:
        with self._turn:
            self._failed = True
            self._turn.notify_all()

    def abandon(self) -> None:
        if not all_done(self._staging.device, self._staging.streams, DRAIN_SECONDS):
            _ABANDONED.append(self._staging)

    def _place(self, wave: Wave) -> int:
        """The number of its buffer."""
        return wave.index % BUFFERS

    def _reads(self, wave: Wave) -> bool:
        return self._flow.reader(wave.numbers[0]) == self._flow.rank

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for another thread of this rank, whose own waits for others are limited in time."""
        with self._turn:
            self._turn.wait_for(lambda: self._failed or condition())
        self._check()

    def _wait_for(self, event: torch.Event, wave: Wave | None) -> None:
        until = time.monotonic() + self._seconds

        def check() -> None:
            self._check()
            if time.monotonic() > until:
                what = f"wave {wave.index}" if wave is not None else "the last waves"
                raise WaitTimeout(
                    f"rank {self._flow.rank}: {what} did not pass {self._staging.device} within {self._seconds:.0f} s"
                )

        wait_for(event, check)

    def _check(self) -> None:
        if self._failed:
            raise RemoteFailure("another rank failed")
