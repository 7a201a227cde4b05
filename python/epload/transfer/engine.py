"""The engine: moves the buckets of a plan from the ranks that read them to the ranks that keep them.

A ring of staging buffers, a mover and a sink make a transfer. Reading, moving and unpacking overlap. Filling buckets, checking
their headers and ending early are here and nowhere else.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.core import threads
from epload.core.regions import Regions
from epload.errors import LoadError
from epload.observe.progress import Progress
from epload.planning.buckets import HEADER_BYTES
from epload.planning.plan import LoadPlan
from epload.planning.waves import Wave
from epload.ranks.control import Control
from epload.transfer.context import Fill, Sink, TransferContext
from epload.transfer.device import DeviceStaging
from epload.transfer.device_ring import DeviceRing
from epload.transfer.framing import list_buckets
from epload.transfer.host_ring import HostRing
from epload.transfer.movers import SLOWEST, Mover, Routes, relay
from epload.transfer.shared_memory import NodeMemory

Step = Callable[[Wave], bool]
"""Takes the next wave; False if it was the last."""
Stage = tuple[str, Callable[[], None]]
"""The stage's name, and the function that runs all of it."""


class Engine:
    """Moves some of a plan's buckets. Single use: make it, run it."""

    def __init__(
        self,
        context: TransferContext,
        waves: Sequence[Wave],
        ring: HostRing | DeviceRing,
        mover: Mover | None,
        sink: Sink,
    ) -> None:
        """``mover``: None on a rank that passes nothing on and receives nothing but from its own node's buffers."""
        self._context = context
        self._report = context.report
        self._waves = waves
        self._ring = ring
        self._mover = mover
        self._sink = sink
        self._read_outcomes: dict[int, LoadError | None] = {}
        """Error that aborts the transfer, or None, for each bucket that this rank has read."""
        self._aborted = math.inf
        """The first wave with a bucket that aborts the transfer."""
        self._failure: LoadError | None = None
        """Error of this rank, or the one in the bucket that aborted the transfer."""

    def run(self, bar: Progress) -> None:
        """``bar`` counts bytes.

        Raises:
            LoadError: a reader aborted the transfer, or what went wrong on this rank.
        """
        self._bar = bar
        if self._waves:
            with self._sink.entered():
                _run_stages(self._stages(), self._stop, self._ring.enter_thread)
                if self._mover is not None:
                    self._ring.wait("end", self._waves[-1])
        if self._failure is not None:
            raise self._failure

    def fail(self) -> None:
        """Wakes all waits: another rank cannot go on. Thread-safe."""
        self._ring.stop()

    def _stop(self, error: BaseException) -> None:
        """This rank cannot go on: the others hear why first, then its own waits are woken."""
        self._context.control.fail(error)
        self._ring.stop()

    def _stages(self) -> list[Stage]:
        steps: dict[str, Step] = {"unpack": self._unpack}
        if self._mover is not None:
            steps["move"] = self._move
        if self._context.fill is not None:
            steps["read"] = self._read
        threads = [[name for name in names if name in steps] for names in self._ring.threads]
        return [(names[0], partial(self._run, [steps[name] for name in names])) for names in threads if names]

    def _run(self, steps: Sequence[Step]) -> None:
        for wave in self._waves:
            if not all(step(wave) for step in steps):
                break

    # ---- steps ----

    def _read(self, wave: Wave) -> bool:
        context = self._context
        positions = [i for i, number in enumerate(wave.numbers) if context.flow.reader(number) == context.flow.rank]
        if not positions:
            return True
        self._ring.wait("read", wave)
        if wave.index >= self._aborted:
            return False
        numbers = [wave.numbers[i] for i in positions]
        with self._report.timed("read", list_buckets(numbers)) as span:
            for i, number in zip(positions, numbers, strict=True):
                buffer = self._ring.bucket(wave, i)
                with context.control.activity(f"reads bucket {number}"):
                    failure = context.fill_bucket(number, buffer)
                self._read_outcomes[number] = failure
                self._failure = self._failure or failure
                context.control.progress += buffer.nbytes
                span.nbytes += buffer.nbytes - HEADER_BYTES
        self._ring.done("read", wave)
        return all(self._read_outcomes[number] is None for number in numbers)

    def _move(self, wave: Wave) -> bool:
        assert self._mover is not None
        self._ring.wait("move", wave)
        self._mover(wave)
        self._ring.done("move", wave)
        if not self._ring.checks_moved:
            return True
        is_last = self._check(wave)
        self._ring.done("check", wave, is_last)
        return not is_last

    def _unpack(self, wave: Wave) -> bool:
        self._ring.wait("unpack", wave)
        if self._check(wave):
            self._ring.stop(failed=False)
            return False
        if self._context.checked:
            self._verify(wave)
        with self._report.timed("unpack", list_buckets(wave.numbers)) as span:
            for i, number in enumerate(wave.numbers):
                bucket = self._ring.bucket(wave, i)
                if self._failure is None:
                    try:
                        self._sink.unpack(number, bucket)
                    except Exception as error:  # keep receiving until a reader, who hears of it, ends the transfer for all
                        self._failure = self._context.publish_failure("unpack", [number], error)
                self._context.control.progress += bucket.nbytes
                self._bar.update(bucket.nbytes)
                span.nbytes += bucket.nbytes - HEADER_BYTES
        self._ring.done("unpack", wave)
        return True

    def _check(self, wave: Wave) -> bool:
        """Checks the headers of a wave that has arrived. Returns True if a reader has aborted the transfer in it, or before."""
        for i, number in enumerate(wave.numbers):
            if number in self._read_outcomes:
                failure = self._read_outcomes[number]
            else:
                body = self._ring.bucket(wave, i)[HEADER_BYTES:]
                failure = self._context.check(number, self._ring.header(wave, i), body)
            if failure is not None:
                self._failure = self._failure or failure
                self._aborted = min(self._aborted, wave.index)
        return wave.index >= self._aborted

    def _verify(self, wave: Wave) -> None:
        with self._report.timed("verify", list_buckets(wave.numbers)) as span:

            def check(i: int) -> None:
                number, bucket = wave.numbers[i], self._ring.bucket(wave, i)
                self._context.verify(number, bucket.cpu())
                span.nbytes += bucket.nbytes - HEADER_BYTES

            self._ring.verify(wave, check)


