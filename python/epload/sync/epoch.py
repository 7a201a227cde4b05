"""An epoch: the ranks of both jobs that sync versions together, as long as none of them fails or joins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

from torch import Tensor
from torch.distributed.distributed_c10d import Store

from epload.core.attempt import Attempt
from epload.errors import LoadError, kind_of, make_error
from epload.observe.progress import Progress
from epload.planning.streams import ExchangePlan, Members
from epload.planning.waves import Wave
from epload.ranks.control import Control
from epload.sync.device_route import DeviceRoute
from epload.sync.host_route import HostRoute
from epload.sync.pulling import Puller, publish_memory
from epload.sync.report import SyncReport
from epload.sync.transfer import ExchangeRoles, LocalBuckets
from epload.transfer.context import TransferContext
from epload.transfer.device_pipe import DevicePipe
from epload.transfer.shards import Shards
from epload.transfer.shared_memory import NodeMemory

_CLOSING_SECONDS = 2.0
"""The longest that a sender waits, after a failed version, until receivers have closed its memory."""


@dataclass(eq=False)
class Epoch:
    """The state that stays the same from version to version. Collective over the epoch's ranks: make it, then sync versions."""

    number: int
    control: Control
    members: Members
    plan: ExchangePlan
    memory: NodeMemory | None
    """The node's, through which versions pass or in which whole ones stay; None if versions pass through devices only."""
    route: DeviceRoute | HostRoute | None
    """None if nothing moves: receivers copy all of a version out of the memory of senders."""
    legend: str
    """Says which ranks are whose; for error messages."""
    store: Store
    """The store of both jobs."""
    puller: Puller | None
    """Copies a part of each version, or all of it, out of the memory of senders; None on a rank that does not."""
    not_pulled: str
    """Why none does that, if it seemed possible; equal on all ranks."""
    timeout: timedelta
    verify: bool
    pipe: DevicePipe | None = None
    """Kept for the next version."""

    @property
    def sends(self) -> bool:
        return self.control.rank in self.members.senders

    @property
    def device(self) -> Any:
        """The device that this rank's tensors have to be on; None for any."""
        return self.puller.device if self.puller is not None else self.route.device if self.route is not None else None

    def sync(
        self,
        version: int,
        tensors: list[Tensor] | None,
        report: SyncReport,
        show_progress: bool = False,
        failure: Exception | None = None,
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        """Sends or receives a version. Collective over the epoch's ranks.

        Args:
            tensors: to be sent, or filled as the version arrives; None to leave it in the node's memory.
            failure: why this rank cannot take part; then nothing moves.
            begins: called when all ranks are ready, before anything moves.

        Raises:
            LoadError: a rank failed; the same on every rank, none of which counts the version as received.
        """
        control, route, puller = self.control, self.route, self.puller
        control.begin(self.timeout)
        try:
            with control.guard():
                with report.timed("plan"):
                    shards = Attempt(lambda: self._shards(self.plan, tensors, failure) if route is not None else None)
                    self._get_ready(version, tensors, shards.failure or failure)
                begins()
                pulling: AbstractContextManager[None] = nullcontext()
                if puller is not None:
                    buckets = dict(self._staged(self.plan.landing_waves)) if puller.lands else {}
                    pulling = puller.copying(tensors or [], buckets, self.verify, control)
                alone = puller is not None and route is None
                with report.timed("unpack") if alone else nullcontext(), pulling:
                    if route is not None:
                        self._move(version, route, shards.value, report, show_progress)
                # One key is either this decision or the first failure: the version is whole everywhere, or counts nowhere.
                control.settle("committing the version", None, last=True)
        except LoadError as error:
            self._close_after_failure(version)
            raise make_error(kind_of(error), f"{error}\n{self.legend}") from error
        finally:
            control.end()
        self._fill(report)

    def _fill(self, report: SyncReport) -> None:
        plan, route = self.plan, self.route
        report.epoch, report.moved, report.buckets = self.number, plan.nbytes, len(plan.buckets)
        report.pulled = self.puller.nbytes if self.puller is not None else plan.lent
        report.not_pulled = self.not_pulled
        report.senders, report.receivers = len(self.members.senders), len(self.members.receivers)
        report.tensors, report.nbytes = len(plan.names), plan.total
        report.transport = route.backend if route is not None else "ipc" if plan.borrowers else "host"
        report.peak_staging = sum(buffer.nbytes for buffer in self.memory.buffers) if self.memory is not None else 0
        report.peak_staging += route.footprint if route is not None else 0

    def _get_ready(self, version: int, tensors: list[Tensor] | None, failure: Exception | None) -> None:
        """Agrees that all sync this version. Senders say where their tensors lie; receivers plan what they copy from there."""

        def publish() -> str:
            if failure is not None:
                raise failure
            return publish_memory(self.store, self.control.rank, tensors) if self.plan.lent and tensors else ""

        digest = Attempt(publish)
        message = [version, digest.value if digest.failure is None else ""]
        decision = self.control.settle("getting ready", digest.failure, message, _check_version)
        if not self.plan.borrowers:
            return
        if (puller := self.puller) is not None:
            digests = {int(rank): digest for rank, digest in decision.items()}
            failure = Attempt(lambda: puller.plan(digests, self.store, self.timeout)).failure
        self.control.settle("planning copies between devices", failure)

    def _close_after_failure(self, version: int) -> None:
        """Receivers say that they have closed the memory of senders; these wait for them, so that whoever catches the error may
        free it. Not for long: a receiver that was killed says nothing, and has nothing open."""
        key = f"closed/{self.number}/{version}"
        with suppress(RuntimeError):  # the store is lost, or a receiver
            if self.puller is not None:
                self.store.set(f"{key}/{self.control.rank}", "")
            closed = [f"{key}/{rank}" for rank in self.plan.borrowers]
            until = monotonic() + _CLOSING_SECONDS
            while self.plan.lent and monotonic() < until and not self.store.check(closed):
                sleep(0.01)

    def _move(
        self, version: int, route: DeviceRoute | HostRoute, shards: Shards | None, report: SyncReport, show: bool
    ) -> None:
        control, plan = self.control, self.plan
        roles = ExchangeRoles(plan, self.members, control.rank)
        fill = shards.pack if shards is not None and self.sends else None
        context = TransferContext(
            plan, roles, fill, plan.describe, control, report, self.verify, version, ends_in_order=False
        )
        places = dict(self.staged_buckets()) if route.device is not None and self.memory is not None else {}
        buckets = LocalBuckets(None if self.sends else shards, places, context.verify if self.verify else None)
        with Progress(plan.nbytes, show) as bar:
            route.run(context, buckets, bar)

    def _shards(
        self, plan: ExchangePlan, tensors: list[Tensor] | None, failure: Exception | None = None
    ) -> Shards | None:
        if tensors is None or failure is not None:
            return None
        direct = isinstance(self.route, DeviceRoute) and (self.sends or self.memory is None)
        nodes = self.members.sender_nodes if self.sends else self.members.nodes
        node_size = next(len(node) for node in nodes if self.control.rank in node)
        shards = Shards(plan, tensors, self.verify, f"rank {self.control.rank}", node_size, direct)
        self.pipe = shards.pipe or self.pipe
        return shards

    def unpack(self, tensors: list[Tensor]) -> None:
        """Copies a version out of the node's memory."""
        for plan, waves in ((self.plan, self.plan.waves), (self.plan.landing, self.plan.landing_waves)):
            if plan is not None and waves and (shards := self._shards(plan, tensors)) is not None:
                with LocalBuckets(shards).entered():
                    for number, bucket in self._staged(waves):
                        shards.unpack(number, bucket)

    def staged_buckets(self) -> Iterator[tuple[int, Tensor]]:
        """Yields each bucket of a version that came into the node's memory, by its number in the plan."""
        return self._staged(self.plan.waves)

    def _staged(self, waves: list[Wave]) -> Iterator[tuple[int, Tensor]]:
        assert self.memory is not None
        for wave in waves:
            buffer = self.memory.buffers[wave.index]
            for number, begin, end in zip(wave.numbers, wave.begins, wave.ends, strict=True):
                yield number, buffer[begin:end]

    def close(self) -> None:
        """Ends the epoch on this rank."""
        if self.route is not None:
            self.route.groups.clear()
        self.control.processes.close()


def _check_version(views: dict[int, tuple[int, str]]) -> dict[int, str]:
    """Returns the digests of where senders' tensors lie, by rank."""
    for rank, (version, _) in views.items():
        if version != views[0][0]:
            raise LoadError(
                f"rank 0 syncs version {views[0][0]}, rank {rank} version {version}: the ranks are out of step"
            )
    return {rank: memory for rank, (_, memory) in views.items() if memory}
