"""Moves the buckets of one plan into a model on a device, on one rank: read -> host to device -> broadcast -> unpack.

A thread reads into pinned memory and queues the copies to the device; the calling thread queues broadcasts and unpacking on one
stream, in the same order on every rank. The host waits for a bucket's header before it queues its unpacking: an aborted bucket
must not reach the model, and no rank may begin a broadcast that its reader will not join. A reader need not wait for its own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from epload.checkpoint.base import Checkpoint
from epload.cluster.topology import Route
from epload.control.control import Control
from epload.core.regions import Regions, packed
from epload.errors import LoadError, RemoteFailure
from epload.native import ops
from epload.planning.plan import HEADER_BYTES, Bucket, LoadPlan
from epload.planning.schedule import Flow
from epload.report import LoadReport
from epload.staging.device import BUFFERS, DeviceStaging
from epload.transport import pipeline
from epload.transport.framing import Framing
from epload.transport.local import Local


def staging_bytes(plan: LoadPlan, readers: str) -> int:
    """Bytes of one staging buffer."""
    if readers != "every":
        return plan.largest
    return max((max(bucket.nbytes, packed(bucket.copies)[1]) for bucket in plan.buckets), default=0)


class DeviceTransfer:
    """Of some of a plan's buckets. One use: make it, run it. The same interface as ``transfer.Transfer``."""

    def __init__(
        self,
        plan: LoadPlan,
        buckets: range,
        flow: Flow,
        routes: Mapping[int, Route],
        staging: DeviceStaging,
        local: Local,
        checkpoint: Checkpoint | None,
        report: LoadReport,
        control: Control,
        framing: Framing,
    ) -> None:
        """
        Args:
            buckets: those to move, by number.
            flow: not shared.
            routes: for each rank that reads for this one. Empty where nothing moves between ranks.
            staging: buffers of at least ``staging_bytes(plan, flow.readers)``.
            local: the targets' local tensors, on the staging's device or on CPU.
            checkpoint: None on a rank that does not read.
            control: where failures are told.
            framing: writes and checks the buckets' headers; with checksums, each rank checks them before it unpacks.
        """
        self._staging = staging
        self._flow = flow
        self._plan = plan
        self._buckets = buckets
        self._routes = routes
        self._local = local
        self._checkpoint = checkpoint
        self._report = report
        self._control = control
        self._framing = framing
        self._copied: SimpleQueue[Regions | LoadError | None] = SimpleQueue()
        """For each bucket of this rank's, in order, once its copy to the device is queued: what to unpack, or why there will be
        no more. None: the reading thread has stopped."""
        self._turn = threading.Condition()
        self._queued = 0
        """Buckets of which all work is queued, from the first of ``buckets`` on."""
        self._over = False
        self._failure: LoadError | None = None
        """What went wrong on this rank, or what a reader said in the bucket that ended the transfer."""
        self.broken = False
        """Whether a step failed, so that the buffers may still be in use."""

    def run(self, bar: tqdm[Any]) -> None:
        """Returns when everything is queued; the caller's current stream waits for it. ``bar`` counts bytes.

        Raises:
            LoadError: a reader gave up, or what went wrong here.
        """
        self._bar = bar
        try:
            with self._staging.entered():
                read = [("read", self._read)] if self._checkpoint is not None else []
                pipeline.run([*read, ("move", self._move)], self._stop)
        except BaseException:
            self.broken = True
            raise
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """Keeps the buffers until the process ends."""
        self._staging.abandon()

    def _stop(self, error: BaseException) -> None:
        """This rank cannot go on: the others hear why, then its own threads end."""
        self._control.fail(error)
        with self._turn:
            self._over = True
            self._turn.notify_all()
        self._copied.put(None)

    def _is_mine(self, number: int) -> bool:
        return self._flow.readers == "every" or self._flow.reader(number) == self._flow.rank

    # ---- the reading thread ----

    def _read(self) -> None:
        mine = [(index, number) for index, number in enumerate(self._buckets) if self._is_mine(number)]
        for turn, (index, number) in enumerate(mine):
            pinned = turn % BUFFERS
            with self._report.timed("host_to_device"):
                self._staging.wait_until_copied(pinned)
            regions, nbytes = self._fill(number, self._staging.pinned[pinned])
            if not self._wait_for_turn(index):
                break
            with self._report.timed("host_to_device"):
                if nbytes:
                    self._staging.copy(pinned, index % BUFFERS, nbytes)
            self._report.phases["host_to_device"].nbytes += nbytes
            self._copied.put(regions)
            if isinstance(regions, LoadError):
                break

    def _wait_for_turn(self, index: int) -> bool:
        """Until the last use of a bucket's device buffer is queued. False if the transfer is over."""
        with self._turn:
            self._turn.wait_for(lambda: self._over or self._queued > index - BUFFERS)
            return not self._over

    def _fill(self, number: int, buffer: Tensor) -> tuple[Regions | LoadError, int]:
        """Reads a bucket; returns what to unpack of it, or what went wrong, and the bytes to copy to the device."""
        assert self._checkpoint is not None
        bucket = self._plan.buckets[number]
        with self._report.timed("read"):
            if self._flow.readers == "every":
                return self._fill_own(number, bucket, buffer)
            failure = self._framing.fill(number, buffer[: bucket.nbytes], self._checkpoint)
            self._report.phases["read"].nbytes += bucket.nbytes - HEADER_BYTES
            return (self._local.regions(number) if failure is None else failure), bucket.nbytes

    def _fill_own(self, number: int, bucket: Bucket, buffer: Tensor) -> tuple[Regions | LoadError, int]:
        """Reads this rank's regions of a bucket, those on CPU straight into the model, the others packed into ``buffer``."""
        assert self._checkpoint is not None
        if told := self._framing.told():
            return told, 0
        on_cpu, on_device = self._local.regions(number).by_device()
        try:
            nbytes = 0
            moved, total = on_device.packed()
            for regions in (on_cpu, on_device.read_into(buffer)):
                got = self._checkpoint.read_regions(regions) if regions.targets else 0
                if got is None:  # this source gives whole buckets only
                    self._checkpoint.fill(buffer[: bucket.nbytes], self._plan.pieces(bucket))
                    if on_cpu.targets:
                        ops.unpack(buffer[: bucket.nbytes], on_cpu.targets, on_cpu.copies)
                    nbytes, moved, total = bucket.nbytes, on_device, bucket.nbytes
                    break
                nbytes += got
        except Exception as error:
            return self._framing.could_not("read", [number], error), 0
        self._report.phases["read"].nbytes += nbytes
        return moved, total if moved.targets else 0

    # ---- the calling thread, on the stream ----

    def _move(self) -> None:
        turn = 0
        for index, number in enumerate(self._buckets):
            bucket, buffer = self._plan.buckets[number], index % BUFFERS
            regions: Regions | LoadError | None = None
            if mine := self._is_mine(number):
                regions = self._copied.get()
                if regions is None:
                    break
                self._staging.wait_for_copy(turn % BUFFERS)
                turn += 1
            if self._routes:
                self._broadcast(number, self._staging.buckets[buffer][: bucket.nbytes])
            if not mine:
                regions = self._receive(number, buffer)
            if isinstance(regions, LoadError):
                self._failure = regions if self._failure is None or mine else self._failure
                break
            assert regions is not None
            self._take(number, regions, self._staging.buckets[buffer])
            self._staging.unpacked(buffer)
            self._bar.update(bucket.nbytes)
            with self._turn:
                self._queued = index + 1
                self._turn.notify_all()
        with self._turn:
            self._over = True
            self._turn.notify_all()

    @property
    def _phase(self) -> str:
        return "inter_node" if self._flow.crosses else "intra_node"

    def _broadcast(self, number: int, bucket: Tensor) -> None:
        route = self._routes[self._flow.reader(number)]
        with self._report.timed(self._phase):
            broadcast(bucket, route, self._flow.algorithm, self._staging.stream)
        self._report.phases[self._phase].nbytes += bucket.nbytes
        self._report.transport_steps += steps_of(route, self._flow, bucket.nbytes)

    def _receive(self, number: int, buffer: int) -> Regions | RemoteFailure:
        """Waits for a bucket from another rank, as far as its header."""
        with self._report.timed(self._phase):
            header = self._staging.fetch_header(buffer)
            bucket = self._staging.buckets[buffer][: self._plan.buckets[number].nbytes]
            told = self._framing.check(number, header, bucket[HEADER_BYTES:])
        if told is None and self._framing.checked:
            with self._report.timed("verify"):
                self._framing.verify(number, self._flow.reader(number), bucket.cpu())
            self._report.phases["verify"].nbytes += bucket.nbytes - HEADER_BYTES
        return told if told is not None else self._local.regions(number)

    def _take(self, number: int, regions: Regions, bucket: Tensor) -> None:
        with self._report.timed("unpack"):
            if self._failure is None and regions.targets:
                try:
                    on_cpu, on_device = regions.by_device()
                    if on_device.targets:
                        ops.unpack(bucket, on_device.targets, on_device.copies)
                    if on_cpu.targets:
                        whole = bucket[: self._plan.buckets[number].nbytes]
                        ops.unpack(whole.cpu(), on_cpu.targets, on_cpu.copies)
                except Exception as error:  # keep receiving until a reader, who hears of it, ends the transfer for all
                    self._failure = self._framing.tell("unpack", [number], error)
        self._report.phases["unpack"].nbytes += self._plan.buckets[number].nbytes - HEADER_BYTES
        self._control.progress += self._plan.buckets[number].nbytes


def broadcast(flat: Tensor, route: Route, algorithm: str, stream: torch.Stream) -> None:
    """Sends contiguous bytes in place, from ``route.src``, as one bucket."""
    leader = -1 if algorithm == "flat" else route.leader
    nbytes = max(16, flat.nbytes)
    ops.coalesced_bcast(
        [flat], route.src, route.inter_group, route.intra_group, nbytes, algorithm, stream, leader=leader
    )


def steps_of(route: Route, flow: Flow, nbytes: int) -> int:
    """Broadcasts that a rank takes part in for so many bytes."""
    if flow.algorithm != "striped":
        return bool(route.inter_group) + bool(route.intra_group)
    node = sorted(flow.nodes[flow.node])
    stripes = -(-nbytes // ((nbytes // len(node) + 16) // 16 * 16))  # as csrc/coalesced_bcast.cpp cuts it
    on_rail = bool(route.inter_group) and node.index(flow.rank) < stripes
    return on_rail + bool(route.intra_group) * (1 if route.src in node else stripes)
