"""A generation: the ranks of both jobs that sync versions together, as long as none of them fails or joins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from epload.checkpoint.manifest import Manifest
from epload.core import garbage_collection
from epload.core.attempt import Attempt
from epload.core.log import logger
from epload.errors import LoadError, kind_of, make_error
from epload.observe.progress import Progress
from epload.planning.holdings import Holdings
from epload.planning.streams import ExchangePlan
from epload.sync.device_route import DeviceRoute
from epload.sync.devices import link_obstacle
from epload.sync.joining import JoinMessage, find_members, join, plan_together
from epload.sync.participants import Participants
from epload.sync.pulling import Puller, publish_memory
from epload.sync.report import SyncReport
from epload.sync.transfer import ExchangeRoles, HostRoute, LocalBuckets
from epload.transfer.context import TransferContext
from epload.transfer.shards import Shards
from epload.transfer.shared_memory import BUFFERS, NodeMemory

_CLOSING_SECONDS = 2.0
"""The longest that a sender waits, after a failed version, until receivers have closed its memory."""


class Generation:
    """The state that stays the same from version to version. Collective over its ranks: make it, then sync versions."""

    plan: ExchangePlan
    memory: NodeMemory | None = None
    """The node's, through which versions pass or in which whole ones stay; None if versions pass through devices only."""
    route: DeviceRoute | HostRoute | None = None
    """None if nothing moves: receivers copy all of a version out of the memory of senders."""
    puller: Puller | None = None
    """Copies a part of each version, or all of it, out of the memory of senders; None on a rank that does not."""
    device: torch.device | None = None
    """The device that this rank's tensors have to be on; None for any."""
    not_pulled = ""
    """Why none does that, if it seemed possible; equal on all ranks."""

    def __init__(
        self,
        store: Store,
        timeout: timedelta,
        number: int,
        participants: Participants,
        rank: int,
        message: JoinMessage,
        manifest: Manifest | None,
        holdings: Holdings,
        failure: Exception | None = None,
    ) -> None:
        """
        Args:
            store: of both jobs.
            number: of the generation, equal on all ranks.
            rank: of this process among the participants.
            message: this rank's, without its holdings.
            manifest: None on a rank with a ``failure``.
            holdings: this rank's of the manifest's tensors.
            failure: why this rank cannot take part; raised on all.

        Raises:
            LoadError: a rank cannot take part, or has not come in time; the same on every rank.
        """
        self.number = number
        self._store = store
        self._timeout = timeout
        self._legend = participants.describe()
        self._pipe: object = None
        """The device's, for the next version."""
        with self._explained():
            ranks = participants.senders + len(participants.receivers)
            self.control, self._messages = join(store, timeout, number, ranks, rank, message, holdings, failure)
            self._own, self._sends = self._messages[rank], rank < participants.senders
            assert manifest is not None
            with self._load(), garbage_collection.paused():
                self.members = find_members(participants.senders, self._messages)
                self.plan, lenders, self.not_pulled = plan_together(
                    store, self.control, number, self.members, self._messages, manifest, holdings
                )
                if self.plan.pulls is not None or self.plan.landing is not None:
                    node = next(node for node in self.members.nodes if rank in node)
                    self.device = torch.device(self._own.access.device)
                    self.puller = Puller(self.plan, lenders, self.device, node.index(rank), len(node))
                self._connect()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Adds to errors which ranks belong to which job."""
        try:
            yield
        except (LoadError, ValueError) as error:
            raise make_error(kind_of(error), f"{error}\n{self._legend}") from error

    @contextmanager
    def _load(self) -> Iterator[None]:
        self.control.begin(self._timeout)
        try:
            with self.control.guard():
                yield
        finally:
            self.control.end()

    # ---- connections, and memory of the node ----

    def _connect(self) -> None:
        moves = bool(self.plan.node_sets)
        route = self._device_route() if moves else None
        memory = self._make_memory(moves and route is None)
        if route is not None:
            route.connect()
            self.route, self.device = route, route.device
        elif moves:
            self.route = HostRoute(self.plan, self.members, self.control, memory)
        if self._own.stages or isinstance(self.route, HostRoute):
            self.memory = memory

    def _device_route(self) -> DeviceRoute | None:
        """Returns the route from device to device; None if versions pass through host memory, on all ranks."""
        if not (obstacle := link_obstacle([message.access for message in self._messages])):
            staging = [node for node in self.members.nodes if self._messages[node[0]].stages]
            access = self._own.access
            device = torch.device(access.device)
            route = DeviceRoute(self.plan, self.members, self.control, staging, device, access.backend)
            if not (obstacle := route.obstacle):
                return route
        if self.control.rank == 0:
            logger.info("versions pass through host memory: %s", obstacle)
        return None

    def _make_memory(self, all_nodes: bool) -> NodeMemory:
        """Makes the memory of this rank's node, or a token of its own.

        Args:
            all_nodes: whether every node needs memory, and not only those that keep whole versions.

        Raises:
            LoadError: the ranks of a receiving node that needs it cannot share memory.
        """
        stages, waves = self._own.stages, [*self.plan.waves, *self.plan.landing_waves]
        nbytes = max((wave.nbytes for wave in waves), default=0) if all_nodes or stages else 0
        nodes: list[tuple[int, ...]] = [(rank,) for rank in self.members.senders]
        for node in self.members.nodes:
            nodes += [node] if all_nodes or self._messages[node[0]].stages else [(rank,) for rank in node]
        memory = NodeMemory.for_node(self.control, nodes, nbytes, max(len(waves), 1) if stages else BUFFERS)
        if not memory.shared:
            raise LoadError(
                f"the ranks of a receiving node cannot share memory ({self._legend}): run them in containers that share process "
                "ids, or pass each its own node= so that each receives by itself"
            )
        return memory

    # ---- one version ----

    def sync(
        self,
        version: int,
        tensors: list[Tensor] | None,
        report: SyncReport,
        show_progress: bool = False,
        failure: Exception | None = None,
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        """Sends or receives a version. Collective over the generation's ranks.

        Args:
            tensors: to be sent, or filled as the version arrives; None to leave it in the node's memory.
            failure: why this rank cannot take part; then nothing moves.
            begins: called when all ranks are ready, before anything moves.

        Raises:
            LoadError: a rank failed; the same on every rank, none of which counts the version as received.
        """
        with self._explained():
            try:
                with self._load():
                    with report.timed("plan"):
                        moves = self.route is not None and tensors is not None
                        shards = Attempt(lambda: self._shards(self.plan, tensors or []) if moves else None)
                        self._get_ready(version, tensors, failure or shards.failure)
                    begins()
                    with self._pulled(tensors or [], report):
                        if self.route is not None:
                            self._move(version, self.route, shards.value, report, show_progress)
                    # One key is either this decision or the first failure: the version is whole everywhere, or counts nowhere.
                    self.control.agree("committing the version", None, last=True)
            except LoadError:
                self._close_after_failure(version)
                raise
        plan, route = self.plan, self.route
        report.generation, report.moved, report.buckets = self.number, plan.nbytes, len(plan.buckets)
        report.pulled = self.puller.nbytes if self.puller is not None else plan.lent
        report.not_pulled = self.not_pulled
        report.senders, report.receivers = len(self.members.senders), len(self.members.receivers)
        report.tensors, report.nbytes = len(plan.names), plan.total
        report.transport = route.backend if route is not None else "ipc" if plan.borrowers else "host"
        report.peak_staging = sum(buffer.nbytes for buffer in self.memory.buffers) if self.memory is not None else 0
        report.peak_staging += route.footprint if route is not None else 0

    def _get_ready(self, version: int, tensors: list[Tensor] | None, failure: Exception | None) -> None:
        """Agrees that all sync this version. Senders say where their tensors lie; receivers plan what they copy from there."""
        digest = ""
        if self.plan.lent and tensors and failure is None:
            published = Attempt(lambda: publish_memory(self._store, self.control.rank, tensors))
            digest, failure = published.result or "", published.failure
        digests = self.control.agree("getting ready", failure, [version, digest], _check_version)
        if self.plan.borrowers:
            problem = None
            if (puller := self.puller) is not None:
                by_rank = {int(rank): digest for rank, digest in digests.items()}
                problem = Attempt(lambda: puller.plan(by_rank, self._store, self._timeout)).failure
            self.control.agree("planning copies between devices", problem)

    def _pulled(self, tensors: Sequence[Tensor], report: SyncReport) -> AbstractContextManager[None]:
        """Returns a context in which this rank copies its part out of the memory of senders, if it does."""
        if self.puller is None:
            return nullcontext()
        buckets = dict(self._staged(self.plan.landing_waves)) if self.puller.lands else {}
        return self.puller.copying(tensors, buckets, self._own.verify, self.control, report)

    def _close_after_failure(self, version: int) -> None:
        """Receivers say that they have closed the memory of senders; these wait for them, so that a caller that catches the error
        may free it. Not for long: a receiver that was killed says nothing, and has nothing open."""
        key = f"closed/{self.number}/{version}"
        with suppress(RuntimeError):  # the store is lost, or a receiver
            if self.puller is not None:
                self._store.set(f"{key}/{self.control.rank}", "")
            closed = [f"{key}/{rank}" for rank in self.plan.borrowers]
            until = monotonic() + _CLOSING_SECONDS
            while self.plan.lent and monotonic() < until and not self._store.check(closed):
                sleep(0.01)

    def _move(
        self, version: int, route: DeviceRoute | HostRoute, shards: Shards | None, report: SyncReport, show: bool
    ) -> None:
        control, plan, verify = self.control, self.plan, self._own.verify
        roles = ExchangeRoles(plan, self.members, control.rank)
        fill = shards.pack if shards is not None and self._sends else None
        context = TransferContext(
            plan, roles, fill, plan.describe, control, report, verify, version, ends_in_order=False
        )
        if self._sends:
            sink = LocalBuckets(None)
        elif route.device is not None and self.memory is not None:
            sink = LocalBuckets(shards, dict(self.staged_buckets()), context.verify if verify else None)
        else:
            sink = LocalBuckets(shards)
        with Progress(plan.nbytes, show) as bar:
            route.run(context, sink, bar)

    def _shards(self, plan: ExchangePlan, tensors: list[Tensor]) -> Shards:
        rank, sends = self.control.rank, self._sends
        on_device = isinstance(self.route, DeviceRoute) and (sends or self.memory is None)
        nodes = self.members.sender_nodes if sends else self.members.nodes
        ranks = next(len(node) for node in nodes if rank in node)
        shards = Shards(plan, tensors, self._own.verify, f"rank {rank}", ranks, on_device)
        self._pipe = shards.pipe or self._pipe
        return shards

    # ---- a version in the node's memory ----

    def unpack(self, tensors: list[Tensor]) -> None:
        """Copies a version out of the node's memory."""
        for plan, waves in ((self.plan, self.plan.waves), (self.plan.landing, self.plan.landing_waves)):
            if plan is not None and waves:
                shards = self._shards(plan, tensors)
                try:
                    for number, bucket in self._staged(waves):
                        shards.unpack(number, bucket)
                finally:
                    shards.finish()

    def staged_buckets(self) -> Iterator[tuple[int, Tensor]]:
        """Yields each bucket of a version that came into the node's memory, by its number in the plan."""
        return self._staged(self.plan.waves)

    def _staged(self, waves: Sequence[Any]) -> Iterator[tuple[int, Tensor]]:
        assert self.memory is not None
        for wave in waves:
            for number, begin, end in zip(wave.numbers, wave.begins, wave.ends, strict=True):
                yield number, self.memory.buffers[wave.index][begin:end]

    def close(self) -> None:
        """Ends the generation on this rank."""
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
