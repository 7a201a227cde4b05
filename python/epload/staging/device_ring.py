"""The device buffers of one rank, paced by events: a bucket is filled through the pipe from the host, or by another rank."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from epload.errors import RemoteFailure
from epload.planning.schedule import Flow
from epload.planning.waves import Wave
from epload.report import TransferReport
from epload.staging.affinity import move_thread
from epload.staging.device import DRAIN_SECONDS, DeviceStaging


class DeviceRing:
    """See :class:`~epload.staging.ring.Ring`. Every wave is one bucket.

    Moving and unpacking queue their work on the staging's stream, in the same order on every rank.
    """

    lanes = (("read",), ("move", "unpack"))
    checks_moved = True

    def __init__(self, staging: DeviceStaging, flow: Flow, report: TransferReport, phase: str) -> None:
        """``phase``: of the report, that waiting for a bucket from another rank counts as."""
        self._staging = staging
        self._flow = flow
        self._report = report
        self._phase = phase
        self._turn = threading.Condition()
        self._ready = -1
        """The last wave of this rank's that is being filled."""
        self._joined = -1
        """The last wave of this rank's that the stream waits for."""
        self._released = 0
        """Waves whose buffers may be filled again, once the work that is queued on them is done."""
        self._ended = self._failed = False

    def enter_thread(self) -> None:
        torch.accelerator.set_device_index(self._staging.device)
        torch.accelerator.set_stream(self._staging.copies)  # of the thread that reads, until it ends
        move_thread(self._staging.device)

    def acquire(self, wave: Wave) -> None:
        if self._wait_for(lambda: self._released > wave.index - len(self._staging.buckets)):
            self._staging.wait_until_used(self._place(wave), self._check)

    def ready(self, wave: Wave) -> None:
        self._staging.filled(self._place(wave))
        with self._turn:
            self._ready = wave.index
            self._turn.notify_all()

    def begin_move(self, wave: Wave) -> None:
        self._join(wave)

    def begin_unpack(self, wave: Wave) -> None:
        self._join(wave)

    def _join(self, wave: Wave) -> None:
        """The stream waits for what this rank reads."""
        if wave.index <= self._joined or self._flow.reader(wave.numbers[0]) != self._flow.rank:
            return
        if self._wait_for(lambda: self._ready >= wave.index):
            self._staging.wait_until_filled(self._place(wave))
            self._joined = wave.index

    def bucket(self, wave: Wave, i: int) -> Tensor:
        return self._staging.buckets[self._place(wave)][: wave.ends[i]]

    read_buffer = bucket

    def sent(self, wave: Wave, i: int) -> Tensor:
        multiple = self._flow.stripes_multiple
        return self._staging.buckets[self._place(wave)][: -(-wave.ends[i] // multiple) * multiple]

    def moved(self, wave: Wave) -> None:
        pass

    def header(self, wave: Wave, i: int) -> Tensor:
        """Waits for the bucket: one that was aborted must not reach the model, and no rank may begin a broadcast that its reader
        will not join."""
        with self._report.timed(self._phase):
            return self._staging.fetch_header(self._place(wave), self._check)

    def checked(self, wave: Wave, last: bool) -> None:
        pass

    def to_verify(self, wave: Wave) -> list[int]:
        return [0] if self._flow.reader(wave.numbers[0]) != self._flow.rank else []

    def verified(self, wave: Wave) -> None:
        pass

    def unpacked(self, wave: Wave) -> None:
        self._staging.used(self._place(wave))

    def release(self, wave: Wave) -> None:
        with self._turn:
            self._released = wave.index + 1
            self._turn.notify_all()

    def finish(self) -> None:
        """A reader does not wait for the headers of its own buckets. If another rank ends while it receives the last ones, this
        rank has to notice here: what comes later may wait for the stream in the driver."""
        with self._report.timed(self._phase):
            self._staging.wait(self._check)

    def end(self) -> None:
        with self._turn:
            self._ended = True
            self._turn.notify_all()

    def fail(self) -> None:
        with self._turn:
            self._failed = True
            self._turn.notify_all()

    def drained(self) -> bool:
        return self._staging.drained(DRAIN_SECONDS)

    def abandon(self) -> None:
        self._staging.abandon()

    def _place(self, wave: Wave) -> int:
        """The number of its device buffer."""
        return wave.index % len(self._staging.buckets)

    def _wait_for(self, condition: Callable[[], bool]) -> bool:
        """False if the transfer has ended."""
        with self._turn:
            self._turn.wait_for(lambda: self._failed or self._ended or condition())
            self._check()
            return not self._ended

    def _check(self) -> None:
        if self._failed:
            raise RemoteFailure("another rank failed")
