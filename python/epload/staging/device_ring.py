"""The staging buffers of one rank on a device, paced by events: a bucket goes from pinned memory into a device buffer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from epload.errors import RemoteFailure
from epload.planning.schedule import Flow
from epload.planning.waves import Wave
from epload.report import LoadReport
from epload.staging.affinity import move_thread
from epload.staging.device import BUFFERS, DeviceStaging


class DeviceRing:
    """See :class:`~epload.staging.ring.Ring`. Every wave is one bucket.

    Moving and unpacking queue their work on the staging's one stream, in the same order on every rank.
    """

    lanes = (("read",), ("move", "unpack"))

    def __init__(self, staging: DeviceStaging, flow: Flow, report: LoadReport, phase: str) -> None:
        """``phase``: of the report, that waiting for a bucket from another rank counts as."""
        self._staging = staging
        self._flow = flow
        self._report = report
        self._phase = phase
        self._turn = threading.Condition()
        self._ready = 0
        """Waves of this rank's whose copy to the device is queued."""
        self._joined = 0
        """Waves of this rank's that the stream waits for, or has waited for."""
        self._joined_wave = -1
        self._released = 0
        """Waves of which all work is queued."""
        self._ended = self._failed = False

    def enter_thread(self) -> None:
        torch.accelerator.set_device_index(self._staging.device)
        move_thread(self._staging.device)

    def acquire(self, wave: Wave) -> None:
        with self._report.timed("host_to_device"):
            self._staging.wait_until_copied(self._ready % BUFFERS, self._check)

    def read_buffer(self, wave: Wave, i: int) -> Tensor:
        return self._staging.pinned[self._ready % BUFFERS][: wave.ends[i]]

    def ready(self, wave: Wave) -> None:
        """Waits until the last use of the device buffer is queued."""
        if not self._wait_for(lambda: self._released > wave.index - BUFFERS):
            return
        nbytes = wave.ends[0]
        with self._report.timed("host_to_device"):
            self._staging.copy(self._ready % BUFFERS, wave.index % BUFFERS, nbytes)
        self._report.phases["host_to_device"].nbytes += nbytes
        with self._turn:
            self._ready += 1
            self._turn.notify_all()

    def begin_move(self, wave: Wave) -> None:
        if wave.index <= self._joined_wave or self._flow.reader(wave.numbers[0]) != self._flow.rank:
            return
        if self._wait_for(lambda: self._ready > self._joined):
            self._staging.wait_for_copy(self._joined % BUFFERS)
            self._joined += 1
            self._joined_wave = wave.index

    begin_unpack = begin_move

    def bucket(self, wave: Wave, i: int) -> Tensor:
        return self._staging.buckets[wave.index % BUFFERS][: wave.ends[i]]

    def moved(self, wave: Wave) -> None:
        pass

    def header(self, wave: Wave, i: int) -> Tensor:
        """Waits for the bucket: one that was aborted must not reach the model, and no rank may begin a broadcast that its reader
        will not join."""
        with self._report.timed(self._phase):
            return self._staging.fetch_header(wave.index % BUFFERS, self._check)

    def checked(self, wave: Wave, last: bool) -> None:
        pass

    def to_verify(self, wave: Wave) -> list[int]:
        return [0] if self._flow.reader(wave.numbers[0]) != self._flow.rank else []

    def verified(self, wave: Wave) -> None:
        pass

    def release(self, wave: Wave) -> None:
        self._staging.unpacked(wave.index % BUFFERS)
        with self._turn:
            self._released = wave.index + 1
            self._turn.notify_all()

    def finish(self) -> None:
        """A reader does not wait for the headers of its own buckets. If another rank ends while it receives the last ones, this
        rank has to notice here: what comes later may wait for the stream in the driver."""
        with self._report.timed(self._phase):
            self._staging.wait_for_stream(self._check)

    def end(self) -> None:
        with self._turn:
            self._ended = True
            self._turn.notify_all()

    def fail(self) -> None:
        with self._turn:
            self._failed = True
            self._turn.notify_all()

    def abandon(self) -> None:
        self._staging.abandon()

    def _wait_for(self, condition: Callable[[], bool]) -> bool:
        """False if the transfer has ended."""
        with self._turn:
            self._turn.wait_for(lambda: self._failed or self._ended or condition())
            self._check()
            return not self._ended

    def _check(self) -> None:
        if self._failed:
            raise RemoteFailure("another rank failed")
