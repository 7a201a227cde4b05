"""Forming an epoch: the ranks of both jobs tell each other what they have or want, and plan, share memory and connect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from epload.checkpoint.manifest import Manifest
from epload.cluster.group_cache import GroupCache
from epload.cluster.membership import group_equal, local_network
from epload.cluster.rendezvous import rendezvous
from epload.control.control import Control
from epload.core import garbage_collection
from epload.core.attempt import attempt
from epload.core.log import logger
from epload.errors import LoadError, kind_of, make_error
from epload.planning.exchange import plan_exchange
from epload.planning.pulls import Reach
from epload.planning.schedule import SYNC_WAVE_BYTES
from epload.planning.shares import Outline, Share
from epload.planning.streams import ExchangePlan, Members
from epload.planning.waves import Wave
from epload.staging.shared_memory import BUFFERS, NodeMemory
from epload.sync.device_route import DeviceLink, find_route, obstacle
from epload.sync.epoch import Epoch, SyncOptions
from epload.sync.lobby import Member
from epload.sync.pulling import Probe, Puller, find_reach
from epload.sync.store import fetch, publish
from epload.sync.transfer import exchange_waves, landing_waves

_MOST_SHOWN = 8
"""Engines that one message lists."""


@dataclass(frozen=True)
class Attendee:
    """One rank of an epoch, as it joins it."""

    rank: int
    """Senders first, in the order of their job; then receivers."""
    node: str
    """Equal on ranks that share a machine's memory, and send or receive together."""
    sends: bool
    whole: bool = False
    """True if its node keeps a whole version in memory."""
    link: DeviceLink | None = None
    """None if versions have to pass through host memory to come from or go to its device."""
    probe: Probe | None = None
    """A sender's, unless versions have to pass through host memory."""
    pulls: torch.device | None = None
    """The device by which a receiver may copy versions out of the memory of senders."""

    @property
    def near(self) -> list[Any]:
        """The machine, and the type of the device on which it shares or opens memory; of a sender that does, its probe."""
        if self.probe is not None:
            return [local_network(), *astuple(self.probe)]
        return [local_network(), self.pulls.type if self.pulls is not None else "", "", 0, ""]


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
    # Ranks that may open memory of senders on their machine are a node, apart from those there that cannot.
    lent = {tuple(view[7][:2]) for view in views if view[1] and view[7][2]}
    of_receivers = {rank: f"{view[0]} {tuple(view[7][:2]) in lent}" for rank, view in enumerate(views) if not view[1]}
    return Members(
        tuple(map(tuple, group_equal(of_senders))),
        tuple(map(tuple, group_equal(of_receivers))),
    )


def _outlines(store: Store, views: Sequence[Sequence[Any]], timeout: timedelta) -> dict[int, Outline]:
    """Fetches the outlines of all ranks. Equal ones are fetched once, and are one object."""
    columns = {name: fetch(store, name, timeout) for name in dict.fromkeys(view[3] for view in views)}
    rest = {name: fetch(store, name, timeout) for name in dict.fromkeys(view[4] for view in views)}
    made: dict[tuple[str, str], Outline] = {}
    arrays: dict[str, Any] = {}
    for view in views:
        if (key := (view[3], view[4])) not in made:
            outline = Outline.decode(columns[view[3]], rest[view[4]])
            made[key] = replace(outline, class_of=arrays.setdefault(view[3], outline.class_of))
    return {rank: made[view[3], view[4]] for rank, view in enumerate(views)}


def _check_equal(fingerprints: dict[int, str]) -> None:
    for rank, fingerprint in fingerprints.items():
        if fingerprint != fingerprints[0]:
            raise LoadError(
                f"ranks 0 and {rank} have planned different exchanges of the same tensors; this is a bug in epload"
            )


def describe_ranks(senders: int, members: Sequence[Member]) -> str:
    """Says which ranks of an epoch are whose, for error messages."""
    engines: dict[str, list[int]] = {}
    for rank, member in enumerate(members, senders):
        engines.setdefault(member.engine, []).append(rank)
    listed = [f"{ranks[0]} to {ranks[-1]} engine {engine}'s" for engine, ranks in list(engines.items())[:_MOST_SHOWN]]
    more = f", and {len(engines) - _MOST_SHOWN} more engines" if len(engines) > _MOST_SHOWN else ""
    return f"Ranks 0 to {senders - 1} are the sender's, {', '.join(listed)}{more}."
