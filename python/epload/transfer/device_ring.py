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
from epload.transfer.affinity import move_thread
from epload.transfer.device import DeviceStaging


class DeviceRing:
    """See :class:`~epload.transfer.ring.Ring`. Every wave is one bucket.

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

    def wait(self, step: str, wave: Wave) -> None:
        if step == "read":
            if self._wait_for(lambda: self._released > wave.index - len(self._staging.buckets)):
                self._staging.wait_until_used(self._place(wave), self._check)
        elif step == "end":
            # A reader does not wait for the headers of its own buckets. If another rank ends while it receives the last ones,
            # this rank has to notice here: what comes later may wait for the stream in the driver.
            with self._report.timed(self._phase):
                self._staging.wait(self._check)
        elif wave.index > self._joined and self._reads(wave) and self._wait_for(lambda: self._ready >= wave.index):
            self._staging.wait_until_filled(self._place(wave))
            self._joined = wave.index

    def done(self, step: str, wave: Wave, last: bool = False) -> None:
        if step == "read":
            self._staging.filled(self._place(wave))
        if step == "unpack":
            self._staging.used(self._place(wave))
        with self._turn:
            self._ready = wave.index if step == "read" else self._ready
            self._released = wave.index + 1 if step == "unpack" else self._released
            self._turn.notify_all()

    def bucket(self, wave: Wave, i: int) -> Tensor:
        return self._staging.buckets[self._place(wave)][: wave.ends[i]]

    def sent(self, wave: Wave) -> Tensor:
        """Returns the bucket, and bytes without meaning behind it that make whole stripes of it."""
        multiple = self._flow.stripes_multiple
        return self._staging.buckets[self._place(wave)][: -(-wave.ends[0] // multiple) * multiple]

    def header(self, wave: Wave, i: int) -> Tensor:
        """Waits for the bucket: one that was aborted must not reach the model, and no rank may begin a broadcast that its reader
        will not join."""
        with self._report.timed(self._phase):
            return self._staging.fetch_header(self._place(wave), self._check)

    def verify(self, wave: Wave, check: Callable[[int], None]) -> None:
        if not self._reads(wave):
            check(0)

    def stop(self, failed: bool = True) -> None:
        with self._turn:
            self._failed, self._ended = self._failed or failed, self._ended or not failed
            self._turn.notify_all()

    def abandon(self) -> None:
        if not self._staging.drained():
            self._staging.abandon()

    def _reads(self, wave: Wave) -> bool:
        return self._flow.reader(wave.numbers[0]) == self._flow.rank

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
