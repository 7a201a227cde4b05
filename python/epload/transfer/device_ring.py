"""The device buffers of one rank, paced by events: a bucket is filled from the host or from tensors, or by another rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from epload.errors import RemoteFailure, WaitTimeout
from epload.planning.buckets import HEADER_BYTES
from epload.planning.waves import Wave
from epload.transfer.affinity import move_thread
from epload.transfer.context import TransferContext
from epload.transfer.device import BUFFERS, DeviceStaging, wait_for


class DeviceRing:
    """See :class:`~epload.transfer.host_ring.HostRing`. A rank either fills all buckets of a wave or receives them."""

    checks_moved = False

    def __init__(
        self,
        staging: DeviceStaging,
        context: TransferContext,
        phase: str,
        seconds: float,
        moves: bool = True,
        verifies: bool = True,
    ) -> None:
        """
        Args:
            phase: of the report, that waiting for a wave from another rank counts as.
            seconds: within which a wave has to arrive once it is its turn.
            moves: False if this rank passes nothing on and receives nothing.
            verifies: whether checksums are of what is in these buffers, and not of what the sink has made of it.
        """
        # Where transfers end in order, no rank may begin to move a wave before the headers of the one before are checked: its
        # reader may have aborted the transfer, and not join.
        self._in_order = context.ends_in_order
        self.threads: tuple[tuple[str, ...], ...] = (
            (("read",), ("move", "unpack")) if self._in_order else (("read",), ("move",), ("unpack",))
        )
        self.staging = staging
        self._flow = context.flow
        self._report = context.report
        self._phase = phase
        self._moves = moves
        self._seconds = seconds
        self._verifies = verifies
        self._changed = threading.Condition()
        self._done = {"read": 0, "move": 0, "unpack": 0}
        """The number of waves for which each step is queued."""
        self._ended = self._failed = False

    def enter_thread(self) -> None:
        torch.accelerator.set_device_index(self.staging.device)
        torch.accelerator.set_stream(self.staging.copies)  # of the thread, until it ends
        move_thread(self.staging.device)

    def wait(self, step: str, wave: Wave) -> None:
        staging, number, fills = self.staging, wave.index % BUFFERS, self._fills(wave)
        if step == "end":
            # A reader does not wait for the headers of its own buckets. If another rank ends while it receives the last ones,
            # this rank has to notice here: what comes later may wait for the stream in the driver.
            with self._report.timed(self._phase):
                for stream in staging.streams:
                    event = torch.Event(staging.device)
                    event.record(stream)
                    self._wait_for(event, "the last waves")
        elif step == "read":
            self._wait_until("unpack", wave.index - BUFFERS + 1)
            if not self._ended:
                self._wait_for(staging.used[number], f"what was in the buffer of wave {wave.index}")
                staging.copies.wait_event(staging.used[number])
        elif step == "unpack" and not fills:
            with self._report.timed(self._phase):
                self._wait_until("move", wave.index + 1)
                self._wait_for(staging.moved[number], f"wave {wave.index}")
        elif step == "unpack" and self._moves:
            self._wait_until("move", wave.index + 1)
            staging.stream.wait_event(staging.moved[number])
        elif fills:  # to be moved, or unpacked where nothing moves
            self._wait_until("read", wave.index + 1)
            staging.entry.wait_event(staging.filled[number])
        else:
            self._wait_until("unpack", wave.index - BUFFERS + 1)
            for stream in {staging.entry, staging.forwarding}:
                stream.wait_event(staging.used[number])

    def done(self, step: str, wave: Wave, last: bool = False) -> None:
        staging, number = self.staging, wave.index % BUFFERS
        if step == "read":
            staging.filled[number].record(staging.copies)
        elif step == "unpack":
            staging.used[number].record(staging.stream)
        else:
            if not self._fills(wave):
                with staging.forwarding:
                    for i in range(len(wave.numbers)):
                        self.header(wave, i).copy_(self.bucket(wave, i)[:HEADER_BYTES], non_blocking=True)
            staging.moved[number].record(staging.forwarding)
        with self._changed:
            self._done[step] = wave.index + 1
            self._changed.notify_all()

    def bucket(self, wave: Wave, i: int, multiple: int = 1) -> Tensor:
        """Returns the bucket, and bytes without meaning behind it that make its size a multiple."""
        begin = wave.begins[i]
        nbytes = -(-(wave.ends[i] - begin) // multiple) * multiple
        return self.staging.buckets[wave.index % BUFFERS][begin : begin + nbytes]

    def header(self, wave: Wave, i: int) -> Tensor:
        return self.staging.headers[wave.index % BUFFERS, i]

    def verify(self, wave: Wave, check: Callable[[int], None]) -> None:
        if self._verifies and not self._fills(wave):
            for i in range(len(wave.numbers)):
                check(i)

    def stop(self, failed: bool = True) -> None:
        with self._changed:
            if failed or not self._in_order:  # a rank that moves on its own cannot end in order
                self._failed = True
            else:
                self._ended = True
            self._changed.notify_all()

    def _fills(self, wave: Wave) -> bool:
        return self._flow.reader(wave.numbers[0]) == self._flow.rank

    def _wait_until(self, step: str, count: int) -> None:
        """Waits for another thread of this rank, whose own waits for other ranks are limited in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._ended or self._done[step] >= count)
        self._check()

    def _wait_for(self, event: torch.Event, what: str) -> None:
        until = time.monotonic() + self._seconds

        def check() -> None:
            self._check()
            if time.monotonic() > until:
                raise WaitTimeout(
                    f"rank {self._flow.rank}: {what} did not pass {self.staging.device} within {self._seconds:.0f} s"
                )

        wait_for(event, check)

    def _check(self) -> None:
        if self._failed:
            raise RemoteFailure("another rank failed")
