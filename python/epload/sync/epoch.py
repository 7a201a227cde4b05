"""An epoch: the ranks of both jobs that sync versions together, as long as none of them fails or joins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from epload.checkpoint.manifest import Manifest
from epload.cluster.group_cache import GroupCache
from epload.cluster.membership import group_equal, local_network
from epload.cluster.rendezvous import rendezvous
from epload.cluster.topology import Route
from epload.control.control import Control
from epload.core import garbage_collection
from epload.core.attempt import attempt
from epload.core.log import logger
from epload.errors import LoadError, kind_of, make_error, message_of
from epload.observe.progress import Progress
from epload.planning.exchange import plan_exchange
from epload.planning.pulls import Reach
from epload.planning.schedule import SYNC_WAVE_BYTES
from epload.planning.shares import Outline, Share, digest_of
from epload.planning.streams import ExchangePlan, Members
from epload.planning.waves import Wave
from epload.staging.device_pipe import DevicePipe
from epload.staging.host_ring import HostRing
from epload.staging.shards import PreparedExchange, Shards
from epload.staging.shared_memory import BUFFERS, NodeMemory
from epload.sync.device_route import DeviceRoute, Link, MemorySink, find_route, obstacle
from epload.sync.lobby import Member
from epload.sync.pulling import Probe, Puller, SharedMemory, find_reach
from epload.sync.report import SyncReport
from epload.sync.store import fetch, get, publish, put
from epload.sync.transfer import ExchangeRoles, ShardSink, ShardSource, exchange_waves, landing_waves
from epload.transport.context import TransferContext
from epload.transport.engine import Engine
from epload.transport.framing import Framing
from epload.transport.movers import Relay
from epload.transport.transfers import run_transfer, through_memory

VERIFY = ("off", "buckets", "full")
_MOST_SHOWN = 8
"""Engines that one message lists."""


@dataclass(frozen=True)
class SyncOptions:
    """Of a sender or a receiver."""

    timeout: timedelta
    verify: str
    """One of ``VERIFY``."""

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.verify not in VERIFY:
            raise ValueError(f"expected verify to be one of {', '.join(VERIFY)}, got {self.verify!r}")


@dataclass(frozen=True)
class Attendee:
    """One rank of an epoch, as it joins it."""

    rank: int
    """Senders first, in the order of their job; then receivers."""
    node: str
    """Equal on ranks that share a machine's memory, and send or receive together."""
    sends: bool
    whole: bool = False
    """Whether its node keeps a whole version in memory."""
    link: Link | None = None
    """If versions may come from or go to its device without passing through host memory."""
    probe: Probe | None = None
    """Of a sender, unless versions have to pass through host memory."""
    pulls: torch.device | None = None
    """Of a receiver: the device by which it may copy versions out of the memory of senders."""

    @property
    def near(self) -> list[Any]:
        """The machine, and the type of the device on which it shares or opens memory; of a sender that does, its probe."""
        if self.probe is not None:
            return [local_network(), *astuple(self.probe)]
        return [local_network(), self.pulls.type if self.pulls is not None else "", "", 0, ""]


