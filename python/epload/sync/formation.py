"""Forming an epoch: the ranks of both jobs tell each other what they have or want, and plan, share memory and connect."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from epload.checkpoint.manifest import Manifest
from epload.core import garbage_collection
from epload.core.attempt import Attempt
from epload.core.log import logger
from epload.errors import LoadError, kind_of, make_error
from epload.planning.exchange import plan_exchange
from epload.planning.holdings import Holdings
from epload.planning.schedule import SYNC_WAVE_BYTES
from epload.planning.streams import ExchangePlan, Members
from epload.ranks.contents import fetch, fetch_summaries, publish, publish_summary
from epload.ranks.control import Control
from epload.ranks.membership import group_equal
from epload.ranks.rendezvous import rendezvous
from epload.sync.device_route import DeviceRoute
from epload.sync.devices import DeviceAccess, find_reach, link_obstacle
from epload.sync.epoch import Epoch
from epload.sync.host_route import HostRoute
from epload.sync.lobby import Member, Participants, describe_ranks
from epload.sync.pulling import Puller
from epload.transfer.shared_memory import BUFFERS, NodeMemory


class JoinMessage(NamedTuple):
    """A rank's message as it joins an epoch."""

    node: str
    """Equal on ranks that share a machine's memory, and send or receive together."""
    sends: bool
    verify: bool
    access: DeviceAccess
    whole: bool = False
    """True if its node keeps a whole version in memory."""
    summary: Sequence[str] = ()
    """Names in the store of the summary of the rank's holdings."""
    parts: str = ""
    """Name of what else those need to know of a sender's holdings that copy out of its memory; empty if nobody can."""