def through_memory(
    context: TransferContext,
    memory: NodeMemory,
    waves: Sequence[Wave],
    sink: Sink,
    routes: Routes,
    chunk_bytes: int,
) -> Engine:
    """Returns an engine whose buckets are staged in host memory.

    Args:
        memory: of the node, with buffers for the largest wave.
        routes: of the buckets that this rank passes on or receives.
        chunk_bytes: of a message.
    """
    timeout = message_timeout(context.control, waves)
    # The network's limit is over first, and its error says more.
    ring = HostRing(memory, context, 1.25 * timeout + timedelta(seconds=2))
    relays = context.flow.rank in context.flow.relays
    mover = relay(context, ring, routes, chunk_bytes, timeout.total_seconds()) if relays else None
    return Engine(context, waves, ring, mover, sink)


def filler(plan: LoadPlan, checkpoint: Checkpoint, staging: DeviceStaging | None) -> Fill:
    """Returns a function that fills buckets of a checkpoint that this rank has opened, on CPU or on the staging's device."""

    @cache
    def host_buffer() -> Tensor:
        return torch.empty(plan.largest, dtype=torch.uint8, device="cpu")

    def fill(number: int, buffer: Tensor) -> None:
        pieces = plan.buckets[number].pieces
        if buffer.is_cpu:
            checkpoint.fill(buffer, pieces)
            return
        assert staging is not None
        assert staging.pipe is not None
        if not checkpoint.fill_on_device(buffer, pieces, staging.pipe.native):
            bucket = host_buffer()[: buffer.nbytes]
            checkpoint.fill(bucket, pieces)
            Regions.of_bytes(buffer[HEADER_BYTES:], staging.pipe.native).unpack(bucket[HEADER_BYTES:])

    return fill


def message_timeout(control: Control, waves: Sequence[Wave]) -> timedelta:
    """Returns the time that a message may take, in a transfer of these waves."""
    largest = max((wave.nbytes for wave in waves), default=0)
    return control.timeout + timedelta(seconds=largest / SLOWEST)


def _run_stages(stages: Sequence[Stage], stop: Callable[[BaseException], None], prepare: Callable[[], None]) -> None:
    """Runs the stages concurrently, the last one on the calling thread. Returns when all have ended.

    If a stage raises, or the calling thread is interrupted, ``stop`` is called with the exception and must make the other stages
    end. It may be called more than once, from any thread.

    Args:
        stages: at least one.
        stop: makes the stages end.
        prepare: called first in each thread that is started.

    Raises:
        BaseException: what interrupted the run (e.g. KeyboardInterrupt), else the first exception of a stage.
        LoadError: a thread cannot be started.
    """
    failures: list[BaseException] = []
    go, ended, canceled = threading.Event(), threading.Semaphore(0), False

    def run_stage(stage: Callable[[], None], prepare: Callable[[], None] | None = None) -> None:
        try:
            if prepare is not None:
                prepare()
            stage()
        except BaseException as error:
            failures.append(error)
            stop(error)

    def run_in_thread(stage: Callable[[], None]) -> None:
        go.wait()
        if not canceled:
            try:
                run_stage(stage, prepare)
            finally:
                ended.release()

    *others, (_, last) = stages
    started: list[threading.Thread] = []
    try:
        for name, stage in others:
            started.append(threads.start(f"epload-{name}", partial(run_in_thread, stage)))
    except BaseException:  # no more threads, or an interrupt: no stage has begun
        canceled = True
        raise
    finally:
        go.set()
    run_stage(last)
    left = len(others)
    while left:
        try:
            ended.acquire()  # not join: a thread whose join was interrupted counts as ended although it runs
            left -= 1
        except BaseException as interrupt:  # the stages are ending, so keep waiting
            failures.append(interrupt)
            stop(interrupt)
    for thread in started:
        thread.join()  # what is left of it takes no time, but no thread outlives the transfer
    if failures:
        raise next((error for error in failures if not isinstance(error, Exception)), failures[0])
