"""Moves the buckets of one plan, on one rank: read -> relay -> unpack, overlapping."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from epload.checkpoint.base import Checkpoint
from epload.cluster.topology import Route
from epload.control.control import Control
from epload.errors import LoadError, RemoteFailure, WaitTimeout, message_of
from epload.native import ops
from epload.planning.plan import HEADER_BYTES, Bucket, LoadPlan
from epload.planning.schedule import Flow, Step
from epload.report import LoadReport
from epload.staging.node_memory import BUFFERS, NodeMemory
from epload.transport import pipeline
from epload.transport.framing import Framing, spell
from epload.transport.local import Local
from epload.transport.upload import Uploader

_ALIGNMENT = 64
"""Bytes; where a bucket may start in its wave."""
_ENDED = 1 << 30
"""What a rank posts that takes no further part, since a reader gave up."""
SLOWEST = 10e6
"""Bytes a second; a step that moves bytes has the timeout and what they take at this rate."""


@dataclass(frozen=True)
class _Wave:
    """Buckets that share a staging buffer."""

    numbers: range
    begins: list[int]
    """Where each starts in the buffer, bytes."""


def wave_bytes(plan: LoadPlan, per_wave: int) -> int:
    """Bytes of the largest wave."""
    waves = _waves(plan, per_wave, range(len(plan.buckets)))
    return max((_rounded(w.begins[-1] + plan.buckets[w.numbers[-1]].nbytes) for w in waves), default=0)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _waves(plan: LoadPlan, per_wave: int, buckets: range) -> list[_Wave]:
    waves = []
    for first in range(buckets.start, buckets.stop, per_wave):
        numbers = range(first, min(first + per_wave, buckets.stop))
        begins = [0]
        for number in numbers[:-1]:
            begins.append(_rounded(begins[-1] + plan.buckets[number].nbytes))
        waves.append(_Wave(numbers, begins))
    return waves


class Transfer:
    """Of some of a plan's buckets. One use: make it, run it."""

    def __init__(
        self,
        plan: LoadPlan,
        buckets: range,
        per_wave: int,
        flow: Flow,
        route: Route,
        memory: NodeMemory,
        target: Local | Uploader,
        checkpoint: Checkpoint | None,
        report: LoadReport,
        control: Control,
        framing: Framing,
        waves_before: int = 0,
    ) -> None:
        """
        Args:
            buckets: those to move, by number.
            per_wave: how many share a staging buffer.
            memory: buffers of at least ``wave_bytes(plan, per_wave)``.
            target: what buckets are unpacked into.
            checkpoint: None on a rank that does not read.
            control: where failures are told; its timeout is how long a rank waits for another.
            framing: writes and checks the buckets' headers; with checksums, each node checks them before it unpacks.
            waves_before: that other transfers of this load have moved through the same memory; all ranks are done with them.
        """
        self._plan = plan
        self._buckets = buckets
        self._waves = _waves(plan, per_wave, buckets)
        self._before = waves_before
        self._flow = flow
        self._route = route
        self._memory = memory
        self._target = target
        self._checkpoint = checkpoint
        self._report = report
        self._control = control
        self._uploader = target if isinstance(target, Uploader) else None
        largest = max((bucket.nbytes for bucket in plan.buckets), default=0)
        self._message_limit = control.timeout + timedelta(seconds=per_wave * largest / SLOWEST)
        self._limit = 1.25 * self._message_limit + timedelta(seconds=2)  # the network's passes first, and says more
        self._stages_at: dict[str, str] = {}
        self._framing = framing
        self._chunk = flow.chunk_bytes(plan.nbytes, plan.largest, per_wave)
        self._failure: LoadError | None = None
        """What went wrong on this rank, or what a reader said in the bucket that ended the transfer."""
        self.broken = False
        """Whether a step failed, so that the buffers may still be in use."""
        self._over = threading.Event()
        """Set when this rank has met a bucket that ends the transfer."""

    def run(self, bar: tqdm[Any]) -> None:
        """Raises LoadError if a reader gave up, or what went wrong here. ``bar`` counts bytes."""
        self._bar = bar
        if self._flow.readers == "every":
            self._read_own()
        elif self._waves:
            try:
                with self._uploader.staging.entered() if self._uploader is not None else nullcontext():
                    pipeline.run(self._stages(), self._stop)
            except BaseException:
                self.broken = True
                raise
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """Keeps buffers that may still be in use until the process ends."""
        if self._flow.algorithm == "flat":  # to a broadcast that was given up; the relay's messages let go of theirs
            self._memory.abandon()
        if self._uploader is not None:
            self._uploader.staging.abandon()

    def _stop(self, error: BaseException) -> None:
        """This rank cannot go on: the others hear why first, then those who wait for it are woken."""
        self._control.fail(error)
        self._memory.board.fail()

    def _at(self, stage: str, doing: str) -> None:
        """Says where this rank stands."""
        self._stages_at[stage] = doing
        self._control.doing = ", ".join(list(self._stages_at.values()))

    def _read_own(self) -> None:
        """Every rank for itself: no bucket moves."""
        assert self._checkpoint is not None
        assert isinstance(self._target, Local)
        for wave in self._waves:
            if told := self._framing.told():
                raise told
            self._at("read", f"reads {spell('bucket', wave.numbers)}")
            buckets = [self._plan.buckets[number] for number in wave.numbers]
            try:
                with self._report.timed("read"):
                    nbytes = self._target.read(wave.numbers, self._checkpoint)
                    if nbytes is None:
                        nbytes = sum(map(self._read_whole, wave.numbers))
            except Exception as error:
                raise self._framing.could_not("read", wave.numbers, error) from error
            self._report.phases["read"].nbytes += nbytes
            self._control.progress += nbytes
            self._bar.update(sum(bucket.nbytes for bucket in buckets))

    def _read_whole(self, number: int) -> int:
        """By way of a staging buffer, from a source that has no regions to read."""
        assert self._checkpoint is not None
        bucket = self._plan.buckets[number]
        if not bucket.targets:
            return 0
        buffer = self._memory.buffers[0][: bucket.nbytes]
        self._checkpoint.fill(buffer, self._plan.pieces(bucket))
        self._target.unpack(number, buffer)
        return bucket.nbytes

    def _stages(self) -> list[pipeline.Stage]:
        stages: list[pipeline.Stage] = []
        if self._checkpoint is not None:
            stages.append(("read", self._read))
        if self._flow.rank in self._flow.relays:
            stages.append(("relay", self._relay))
        return [*stages, ("unpack", self._unpack)]

    def _local_readers(self, wave: _Wave) -> list[int]:
        """The ranks that put buckets of a wave into this rank's buffer."""
        return sorted({self._flow.reader(number) for number in wave.numbers} & set(self._flow.sharers))

    def _wait(self, stage: str, waves: int, ranks: list[int] | tuple[int, ...]) -> None:
        if ranks:
            me = threading.current_thread().name
            self._at(me, f"waits until {spell('rank', ranks)} has {stage} wave {waves - 1}")
            self._memory.board.wait(stage, self._before + waves, ranks, self._limit)
            self._stages_at.pop(me, None)

    def _post(self, stage: str, waves: int) -> None:
        self._memory.board.post(stage, self._before + waves)

    @property
    def waves(self) -> int:
        return len(self._waves)

    def _wait_for_buffer(self, index: int) -> None:
        """Until nobody needs what was in the buffer of a wave before."""
        if index >= BUFFERS:
            self._wait("unpacked", index + 1 - BUFFERS, self._flow.sharers)
            self._wait("checked", index + 1 - BUFFERS, self._flow.relays)

    def _buffer(self, index: int) -> Tensor:
        return self._memory.buffers[index % BUFFERS]

    # ---- read ----

    def _read(self) -> None:
        for index, wave in enumerate(self._waves):
            mine = [i for i, number in enumerate(wave.numbers) if self._flow.reader(number) == self._flow.rank]
            if not mine:
                continue
            self._wait_for_buffer(index)
            if self._over.is_set():
                break
            gave_up = False
            with self._report.timed("read"):
                for i in mine:
                    bucket = self._plan.buckets[wave.numbers[i]]
                    at = wave.begins[i]
                    gave_up |= self._fill(wave.numbers[i], bucket, self._buffer(index)[at : at + bucket.nbytes])
            self._post("read", index + 1)
            if gave_up:
                break

    def _fill(self, number: int, bucket: Bucket, buffer: Tensor) -> bool:
        """Fills a bucket. True if that failed, and the bucket says so."""
        assert self._checkpoint is not None
        self._at("read", f"reads bucket {number}")
        failure = self._framing.fill(number, buffer, self._checkpoint)
        if failure is not None:
            self._failure = self._failure or failure
        self._report.phases["read"].nbytes += bucket.nbytes - HEADER_BYTES
        self._control.progress += bucket.nbytes
        self._stages_at.pop("read", None)
        return failure is not None

    # ---- relay ----

    def _relay(self) -> None:
        for index, wave in enumerate(self._waves):
            self._wait_for_buffer(index)
            self._wait("read", index + 1, self._local_readers(wave))
            buckets = [
                (number, begin, begin + self._plan.buckets[number].nbytes)
                for number, begin in zip(wave.numbers, wave.begins, strict=True)
            ]
            if self._flow.algorithm == "flat":
                self._broadcast(buckets, self._buffer(index))
            else:
                self._pass_on(buckets, self._buffer(index))
            self._post("relayed", index + 1)
            # The next wave comes only if no reader gave up in this one, which stands in what others may have received.
            self._wait("relayed", index + 1, self._flow.relays)
            last = self._last_of(index, wave)
            self._post("checked", _ENDED if last else index + 1)
            if last:
                break

    def _pass_on(self, buckets: list[tuple[int, int, int]], buffer: Tensor) -> None:
        steps = self._flow.steps(buckets)
        if not steps:
            return
        phase = "inter_node" if self._flow.crosses and self._route.inter_group else "intra_node"
        table = torch.tensor(steps, dtype=torch.int64)
        self._at("relay", f"passes on buckets {buckets[0][0]} to {buckets[-1][0]}, {_neighbors(steps)}")
        try:
            with self._report.timed(phase):
                messages = ops.relay(
                    buffer, table, self._route.inter_group, self._route.intra_group, self._chunk,
                    self._memory.board.words, self._message_limit.total_seconds(),
                )  # fmt: skip
        except RuntimeError as error:
            raise self._explain(error, buckets[0][0]) from error
        self._stages_at.pop("relay", None)
        self._report.transport_steps += messages
        self._report.phases[phase].nbytes += sum(end - begin for begin, end, *_ in steps)

    def _broadcast(self, buckets: list[tuple[int, int, int]], buffer: Tensor) -> None:
        with self._report.timed("inter_node"):
            for number, begin, end in buckets:
                reader, group = self._flow.reader(number), self._route.inter_group
                self._at("relay", f"broadcasts bucket {number} from rank {reader}")
                try:
                    ops.coalesced_bcast([buffer[begin:end]], reader, group, "", end - begin, "flat")
                except RuntimeError as error:
                    raise self._explain(error, number) from error
                self._report.phases["inter_node"].nbytes += end - begin
                self._report.transport_steps += bool(group)

    def _explain(self, error: RuntimeError, number: int) -> LoadError:
        """What a message that did not arrive means."""
        text = message_of(error)
        if "given up" in text:
            return RemoteFailure(text)
        late = "Timed out" in text or "timeout" in text
        kind = WaitTimeout if late else LoadError
        return kind(
            f"rank {self._flow.rank} could not pass on bucket {number} ({self._framing.names([number])}): {text}"
        )

    # ---- unpack ----

    def _unpack(self) -> None:
        for index, wave in enumerate(self._waves):
            self._wait("relayed", index + 1, self._flow.relays)
            self._wait("read", index + 1, self._local_readers(wave))
            if self._last_of(index, wave):
                self._over.set()
                self._post("unpacked", _ENDED)
                break
            buffer = self._buffer(index)
            if self._framing.checked:
                self._verify(index, wave)
            with self._report.timed("unpack"):
                for number, begin in zip(wave.numbers, wave.begins, strict=True):
                    bucket = self._plan.buckets[number]
                    self._take(number, bucket, buffer[begin : begin + bucket.nbytes])
            self._post("unpacked", index + 1)

    def _verify(self, index: int, wave: _Wave) -> None:
        """Checks the payload of a wave's buckets, dealt out among the ranks that share them."""
        sharers = self._flow.sharers
        with self._report.timed("verify"):
            for number, begin in zip(wave.numbers, wave.begins, strict=True):
                if sharers[number % len(sharers)] != self._flow.rank:
                    continue
                bucket = self._buffer(index)[begin : begin + self._plan.buckets[number].nbytes]
                self._framing.verify(number, self._flow.reader(number), bucket)
                self._report.phases["verify"].nbytes += bucket.nbytes - HEADER_BYTES
        self._post("verified", index + 1)
        self._wait("verified", index + 1, sharers)

    def _take(self, number: int, bucket: Bucket, buffer: Tensor) -> None:
        if self._failure is None and bucket.targets:
            try:
                self._target.unpack(number, buffer)
            except Exception as error:  # keep receiving until a reader, who hears of it, ends the transfer for all
                self._failure = self._framing.tell("unpack", [number], error)
        self._report.phases["unpack"].nbytes += bucket.nbytes - HEADER_BYTES
        self._control.progress += bucket.nbytes
        self._bar.update(bucket.nbytes)

    def _last_of(self, index: int, wave: _Wave) -> bool:
        """Checks the headers of a wave that has arrived. True if a reader gave up."""
        buffer = self._buffer(index)
        gave_up = False
        for number, begin in zip(wave.numbers, wave.begins, strict=True):
            header, body = buffer[begin:].tensor_split([HEADER_BYTES])
            told = self._framing.check(number, header, body)
            if told is not None:
                self._failure = self._failure or told
                gave_up = True
        return gave_up


def _neighbors(steps: list[Step]) -> str:
    """From and to whom this rank passes bytes."""
    sources = sorted({rank for step in steps for rank in step[2:4] if rank >= 0})
    sinks = sorted({rank for step in steps for rank in step[4:6] if rank >= 0})
    return f"from ranks {sources} to ranks {sinks}"
