"""A generation: the ranks of both jobs that sync versions together, as long as none of them fails or joins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from itertools import chain
from time import monotonic, sleep

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from epload.checkpoint.manifest import Manifest
from epload.core import garbage_collection
from epload.core.attempt import Attempt
from epload.core.log import logger
from epload.errors import LoadError, for_both_jobs, kind_of, make_error
from epload.planning.holdings import Holdings
from epload.planning.streams import ExchangePlan, ExchangeRoles, Members
from epload.sync.changes_route import ChangesRoute
from epload.sync.committed import CommittedTensors
from epload.sync.device_route import DeviceRoute
from epload.sync.devices import link_obstacle
from epload.sync.host_route import HostRoute
from epload.sync.joining import JoinMessage, find_members, join, plan_together
from epload.sync.node_version import NodeVersion
from epload.sync.participants import Participants, Start
from epload.sync.pulling import Puller, publish_memory
from epload.sync.report import SyncReport
from epload.transfer.context import Sink, TransferContext
from epload.transfer.shards import Shards
from epload.transfer.shared_memory import BUFFERS, NodeMemory

_CLOSING_SECONDS = 2.0
"""The longest that a sender waits, after a failed version, until receivers have closed its memory."""


class Generation:
    """The state that stays the same from version to version. Collective over its ranks: make it, then sync versions."""

    plan: ExchangePlan
    route: DeviceRoute | HostRoute | None = None
    """None if nothing moves: receivers copy all of a version out of the memory of senders."""
    puller: Puller | None = None
    """Copies a part of each version, or all of it, out of the memory of senders; None on a rank that does not."""
    device: torch.device | None = None
    """The device that this rank's tensors have to be on; None for any."""
    not_pulled = ""
    """Why none does that, if it seemed possible; equal on all ranks."""
    node_version: NodeVersion | None = None
    """The version in the memory of this rank's node, where it keeps one."""

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
        *,
        node_version: NodeVersion | None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            store: of both jobs.
            number: of the generation, equal on all ranks; below 0 if engines hand a version on.
            rank: of this process among the participants.
            message: this rank's, without its holdings.
            manifest: None on a rank with a ``failure``.
            holdings: this rank's of the manifest's tensors.
            failure: why this rank cannot take part; raised on all.
            node_version: of the generation before.
            check: called now and then while this rank waits for others; raises LoadError if one has left.

        Raises:
            LoadError, ValueError: as :func:`~epload.sync.joining.join`, or a receiver needs what no sender has.
        """
        self.number = number
        self.node_version = node_version
        self._plans: dict[frozenset[int], ExchangePlan] = {}
        self._reserved: set[tuple[int, ...]] = set()
        """The ranks of each node that has memory for a version in full."""
        self._memory: NodeMemory | None = None
        """This node's, if it is one of them."""
        self._host_route: HostRoute | None = None
        self._store = store
        self._timeout = timeout
        self._legend = participants.describe()
        self._pipe: object = None
        """The device's, for the next version."""
        with self._explained():
            ranks = participants.senders + len(participants.receivers)
            self.control, self._messages = join(store, timeout, number, ranks, rank, message, holdings, failure, check)
            self.control.check_others = check
            self._own, self._sends = self._messages[rank], rank < participants.senders
            assert manifest is not None
            self._declared = manifest.dtypes
            with self.control.load(timeout), garbage_collection.paused():
                self.members = find_members(participants.senders, self._messages)
                self._changes = ChangesRoute(self.members, self.control, number, message.verify, self._through_host, self._share)
                base = node_version.holdings(manifest.shapes) if node_version is not None else None
                self.plan, lenders, self.not_pulled = plan_together(
                    store, self.control, number, self.members, self._messages, manifest, holdings, base
                )
                if self.plan.pulls is not None or self.plan.landing is not None:
                    node = self.members.nodes[self.plan.node]
                    self.device = torch.device(self._own.access.device)
                    self.puller = Puller(self.plan, lenders, self.device, node.index(rank), len(node))
                if self.plan.node_sets:
                    self.route = self._connect()
                    self.device = self.route.device or self.device

    @property
    def holders(self) -> list[int]:
        """The receiving ranks whose node keeps each version in host memory."""
        return [rank for rank in self.members.receivers if self._messages[rank].stages]

    @property
    def keeps_declared_dtypes(self) -> bool:
        """True if this rank's node keeps versions, in the dtypes that the manifest declares."""
        return self.node_version is not None and self._declared == self.plan.dtypes

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Adds to errors which ranks belong to which job."""
        try:
            yield
        except (LoadError, ValueError) as error:
            raise make_error(kind_of(error), f"{error}\n{self._legend}") from error

    # ---- connections, and memory of the node ----

    def _through_host(self) -> HostRoute:
        self._host_route = self._host_route or HostRoute(self.members, self.control)
        return self._host_route

    def _connect(self) -> DeviceRoute | HostRoute:
        """Returns the route from device to device, or the one through host memory; of the same kind on all ranks."""
        if not (obstacle := link_obstacle([message.access for message in self._messages])):
            staging = [node for node in self.members.nodes if self._messages[node[0]].stages]
            access = self._own.access
            device = torch.device(access.device)
            route = DeviceRoute(self.plan, self.members, self.control, staging, device, access.backend)
            if not (obstacle := route.obstacle):
                route.connect()
                return route
        if self.control.rank == 0:
            logger.info("versions pass through host memory: %s", obstacle)
        return self._through_host()

    def _reserve(self, nodes: Collection[int], all_nodes: bool) -> None:
        """Makes the memory of nodes that receive a whole version, where they have none. Collective over the generation's ranks.

        Args:
            all_nodes: whether senders and nodes that do not keep the version need memory, too.

        Raises:
            LoadError: the ranks of a receiving node cannot share memory.
        """
        receivers = [self.members.nodes[number] for number in sorted(nodes)]
        needed = [node for node in receivers if all_nodes or self._messages[node[0]].stages]
        needed += [(rank,) for rank in self.members.senders if all_nodes]
        new = [node for node in needed if node not in self._reserved]
        if not new:
            return
        self._reserved.update(new)
        if not any(self.control.rank in node for node in new):
            self._share(new, 0, BUFFERS)
            return
        self.node_version = None  # before more is allocated
        waves = [*self.plan.waves, *self.plan.landing_waves]
        nbytes = max((wave.nbytes for wave in waves), default=0)
        self._memory = self._share(new, nbytes, max(len(waves), 1) if self._own.stages else BUFFERS)

    def _share(self, nodes: Sequence[tuple[int, ...]], nbytes: int, count: int) -> NodeMemory:
        """Makes memory that the ranks of each of these nodes share, and each other rank a token of its own."""
        others = sorted({*self.control.ranks}.difference(*nodes))
        memory = NodeMemory.for_node(self.control, [*nodes, *((rank,) for rank in others)], nbytes, count)
        if not memory.shared:
            raise LoadError(
                f"the ranks of a receiving node cannot share memory ({self._legend}): run them in containers that share process "
                "ids, or pass each its own node= so that each receives by itself"
            )
        return memory

    # ---- one version ----

    def sync(
        self,
        start: Start,
        tensors: list[Tensor] | None,
        report: SyncReport,
        base: CommittedTensors | None = None,
        show_progress: bool = False,
        failure: Exception | None = None,
        begins: Callable[[bool], list[Tensor] | None] = lambda in_full: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Sends or receives a version. Collective over the generation's ranks.

        Args:
            tensors: to be sent, or filled as the version arrives; None to leave it in the node's memory.
            base: what a sender has committed before, if it may send changes.
            failure: why this rank cannot take part; then nothing moves.
            begins: called when all ranks are ready, before anything moves, with True if a node receives the version in full.
                What it returns is sent in place of ``tensors``.
            check: called on a sender before it packs a bucket, and after the last one. Raises LoadError if ``tensors`` are no
                longer what is to be sent.

        Raises:
            LoadError: a rank failed; the same on every rank, none of which counts the version as received.
        """
        with self._explained():
            try:
                with self.control.load(self._timeout):
                    with report.timed("plan"):
                        usable = Attempt(lambda: self._shards(self.plan, tensors) if tensors is not None else None)
                        nodes = self._get_ready(tensors, for_both_jobs(failure or usable.failure), base, report)
                    if nodes:
                        plan, own = self._toward(nodes), tensors or []
                        if not self._changes.compare(plan, nodes, lambda: self._shards(plan, own), base, report):
                            nodes = frozenset()
                    in_full = frozenset(range(len(self.members.nodes))) - nodes
                    tensors = begins(bool(in_full)) or tensors
                    self._prepare_memory(in_full)
                    with self._pulled(tensors or [], report):
                        if nodes:
                            ranks = self.members.nodes[self.plan.node] if self.plan.node in nodes else ()
                            self._changes.move(self.node_version if ranks else None, ranks, report)
                        if self.route is not None and in_full:
                            self._move(in_full, tensors, report, show_progress, check)
                    # One key is either this decision or the first failure: the version is whole everywhere, or counts nowhere.
                    self.control.agree("committing the version", Attempt(check).failure, last=True)
                    if self.node_version is not None:
                        self.node_version.key = ""
                        with report.timed("unpack", "applies changes"):
                            self._changes.commit()
                        self.node_version.key = start.key
            except LoadError:
                self._close_after_failure(report.version)
                raise
        self._describe(report, in_full)

    def _get_ready(
        self, tensors: list[Tensor] | None, failure: Exception | None, base: CommittedTensors | None, report: SyncReport
    ) -> frozenset[int]:
        """Agrees that all sync this version. Senders say where their tensors lie; receivers plan what they copy from there.

        Returns:
            The receiving nodes that have the sender's base.
        """
        digest, key, token, obstacle = "", "", "", ""
        if self.plan.lent and tensors and failure is None:
            published = Attempt(lambda: publish_memory(self._store, self.control.rank, tensors))
            digest, failure = published.result or "", published.failure
        if base is not None:
            obstacle = base.obstacle(self._own.verify)
            key = "" if obstacle else base.key
        elif (version := self.node_version) is not None and version.is_base_of(
            self.plan, self.number, len(self.members.nodes[self.plan.node])
        ):
            key, token = version.key, version.memory.token
        view = [report.version, digest, key, token]
        digests, with_base = self.control.agree("getting ready", failure, view, partial(_check_views, self.members))
        if self.plan.borrowers:
            problem = None
            if (puller := self.puller) is not None:
                by_rank = {int(rank): digest for rank, digest in digests.items()}
                problem = Attempt(lambda: puller.plan(by_rank, self._store, self._timeout)).failure
            self.control.agree("planning copies between devices", problem)
        moving = {*chain.from_iterable(self.plan.node_sets)}
        nodes = moving.intersection(with_base)
        if base is not None and len(nodes) < len(moving):
            others = len(moving) - len(nodes)
            report.why_full = obstacle or f"{others} of {len(moving)} receiving nodes have another base"
        return frozenset(nodes)

    def _prepare_memory(self, in_full: frozenset[int]) -> None:
        """Makes memory for a version that some nodes receive in full."""
        route = self._route(in_full)
        self._reserve(in_full, all_nodes=isinstance(route, HostRoute) and bool(in_full))
        if self._own.stages and self.plan.node in in_full:
            assert self._memory is not None
            plan = self._toward(in_full)
            self.node_version = NodeVersion(plan, self._memory, self.number, f"rank {self.control.rank}", self._own.verify)

    def _toward(self, nodes: frozenset[int]) -> ExchangePlan:
        """See :meth:`ExchangePlan.toward`."""
        if nodes not in self._plans:
            self._plans[nodes] = self.plan.toward(nodes)
        return self._plans[nodes]

    def _route(self, in_full: frozenset[int]) -> DeviceRoute | HostRoute | None:
        """Returns the route of a version in full; through host memory if it does not go to all nodes."""
        partial_version = self._toward(in_full) is not self.plan
        return self._through_host() if partial_version and in_full and self.route is not None else self.route

    def _pulled(self, tensors: Sequence[Tensor], report: SyncReport) -> AbstractContextManager[None]:
        """Returns a context in which this rank copies its part out of the memory of senders, if it does."""
        if self.puller is None:
            return nullcontext()
        buckets: dict[int, Tensor] = {}
        if self.plan.landing is not None:
            assert self.node_version is not None
            self.node_version.key = ""
            buckets = self.node_version.landed
        return self.puller.copying(tensors, buckets, self._own.verify, self.control, report)

    def _move(
        self,
        in_full: frozenset[int],
        tensors: list[Tensor] | None,
        report: SyncReport,
        show_progress: bool,
        check: Callable[[], None],
    ) -> None:
        plan, route, verify = self._toward(in_full), self._route(in_full), self._own.verify
        assert route is not None
        if not plan.buckets:
            return
        shards = self._shards(plan, tensors, route) if tensors is not None else None
        roles = ExchangeRoles(plan, self.members, self.control.rank)

        def fill(number: int, buffer: Tensor) -> None:
            check()
            assert shards is not None
            shards.pack(number, buffer)

        context = TransferContext(
            plan,
            roles,
            fill if self._sends else None,
            plan.describe,
            self.control,
            report,
            verify,
            report.version,
            ends_in_order=False,
        )
        sink: Sink = Sink() if self._sends or shards is None else shards
        if isinstance(route, DeviceRoute) and self.node_version is not None:
            sink = route.staged(self.node_version.buckets, context.verify if verify else None)
        route.run(context, self._memory, sink, show_progress)

    def _shards(self, plan: ExchangePlan, tensors: list[Tensor], route: DeviceRoute | HostRoute | None = None) -> Shards:
        """Returns this rank's tensors, to be packed or filled. ``route``: of the buckets; through host memory if None."""
        rank = self.control.rank
        nodes = self.members.sender_nodes if self._sends else self.members.nodes
        ranks = next(len(node) for node in nodes if rank in node)
        on_device = isinstance(route, DeviceRoute)
        shards = Shards(plan, tensors, self._own.verify, f"rank {rank}", ranks, on_device)
        self._pipe = shards.pipe or self._pipe
        return shards

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

    def _describe(self, report: SyncReport, in_full: frozenset[int]) -> None:
        plan, full = self.plan, self._toward(in_full)
        report.generation, report.buckets = max(self.number, 0), len(full.buckets)
        report.wire_bytes += full.nbytes
        report.pulled = self.puller.nbytes if self.puller is not None else plan.lent
        report.not_pulled = self.not_pulled
        report.senders, report.receivers = len(self.members.senders), len(self.members.receivers)
        report.tensors, report.nbytes = len(plan.names), plan.total
        if report.changed is None:  # else through host memory, which is the default
            report.transport = self.route.backend if self.route is not None else "ipc" if plan.borrowers else "host"
        memories = {self._memory, self.node_version.memory if self.node_version is not None else None}
        report.peak_staging += sum(memory.footprint for memory in memories if memory is not None)
        report.peak_staging += self._changes.footprint + (self.route.footprint if self.route is not None else 0)
        report.peak_staging += getattr(self._pipe, "footprint", 0)

    def close(self) -> None:
        """Ends the generation on this rank, and frees its memory, without waiting for the garbage collector. Call it once."""
        for route in (self.route, self._host_route):
            if route is not None:
                route.groups.clear()
        self._changes.close()
        del self._changes  # which refers to this generation
        self.control.close()


def _check_views(members: Members, views: dict[int, tuple[int, str, str, str]]) -> tuple[dict[int, str], list[int]]:
    """Returns the digests of where senders' tensors lie, by rank; the receiving nodes whose ranks have the senders' base in one
    memory."""
    for rank, (version, *_) in views.items():
        if version != views[0][0]:
            raise LoadError(f"rank 0 syncs version {views[0][0]}, rank {rank} version {version}: the ranks are out of step")
    keys = {views[rank][2] for rank in members.senders}
    base = keys.pop() if len(keys) == 1 else ""
    of_nodes = [{tuple(views[rank][2:]) for rank in node} for node in members.nodes]
    with_base = [number for number, of_ranks in enumerate(of_nodes) if base and len(of_ranks) == 1 and base in min(of_ranks)]
    return {rank: memory for rank, (_, memory, *_) in views.items() if memory}, with_base
