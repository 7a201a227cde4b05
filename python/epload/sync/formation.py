"""Forming an epoch: the ranks of both jobs tell each other what they have or want, and plan, share memory and connect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from epload.checkpoint.manifest import Manifest
from epload.core import garbage_collection
from epload.core.attempt import attempt
from epload.core.log import logger
from epload.errors import LoadError, kind_of, make_error
from epload.planning.exchange import plan_exchange
from epload.planning.holdings import Holdings, HoldingsSummary
from epload.planning.schedule import SYNC_WAVE_BYTES
from epload.planning.streams import ExchangePlan, Members
from epload.ranks.control import Control
from epload.ranks.membership import group_equal
from epload.ranks.rendezvous import rendezvous
from epload.sync.device_route import DeviceRoute
from epload.sync.devices import DeviceLink, Probe, find_reach, obstacle
from epload.sync.epoch import Epoch
from epload.sync.host_route import HostRoute
from epload.sync.lobby import Member, Participants, describe_ranks
from epload.sync.pulling import Puller
from epload.sync.store import fetch, publish
from epload.transfer.shared_memory import BUFFERS, NodeMemory


@dataclass(frozen=True)
class JoinMessage:
    """A rank's message as it joins an epoch."""

    node: str
    """Equal on ranks that share a machine's memory, and send or receive together."""
    sends: bool
    verify: bool = False
    whole: bool = False
    """True if its node keeps a whole version in memory."""
    link: DeviceLink = field(default_factory=DeviceLink)
    probe: Probe = field(default_factory=Probe)
    columns: str = ""
    """Name in the store of the first part of the summary of the rank's holdings."""
    rest: str = ""
    """Name of the second part."""
    parts: str = ""
    """Name of what else those need to know of a sender's holdings that copy out of its memory; empty if nobody can."""

    @classmethod
    def decode(cls, fields: dict[str, Any]) -> JoinMessage:
        return cls(**{**fields, "link": DeviceLink(**fields["link"]), "probe": Probe(**fields["probe"])})


def form_epoch(
    store: Store,
    participants: Participants,
    members: Sequence[Member],
    rank: int,
    timeout: timedelta,
    verify: bool,
    message: JoinMessage,
    device: torch.device | None,
    manifest: Manifest,
    holdings: Holdings,
    failure: Exception | None = None,
) -> Epoch:
    """Forms an epoch. Collective over its ranks: senders first, in the order of their job; then receivers.

    Args:
        store: of both jobs.
        members: the receivers.
        message: this rank's, without its holdings.
        device: the one that this rank's tensors are on, if it is no CPU.
        holdings: this rank's of the manifest's tensors.
        failure: why this rank cannot take part; raised on all.

    Raises:
        LoadError: a rank cannot take part, or has not come in time; the same on every rank.
    """
    legend = describe_ranks(participants.senders, members)
    columns, rest = (publish(store, part) for part in holdings.summary().encode())
    parts = publish(store, holdings.encode_parts()) if message.sends and message.probe.handle else ""
    message = replace(message, verify=verify, columns=columns, rest=rest, parts=parts)
    try:
        control, views = rendezvous(
            PrefixStore(f"epoch/{participants.epoch}", store), tuple(range(participants.senders + len(members))), rank,
            timeout, failure, asdict(message), _by_rank, message.node,
        )  # fmt: skip
        control.begin(timeout)
        try:
            with control.guard(), garbage_collection.paused():
                joining = list(map(JoinMessage.decode, views))
                formation = _Formation(store, control, joining, device, legend)
                return formation.form(participants.epoch, manifest, holdings)
        finally:
            control.end()
    except (LoadError, ValueError) as error:
        raise make_error(kind_of(error), f"{error}\n{legend}") from error


