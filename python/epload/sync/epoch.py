"""An epoch: the ranks of both jobs that sync versions together, as long as none of them fails or joins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from epload.cluster.group_cache import GroupCache
from epload.cluster.topology import Route
from epload.control.control import Control
from epload.core.attempt import attempt
from epload.errors import LoadError, kind_of, make_error, message_of
from epload.observe.progress import Progress
from epload.planning.shares import digest_of
from epload.planning.streams import ExchangePlan, Members
from epload.planning.waves import Wave
from epload.staging.device_pipe import DevicePipe
from epload.staging.host_ring import HostRing
from epload.staging.shards import Shards
from epload.staging.shared_memory import NodeMemory
from epload.sync.device_route import DeviceRoute, MemorySink
from epload.sync.pulling import Puller, SharedMemory
from epload.sync.report import SyncReport
from epload.sync.store import get, put
from epload.sync.transfer import ExchangeRoles, ShardSink, ShardSource, landing_waves
from epload.transport.context import TransferContext
from epload.transport.engine import Engine
from epload.transport.framing import Framing
from epload.transport.movers import Relay
from epload.transport.transfers import run_transfer, through_memory
from epload.verify.digests import check_verify

_CLOSING_SECONDS = 2.0
"""The longest that a sender waits, after a failed version, until receivers have closed its memory."""


@dataclass(frozen=True)
class SyncOptions:
    """The options of a sender or a receiver."""

    timeout: timedelta
    verify: bool

    def __post_init__(self) -> None:
        """Raises TypeError."""
        check_verify(self.verify)


@dataclass(eq=False)
class Epoch:
    """The state that stays the same from version to version. Collective over the epoch's ranks: make it, then sync versions."""

    number: int
    control: Control
    members: Members
    plan: ExchangePlan
    waves: list[Wave]
    memory: NodeMemory | None
    """None if a version passes through devices only."""
    groups: GroupCache
    route: DeviceRoute | None
    """None if a version passes through host memory."""
    legend: str
    """Says which ranks are whose; for error messages."""
    store: Store
    """The store of both jobs."""
    puller: Puller | None
    """Copies a part of each version, or all of it, out of the memory of senders; None on a rank that does not."""
    not_pulled: str
    """Why none does that, if it seemed possible; equal on all ranks."""
    pipe: DevicePipe | None = None
    """Kept for the next version."""
    _waves_before: int = field(default=0, init=False)
    _shared: bytes = field(default=b"", init=False)
    """The last that a sender has said of where its tensors lie."""
    _digests: list[str] = field(init=False)
    """The digests of what each rank has said of that for the version before; equal on all ranks."""

    def __post_init__(self) -> None:
        self._digests = [""] * len(self.control.ranks)

    @property
    def rank(self) -> int:
        return self.control.rank

    @property
    def sends(self) -> bool:
        return self.rank in self.members.senders

    def sync(
        self,
        version: int,
        tensors: list[Tensor] | None,
        report: SyncReport,
        options: SyncOptions,
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
        control = self.control
        control.begin(options.timeout)
        try:
            with control.guard():
                with report.timed("plan"):
                    shards: Shards | None = None
                    if tensors is not None and failure is None:
                        shards, failure = attempt(lambda: self._moved_shards(tensors, options.verify))
                    self._get_ready(version, tensors, failure, options.timeout)
                begins()
                alone = self.puller is not None and not self.plan.node_sets
                with report.timed("unpack") if alone else nullcontext(), self._pulling(tensors, options.verify):
                    self._move(version, shards, report, options.verify, show_progress)
                # One key is either this decision or the first failure: the version is whole everywhere, or counts nowhere.
                control.settle("committing the version", None, last=True)
        except LoadError as error:
            self._close_after_failure(version)
            raise make_error(kind_of(error), f"{error}\n{self.legend}") from error
        finally:
            control.end()
        report.epoch, report.moved, report.buckets = self.number, self.plan.nbytes, len(self.plan.buckets)
        report.pulled = self.puller.nbytes if self.puller is not None else self.plan.lent
        report.not_pulled = self.not_pulled
        report.senders, report.receivers = len(self.members.senders), len(self.members.receivers)
        report.tensors, report.nbytes = self.plan.tensors, self.plan.total
        report.transport = self.transport
        report.peak_staging = sum(buffer.nbytes for buffer in self.memory.buffers) if self.memory is not None else 0
        if self.route is not None:
            report.peak_staging += self.route.staging.footprint

    @property
    def transport(self) -> str:
        """The way in which versions move; ``"ipc"`` if receivers copy all of each out of the memory of senders."""
        if not self.plan.node_sets and self.plan.borrowers:
            return "ipc"
        return self.route.backend if self.route is not None else "host"

    def _get_ready(
        self, version: int, tensors: list[Tensor] | None, failure: Exception | None, timeout: timedelta
    ) -> None:
        """Agrees that all sync this version. Senders say where their tensors lie; receivers plan what they copy from there."""
        digest, memory = "", None
        if self.plan.lent and tensors is not None and failure is None:
            memory, failure = attempt(lambda: self._share(tensors))
        if memory is not None:
            digest = digest_of(memory)
        digests = self.control.settle("getting ready", failure, [version, digest], _check_version)
        if digests == self._digests:
            return
        if self.puller is not None:
            puller = self.puller
            _, failure = attempt(lambda: puller.plan(digests, lambda rank: get(self.store, f"memory/{rank}", timeout)))
        self.control.settle("planning copies between devices", failure)
        self._digests = digests

    def _moved_shards(self, tensors: list[Tensor], verify: bool) -> Shards | None:
        """The tensors that buckets are packed from or unpacked into; None if there are no buckets."""
        return self.shards(tensors, verify) if self.plan.node_sets else None

    def _pulling(self, tensors: list[Tensor] | None, verify: bool) -> AbstractContextManager[None]:
        puller = self.puller
        if puller is None:
            return nullcontext()
        buckets: dict[int, Tensor] = {}
        if puller.lands:
            buckets = dict(self._in_memory(self._landing_waves))
            self.pipe = DevicePipe.of(puller.device, self._node_size)
        pipe = self.pipe if puller.lands else None
        return puller.copying(tensors or [], buckets, pipe, verify, self.control)

    def _close_after_failure(self, version: int) -> None:
        """Receivers say that they have closed the memory of senders; these wait for them, so that whoever catches the error may
        free it. Not for long: a receiver that was killed says nothing, and has nothing open."""
        key = f"closed/{self.number}/{version}"
        with suppress(RuntimeError):  # the store is lost, or a receiver
            if self.puller is not None:
                self.store.set(f"{key}/{self.rank}", "")
            closed = [f"{key}/{rank}" for rank in self.plan.borrowers]
            until = monotonic() + _CLOSING_SECONDS
            while self.plan.lent and monotonic() < until and not self.store.check(closed):
                sleep(0.01)

    def _share(self, tensors: list[Tensor]) -> bytes:
        """Says where a sender's tensors lie, unless it has."""
        try:
            memory = SharedMemory.of(tensors).encode()
        except (RuntimeError, ValueError) as error:
            raise LoadError(
                f"the sender's tensors can no longer be opened by other processes: {message_of(error)}; the next version goes "
                "another way"
            ) from error
        for device in {tensor.device for tensor in tensors}:
            torch.accelerator.current_stream(device).synchronize()
        if memory != self._shared:
            put(self.store, f"memory/{self.rank}", memory)
            self._shared = memory
        return memory

    def _move(
        self,
        version: int,
        shards: Shards | None,
        report: SyncReport,
        verify: bool,
        show_progress: bool,
    ) -> None:
        if not self.plan.node_sets:  # receivers copy all of it out of the memory of senders
            return
        control, plan = self.control, self.plan
        roles = ExchangeRoles(plan, self.members, self.rank)
        framing = Framing(
            plan.identity, plan.describe, self.rank, control, verify, version=version, ends_in_order=False
        )
        source = ShardSource(shards) if shards is not None and self.sends else None
        sink = ShardSink(None if self.sends else shards)
        context = TransferContext(plan, roles, source, framing, control, report)
        if self.route is not None:
            engine = self.route.engine(context, sink if self.memory is None else self._memory_sink(roles, framing))
            on_stream: AbstractContextManager[object] = self.route.staging.local
        else:
            engine, on_stream = self._through_memory(context, roles, sink), nullcontext()
        with on_stream, Progress(plan.nbytes, show_progress) as bar:
            run_transfer(engine, control, self.groups, bar)

    def _memory_sink(self, roles: ExchangeRoles, framing: Framing) -> MemorySink:
        def verify(number: int, bucket: Tensor) -> None:
            framing.verify(number, roles.reader(number), bucket)

        return MemorySink(self._places, verify if framing.checked else None)

    @cached_property
    def _places(self) -> dict[int, Tensor]:
        return dict(self.staged_buckets())

    def _through_memory(self, context: TransferContext, roles: ExchangeRoles, sink: ShardSink) -> Engine:
        memory = self.memory
        assert memory is not None

        def connect(ring: HostRing, seconds: float) -> Relay:
            group = self.groups.name(self.members.rail(self.members.rail_of[self.rank]))
            route = Route(self.rank, self.rank, group, "")
            return Relay(context, ring, route, roles.chunk_bytes, memory.board.words, seconds)

        engine = through_memory(context, memory, self.waves, sink, connect, self._waves_before)
        self._waves_before += len(self.waves)
        return engine

    @property
    def _node_size(self) -> int:
        """Ranks of this rank's node."""
        members = self.members
        nodes = members.sender_nodes if self.sends else members.nodes
        return next(len(node) for node in nodes if self.rank in node)

    def shards(self, tensors: list[Tensor], verify: bool) -> Shards:
        """Returns the tensors of one version."""
        return self._shards_of(self.plan, tensors, verify)

    def _shards_of(self, plan: ExchangePlan, tensors: list[Tensor], verify: bool) -> Shards:
        direct = self.route is not None and (self.sends or self.memory is None)
        shards = Shards(plan, tensors, verify, f"rank {self.rank}", self._node_size, direct)
        self.pipe = shards.pipe or self.pipe
        return shards

    def unpack(self, tensors: list[Tensor], verify: bool) -> None:
        """Copies a version out of the node's memory."""
        for plan, waves in ((self.plan, self.waves), (self.plan.landing, self._landing_waves)):
            if plan is None or not waves:
                continue
            shards = self._shards_of(plan, tensors, verify)
            try:
                for number, bucket in self._in_memory(waves):
                    shards.unpack(number, bucket)
            finally:
                shards.finish()

    def staged_buckets(self) -> Iterator[tuple[int, Tensor]]:
        """Each bucket of a version that came into the node's memory, by its number in the plan."""
        return self._in_memory(self.waves)

    @property
    def _landing_waves(self) -> list[Wave]:
        """Behind those of the buckets that move."""
        return landing_waves(self.plan)

    def _in_memory(self, waves: Sequence[Wave]) -> Iterator[tuple[int, Tensor]]:
        assert self.memory is not None
        for wave in waves:
            buffer = self.memory.buffers[wave.index]
            for number, begin, end in zip(wave.numbers, wave.begins, wave.ends, strict=True):
                yield number, buffer[begin:end]

    def close(self) -> None:
        """Ends the epoch on this rank."""
        self.groups.clear()
        self.control.processes.close()


def _check_version(views: dict[int, Any]) -> list[str]:
    """The digests of what senders say of where their tensors lie, by rank."""
    for rank, (version, _) in views.items():
        if version != views[0][0]:
            raise LoadError(
                f"rank 0 syncs version {views[0][0]}, rank {rank} version {version}: the ranks are out of step"
            )
    return [views[rank][1] for rank in sorted(views)]