@dataclass(eq=False)
class Epoch:
    """What stays the same from version to version. Collective over the epoch's ranks: make it, then sync versions."""

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
    """Of both jobs."""
    puller: Puller | None
    """Of a receiver that copies a part of each version, or all of it, out of the memory of senders."""
    not_pulled: str
    """Why none does that, if it seemed possible; equal on all ranks."""
    _prepared: dict[bool, PreparedExchange] = field(default_factory=dict, init=False)
    """For the buckets that land, and for the others."""
    pipe: DevicePipe | None = None
    """Kept for the next version."""
    _waves_before: int = field(default=0, init=False)
    _shared: bytes = field(default=b"", init=False)
    """What a sender has said last of where its tensors lie."""
    _digests: list[str] = field(init=False)
    """For the version before, of what each rank has said of that; equal on all ranks."""

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
                with self._pulling(tensors, options.verify):
                    self._move(version, shards, report, options.verify, show_progress)
                # One key is either this decision or the first failure: the version is whole everywhere, or counts nowhere.
                control.settle("committing the version", None, last=True)
        except LoadError as error:
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
        """How versions move; ``"ipc"`` if receivers copy all of each out of the memory of senders."""
        if not self.plan.node_sets:
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

    def _moved_shards(self, tensors: list[Tensor], verify: str) -> Shards | None:
        """The tensors that buckets are packed from or unpacked into; None if there are no buckets."""
        return self.shards(tensors, verify) if self.plan.node_sets else None

    def _pulling(self, tensors: list[Tensor] | None, verify: str) -> AbstractContextManager[None]:
        puller = self.puller
        if puller is None:
            return nullcontext()
        buckets: dict[int, Tensor] = {}
        if puller.lands:
            buckets = dict(self._in_memory(self._landing_waves))
            self.pipe = DevicePipe.of(puller.device, self._node_size)
        return puller.copying(tensors or [], buckets, self.pipe if puller.lands else None, verify != "off")

    def _share(self, tensors: list[Tensor]) -> bytes:
        """Says where a sender's tensors lie, unless it has."""
        try:
            memory = SharedMemory.of(tensors).encode()
        except RuntimeError as error:
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
        verify: str,
        show_progress: bool,
    ) -> None:
        if not self.plan.node_sets:  # receivers copy all of it out of the memory of senders
            return
        control, plan = self.control, self.plan
        roles = ExchangeRoles(plan, self.members, self.rank)
        framing = Framing(
            plan.identity, plan.describe, self.rank, control, verify != "off", version=version, ends_in_order=False
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

    def shards(self, tensors: list[Tensor], verify: str) -> Shards:
        """The tensors of one version. What is prepared for them is kept."""
        return self._shards_of(self.plan, tensors, verify)

    def _shards_of(self, plan: ExchangePlan, tensors: list[Tensor], verify: str) -> Shards:
        direct = self.route is not None and (self.sends or self.memory is None)
        prepared = self._prepared.get(plan is self.plan)
        shards = Shards(plan, tensors, prepared, verify == "full", f"rank {self.rank}", self._node_size, direct)
        if shards.prepared is not None:
            self._prepared[plan is self.plan] = shards.prepared
        self.pipe = shards.pipe or self.pipe
        return shards

    def unpack(self, tensors: list[Tensor], verify: str) -> None:
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


def form_epoch(
    store: Store,
    number: int,
    ranks: int,
    me: Attendee,
    manifest: Manifest,
    share: Share,
    failure: Exception | None,
    options: SyncOptions,
    legend: str,
) -> Epoch:
    """Forms an epoch. Collective over its ranks.

    Args:
        store: of both jobs.
        number: of the epoch.
        ranks: how many it has.
        share: this rank's of the manifest's tensors.
        failure: why this rank cannot take part; raised on all.
        legend: says which ranks are whose.

    Raises:
        LoadError: a rank cannot take part, or has not come in time; the same on every rank.
    """
    names = [publish(store, part) for part in share.outline().encode()]
    link = [me.link.kind, me.link.place] if me.link is not None else ["", ""]
    parts = publish(store, share.encode_parts()) if me.probe is not None and me.probe.handle else ""
    view = [me.node, me.sends, me.whole, *names, *link, me.near, parts, options.verify]
    try:
        control, views = rendezvous(
            PrefixStore(f"epoch/{number}", store), tuple(range(ranks)), me.rank, options.timeout, failure, view,
            _by_rank, me.node,
        )  # fmt: skip
        control.begin(options.timeout)
        try:
            with control.guard(), garbage_collection.paused():
                return _form(store, number, control, me, manifest, share, views, legend)
        finally:
            control.end()
    except (LoadError, ValueError) as error:
        raise make_error(kind_of(error), f"{error}\n{legend}") from error


def _by_rank(views: dict[int, Any]) -> list[Any]:
    """The views of all ranks. Raises ValueError if they do not verify alike."""
    verify = {rank: view[-1] for rank, view in views.items()}
    for rank, of_rank in verify.items():
        if of_rank != verify[0]:
            raise ValueError(
                f"expected the same verify= from sender and receivers, got {verify[0]!r} on rank 0 and {of_rank!r} on rank {rank}"
            )
    return [views[rank][:-1] for rank in sorted(views)]


def _form(
    store: Store,
    number: int,
    control: Control,
    me: Attendee,
    manifest: Manifest,
    share: Share,
    views: Sequence[Sequence[Any]],
    legend: str,
) -> Epoch:
    control.doing = "plans the exchange"
    members = _members_of(views)
    reach, not_pulled = find_reach(control, members, me.pulls, [view[7] for view in views])
    outlines, failure = attempt(lambda: _outlines(store, views, control.timeout))
    lenders: dict[int, Share] | None = None
    if outlines is not None:
        lenders, failure = attempt(lambda: _lenders(store, members, reach, outlines, views, me.rank, control.timeout))
    plan: ExchangePlan | None = None
    if outlines is not None and lenders is not None:
        plan, failure = attempt(
            lambda: plan_exchange(
                manifest, members, outlines, me.rank, share, SYNC_WAVE_BYTES, f"epoch {number}", reach,
                lenders if me.whole else None,
            )
        )  # fmt: skip
    fingerprint = plan.fingerprint.hex() if plan is not None else ""
    control.settle("planning the exchange", failure, fingerprint, _check_equal)
    assert plan is not None
    waves = exchange_waves(plan)
    puller: Puller | None = None
    if plan.pulls is not None or plan.landing is not None:
        assert me.pulls is not None
        assert lenders is not None
        node = next(node for node in members.nodes if me.rank in node)
        puller = Puller(plan, lenders, me.pulls, node.index(me.rank), len(node))
    pulled = (legend, store, puller, not_pulled)
    whole, kinds, places = ([view[i] for view in views] for i in (2, 5, 6))
    whole_nodes = [node for node in members.nodes if whole[node[0]]]
    route, why, moves = None, "", bool(plan.node_sets)
    if moves:
        route, why = find_route(plan, members, me.rank, control, whole_nodes, me.link, obstacle(kinds, places))
    memory = None
    if any(whole) or (moves and route is None):
        needs = whole if route is not None or not moves else [True] * len(views)
        memory = _make_memory(control, members, [*waves, *landing_waves(plan)], me, legend, needs)
    if route is None:
        groups = GroupCache({"cpu": "gloo"}, me.rank, control)
        if moves:
            if me.rank == 0:
                logger.info("versions pass through host memory: %s", why)
            groups.make("exchange", tuple(members.rail(rail) for rail in range(members.rails)))
        return Epoch(number, control, members, plan, waves, memory, groups, None, *pulled)
    try:
        route.connect()
    except BaseException:
        route.groups.clear()
        raise
    return Epoch(number, control, members, plan, waves, memory if me.whole else None, route.groups, route, *pulled)


def _lenders(
    store: Store,
    members: Members,
    reach: Reach,
    outlines: Mapping[int, Outline],
    views: Sequence[Sequence[Any]],
    rank: int,
    timeout: timedelta,
) -> dict[int, Share]:
    """The shares of the senders whose memory a receiver's node can open."""
    node = next((number for number, ranks in enumerate(members.nodes) if rank in ranks), -1)
    return {
        sender: Share.decode(outlines[sender], fetch(store, views[sender][8], timeout))
        for sender in reach.get(node, ())
    }


def _make_memory(
    control: Control, members: Members, waves: Sequence[Wave], me: Attendee, legend: str, needs: Sequence[bool]
) -> NodeMemory:
    """The memory of this rank's node, or a token of its own. ``needs``: for each rank, whether its node needs memory.

    Raises:
        LoadError: the ranks of a receiving node that needs it cannot share memory.
    """
    count = max(len(waves), 1) if me.whole else BUFFERS
    nbytes = max((wave.nbytes for wave in waves), default=0)
    if not needs[me.rank]:
        nbytes, count = 0, 1
    nodes: list[tuple[int, ...]] = [(rank,) for rank in members.senders]
    for node in members.nodes:
        nodes += [node] if needs[node[0]] else [(rank,) for rank in node]
    memory = NodeMemory.for_node(control, nodes, nbytes, count)
    if not memory.shared:
        raise LoadError(
            f"the ranks of a receiving node cannot share memory ({legend}): run them in containers that share process ids, or "
            "pass each its own node= so that each receives by itself"
        )
    return memory


def _members_of(views: Sequence[Sequence[Any]]) -> Members:
    """The nodes of both jobs. A sender's ranks and a receiver's are in different nodes, even on one machine."""
    of_senders = {rank: view[0] for rank, view in enumerate(views) if view[1]}
    of_receivers = {rank: view[0] for rank, view in enumerate(views) if not view[1]}
    return Members(
        tuple(map(tuple, group_equal(of_senders))),
        tuple(map(tuple, group_equal(of_receivers))),
    )


def _outlines(store: Store, views: Sequence[Sequence[Any]], timeout: timedelta) -> dict[int, Outline]:
    """Of every rank. Equal ones are fetched once, and are one object."""
    columns = {name: fetch(store, name, timeout) for name in dict.fromkeys(view[3] for view in views)}
    rest = {name: fetch(store, name, timeout) for name in dict.fromkeys(view[4] for view in views)}
    made: dict[tuple[str, str], Outline] = {}
    arrays: dict[str, Any] = {}
    for view in views:
        if (key := (view[3], view[4])) not in made:
            outline = Outline.decode(columns[view[3]], rest[view[4]])
            made[key] = Outline(arrays.setdefault(view[3], outline.class_of), outline.boxes, outline.dtypes)
    return {rank: made[view[3], view[4]] for rank, view in enumerate(views)}


def _check_equal(fingerprints: dict[int, str]) -> None:
    for rank, fingerprint in fingerprints.items():
        if fingerprint != fingerprints[0]:
            raise LoadError(
                f"ranks 0 and {rank} have planned different exchanges of the same tensors; this is a bug in epload"
            )


def _check_version(views: dict[int, Any]) -> list[str]:
    """The digests of what senders say of where their tensors lie, by rank."""
    for rank, (version, _) in views.items():
        if version != views[0][0]:
            raise LoadError(
                f"rank 0 syncs version {views[0][0]}, rank {rank} version {version}: the ranks are out of step"
            )
    return [views[rank][1] for rank in sorted(views)]


def describe_ranks(senders: int, members: Sequence[Member]) -> str:
    """Which ranks of an epoch are whose, for error messages."""
    engines: dict[str, list[int]] = {}
    for rank, member in enumerate(members, senders):
        engines.setdefault(member.engine, []).append(rank)
    listed = [f"{ranks[0]} to {ranks[-1]} engine {engine}'s" for engine, ranks in list(engines.items())[:_MOST_SHOWN]]
    more = f", and {len(engines) - _MOST_SHOWN} more engines" if len(engines) > _MOST_SHOWN else ""
    return f"Ranks 0 to {senders - 1} are the sender's, {', '.join(listed)}{more}."