def _by_rank(views: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages of all ranks. Raises ValueError if they differ in ``verify``."""
    for rank, view in views.items():
        if view["verify"] != views[0]["verify"]:
            raise ValueError(
                f"expected the same verify= from sender and receivers, got {views[0]['verify']!r} on rank 0 and "
                f"{view['verify']!r} on rank {rank}"
            )
    return [views[rank] for rank in sorted(views)]


class _Formation:
    """The steps of one rank, once all have joined."""

    def __init__(
        self, store: Store, control: Control, joining: list[JoinMessage], device: torch.device | None, legend: str
    ) -> None:
        self._store = store
        self._control = control
        self._joining = joining
        self._own = joining[control.rank]
        self._device = device
        self._legend = legend
        # Ranks that may open memory of senders on their machine are a node, apart from those there that cannot.
        lent = {(m.probe.machine, m.probe.kind) for m in joining if m.sends and m.probe.handle}
        senders = {rank: m.node for rank, m in enumerate(joining) if m.sends}
        receivers = {
            rank: f"{m.node} {(m.probe.machine, m.probe.kind) in lent}" for rank, m in enumerate(joining) if not m.sends
        }
        nodes = (tuple(map(tuple, group_equal(of_rank))) for of_rank in (senders, receivers))
        self._members = Members(*nodes)

    def form(self, number: int, manifest: Manifest, holdings: Holdings) -> Epoch:
        control, members = self._control, self._members
        control.doing = "plans the exchange"
        opens = self._device if not self._own.sends and self._own.probe.kind else None
        reach, not_pulled = find_reach(control, members, opens, [message.probe for message in self._joining])

        def make_plan() -> tuple[ExchangePlan, dict[int, Holdings]]:
            summaries = self._summaries()
            node = next((number for number, ranks in enumerate(members.nodes) if control.rank in ranks), -1)
            lenders = {
                sender: Holdings.decode(summaries[sender], self._fetch(self._joining[sender].parts))
                for sender in reach.get(node, ())
            }
            plan = plan_exchange(
                manifest, members, summaries, control.rank, holdings, SYNC_WAVE_BYTES, f"epoch {number}", reach,
                lenders if self._own.whole else None,
            )  # fmt: skip
            return plan, lenders

        planned, failure = attempt(make_plan)
        fingerprint = planned[0].fingerprint.hex() if planned is not None else ""
        control.settle("planning the exchange", failure, fingerprint, _check_equal)
        assert planned is not None
        plan, lenders = planned
        puller: Puller | None = None
        if plan.pulls is not None or plan.landing is not None:
            assert opens is not None
            node = next(node for node in members.nodes if control.rank in node)
            puller = Puller(plan, lenders, opens, node.index(control.rank), len(node))
        memory, route = self._connect(plan)
        return Epoch(
            number, control, members, plan, memory, route, self._legend, self._store, puller, not_pulled, control.timeout,
            self._own.verify,
        )  # fmt: skip

    def _connect(self, plan: ExchangePlan) -> tuple[NodeMemory | None, DeviceRoute | HostRoute | None]:
        """Makes the node's memory, and connects the ranks if anything moves."""
        control, members = self._control, self._members
        route, why = self._device_route(plan) if plan.node_sets else (None, "")
        through_host = bool(plan.node_sets) and route is None
        memory = None
        if through_host or any(message.whole for message in self._joining):
            memory = self._make_memory(plan, through_host)
        if through_host:
            assert memory is not None
            if control.rank == 0:
                logger.info("versions pass through host memory: %s", why)
            return memory, HostRoute(plan, members, control, memory)
        if route is not None:
            try:
                route.connect()
            except BaseException:
                route.groups.clear()
                raise
        return memory if self._own.whole else None, route

    def _device_route(self, plan: ExchangePlan) -> tuple[DeviceRoute | None, str]:
        """Returns the route from device to device, or why there is none; the same on all ranks."""
        if why := obstacle([message.link for message in self._joining]):
            return None, why
        assert self._device is not None
        whole = [node for node in self._members.nodes if self._joining[node[0]].whole]
        route = DeviceRoute(plan, self._members, self._control, whole, self._device, self._own.link.backend)
        return (None, route.obstacle) if route.obstacle else (route, "")

    def _make_memory(self, plan: ExchangePlan, all_nodes: bool) -> NodeMemory:
        """Makes the memory of this rank's node, or a token of its own.

        Args:
            all_nodes: whether every node needs memory, and not only those that keep whole versions.

        Raises:
            LoadError: the ranks of a receiving node that needs it cannot share memory.
        """
        waves = [*plan.waves, *plan.landing_waves]
        nbytes = max((wave.nbytes for wave in waves), default=0)
        count = max(len(waves), 1) if self._own.whole else BUFFERS
        if not (all_nodes or self._own.whole):
            nbytes, count = 0, 1
        nodes: list[tuple[int, ...]] = [(rank,) for rank in self._members.senders]
        for node in self._members.nodes:
            nodes += [node] if all_nodes or self._joining[node[0]].whole else [(rank,) for rank in node]
        memory = NodeMemory.for_node(self._control, nodes, nbytes, count)
        if not memory.shared:
            raise LoadError(
                f"the ranks of a receiving node cannot share memory ({self._legend}): run them in containers that share process "
                "ids, or pass each its own node= so that each receives by itself"
            )
        return memory

    def _summaries(self) -> dict[int, HoldingsSummary]:
        """Fetches the summaries of all ranks' holdings. Equal ones are fetched once, and are one object."""
        summaries: dict[tuple[str, str], HoldingsSummary] = {}
        columns: dict[str, tuple[bytes, Tensor]] = {}
        for message in self._joining:
            if (key := (message.columns, message.rest)) not in summaries:
                content = columns[key[0]][0] if key[0] in columns else self._fetch(key[0])
                summary = HoldingsSummary.decode(content, self._fetch(key[1]))
                _, class_of = columns.setdefault(key[0], (content, summary.class_of))
                summaries[key] = replace(summary, class_of=class_of)
        return {rank: summaries[message.columns, message.rest] for rank, message in enumerate(self._joining)}

    def _fetch(self, name: str) -> bytes:
        return fetch(self._store, name, self._control.timeout)


def _check_equal(fingerprints: dict[int, str]) -> None:
    for rank, fingerprint in fingerprints.items():
        if fingerprint != fingerprints[0]:
            raise LoadError(
                f"ranks 0 and {rank} have planned different exchanges of the same tensors; this is a bug in epload"
            )