def form_epoch(
    store: Store,
    timeout: timedelta,
    participants: Participants,
    members: Sequence[Member],
    rank: int,
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
    parts = publish(store, holdings.encode_parts()) if message.sends and message.access.handle else ""
    message = message._replace(summary=publish_summary(store, holdings.summary()), parts=parts)
    try:
        control, views = rendezvous(
            PrefixStore(f"epoch/{participants.epoch}", store), tuple(range(participants.senders + len(members))), rank,
            timeout, failure, message, _by_rank, message.node,
        )  # fmt: skip
        control.begin(timeout)
        try:
            with control.guard(), garbage_collection.paused():
                joining = [JoinMessage(*view)._replace(access=DeviceAccess(*view[3])) for view in views]
                return _form(store, control, joining, participants.epoch, device, manifest, holdings, legend)
        finally:
            control.end()
    except (LoadError, ValueError) as error:
        raise make_error(kind_of(error), f"{error}\n{legend}") from error


def _by_rank(views: dict[int, list[Any]]) -> list[list[Any]]:
    """Returns the messages of all ranks. Raises ValueError if they differ in ``verify``."""
    messages = [JoinMessage(*views[rank]) for rank in sorted(views)]
    for rank, message in enumerate(messages):
        if message.verify != messages[0].verify:
            raise ValueError(
                f"expected the same verify= from sender and receivers, got {messages[0].verify!r} on rank 0 and "
                f"{message.verify!r} on rank {rank}"
            )
    return [list(message) for message in messages]


def _form(
    store: Store,
    control: Control,
    joining: Sequence[JoinMessage],
    number: int,
    device: torch.device | None,
    manifest: Manifest,
    holdings: Holdings,
    legend: str,
) -> Epoch:
    """Takes the steps of one rank, once all have joined."""
    own, members = joining[control.rank], _members(joining)
    node = next((i for i, ranks in enumerate(members.nodes) if control.rank in ranks), -1)
    control.doing = "plans the exchange"
    opens = device if not own.sends and own.access.opens else None
    reach, not_pulled = find_reach(control, members, opens, [message.access for message in joining])

    def make_plan() -> tuple[ExchangePlan, dict[int, Holdings]]:
        summaries = fetch_summaries(store, [message.summary for message in joining], control.timeout)
        lenders = {
            sender: Holdings.decode(summaries[sender], fetch(store, joining[sender].parts, control.timeout))
            for sender in reach.get(node, ())
        }
        plan = plan_exchange(
            manifest, members, dict(enumerate(summaries)), control.rank, holdings, SYNC_WAVE_BYTES, f"epoch {number}", reach,
            lenders if own.whole else None,
        )  # fmt: skip
        return plan, lenders

    planned = Attempt(make_plan)
    fingerprint = planned.value[0].fingerprint.hex() if planned.failure is None else ""
    control.settle("planning the exchange", planned.failure, fingerprint, _check_equal)
    plan, lenders = planned.value
    puller: Puller | None = None
    if plan.pulls is not None or plan.landing is not None:
        assert opens is not None
        ranks = members.nodes[node]
        puller = Puller(plan, lenders, opens, ranks.index(control.rank), len(ranks))

    # Memory of the node, and connections if anything moves.
    route: DeviceRoute | HostRoute | None = None
    if plan.node_sets:
        route = _device_route(control, plan, members, joining, device)
    memory: NodeMemory | None = None
    through_host = bool(plan.node_sets) and route is None
    if through_host or any(message.whole for message in joining):
        memory = _make_memory(control, plan, members, joining, through_host, legend)
    if isinstance(route, DeviceRoute):
        route.connect()
    elif through_host and memory is not None:
        route = HostRoute(plan, members, control, memory)
    if not (through_host or own.whole):
        memory = None
    return Epoch(
        number, control, members, plan, memory, route, legend, store, puller, not_pulled, control.timeout, own.verify
    )


def _members(joining: Sequence[JoinMessage]) -> Members:
    """Returns the nodes of both jobs. Ranks that may open memory of senders on their machine are a node, apart from those there
    that cannot."""
    lent = {(m.access.machine, m.access.opens) for m in joining if m.sends and m.access.handle}
    senders = {rank: m.node for rank, m in enumerate(joining) if m.sends}
    receivers = {
        rank: f"{m.node} {(m.access.machine, m.access.opens) in lent}" for rank, m in enumerate(joining) if not m.sends
    }
    return Members(*(tuple(map(tuple, group_equal(of_rank))) for of_rank in (senders, receivers)))


def _device_route(
    control: Control,
    plan: ExchangePlan,
    members: Members,
    joining: Sequence[JoinMessage],
    device: torch.device | None,
) -> DeviceRoute | None:
    """Returns the route from device to device; None if versions pass through host memory, on all ranks."""
    access = [message.access for message in joining]
    route: DeviceRoute | None = None
    if not (obstacle := link_obstacle(access)):
        assert device is not None
        whole = [node for node in members.nodes if joining[node[0]].whole]
        route = DeviceRoute(plan, members, control, whole, device, access[control.rank].backend)
        obstacle = route.obstacle
    if not obstacle:
        return route
    if control.rank == 0:
        logger.info("versions pass through host memory: %s", obstacle)
    return None


def _make_memory(
    control: Control,
    plan: ExchangePlan,
    members: Members,
    joining: Sequence[JoinMessage],
    all_nodes: bool,
    legend: str,
) -> NodeMemory:
    """Makes the memory of this rank's node, or a token of its own.

    Args:
        all_nodes: whether every node needs memory, and not only those that keep whole versions.

    Raises:
        LoadError: the ranks of a receiving node that needs it cannot share memory.
    """
    whole, waves = joining[control.rank].whole, [*plan.waves, *plan.landing_waves]
    nbytes, count = 0, 1
    if all_nodes or whole:
        nbytes = max((wave.nbytes for wave in waves), default=0)
        count = max(len(waves), 1) if whole else BUFFERS
    nodes: list[tuple[int, ...]] = [(rank,) for rank in members.senders]
    for node in members.nodes:
        nodes += [node] if all_nodes or joining[node[0]].whole else [(rank,) for rank in node]
    memory = NodeMemory.for_node(control, nodes, nbytes, count)
    if not memory.shared:
        raise LoadError(
            f"the ranks of a receiving node cannot share memory ({legend}): run them in containers that share process ids, or "
            "pass each its own node= so that each receives by itself"
        )
    return memory


def _check_equal(fingerprints: dict[int, str]) -> None:
    for rank, fingerprint in fingerprints.items():
        if fingerprint != fingerprints[0]:
            raise LoadError(
                f"ranks 0 and {rank} have planned different exchanges of the same tensors; this is a bug in epload"
            )
