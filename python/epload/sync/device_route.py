"""Moves a version from device to device: a bucket goes from its sender to a node, from there to the other nodes that need it, and
to the ranks of each node, over the broadcasts of the devices' own backend, such as NCCL or HCCL."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from epload.cluster.group_cache import GroupCache
from epload.cluster.groups import backends_of, can_connect
from epload.cluster.membership import local_network
from epload.cluster.topology import Route
from epload.control.control import Control
from epload.core.attempt import attempt
from epload.errors import LoadError, message_of
from epload.planning.streams import ExchangePlan, Members, Stream
from epload.planning.waves import Wave
from epload.staging.exchange_ring import ExchangeRing, ExchangeStaging
from epload.transport.context import TransferContext
from epload.transport.engine import Engine
from epload.transport.movers import broadcast, explain
from epload.transport.sinks import PlainSink, Sink
from epload.transport.transfers import message_timeout

MOST_GROUPS = 12
"""Communicators of a rank. Each takes memory of the device, with HCCL 400 MB by default."""
Family = tuple[tuple[int, ...], ...]
"""Groups of which none shares a rank with another."""


@dataclass(frozen=True)
class DeviceLink:
    """The connection by which one rank's device may reach the ranks of the other job."""

    device: torch.device
    backend: str
    kind: str
    """Device, backend and its version: equal on ranks that can reach each other."""
    place: str
    """Identity of the device; empty if it is not known."""


def link_of(devices: Collection[torch.device]) -> DeviceLink | None:
    """Returns the link of a rank with tensors on these devices; None unless it is one device that a backend connects."""
    if len(devices) != 1 or not dist.is_available():
        return None
    (device,) = devices
    group = dist.group.WORLD if dist.is_initialized() else None
    backends: Mapping[str, str] = backends_of(group) if group is not None else dist.Backend.default_device_backend_map
    backend = str(backends.get(device.type, ""))
    if device.type == "cpu" or not can_connect(backend):
        return None
    version = ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else ""  # type: ignore[no-untyped-call]
    return DeviceLink(device, backend, f"{device.type} {backend} {version}".strip(), _place_of(device))


def _place_of(device: torch.device) -> str:
    with suppress(Exception):  # an old driver
        uuid = str(getattr(torch, device.type).get_device_properties(device).uuid)
        if uuid.strip("0-"):  # one that has none gives zeros
            return uuid
    if device.type != "npu":
        return ""
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",")
    index = device.index or 0
    return f"{local_network()} {visible[index] if len(visible) > index and visible[index] else index}"


def obstacle(kinds: Sequence[str], places: Sequence[str]) -> str:
    """Why ranks with these links, empty for none, cannot all reach each other from their devices; empty if they can."""
    for rank, kind in enumerate(kinds):
        if not kind:
            return f"rank {rank} has tensors elsewhere than on one device that NCCL or the like connects, or is not to use it"
        if kind != kinds[0]:
            return f"rank 0 has {kinds[0]}, rank {rank} {kind}"
    used: dict[str, int] = {}
    for rank, place in enumerate(places):
        if place and used.setdefault(place, rank) != rank:
            return f"ranks {used[place]} and {rank} use one device"
    return ""


class Hop(NamedTuple):
    """A broadcast that this rank takes part in."""

    kind: int
    """Hops of one kind come before those of the next: so that no rail waits for what another one passes on inside the node."""
    root: int
    ranks: tuple[int, ...]


_ENTRY, _RAIL, _NODE = range(3)
"""Kinds of hops: from a sender to a node, from there to other nodes, and inside a node."""


class DeviceRoute:
    """The route of one epoch, on one rank."""

    def __init__(
        self,
        plan: ExchangePlan,
        members: Members,
        rank: int,
        control: Control,
        whole: Collection[tuple[int, ...]],
        link: DeviceLink,
    ) -> None:
        """``whole``: the nodes that keep whole versions in host memory, so that one rank for each rail receives."""
        self.backend = link.backend
        self.device = link.device
        self.groups = GroupCache({link.device.type: link.backend}, rank, control, link.device)
        self._plan = plan
        self._members = members
        self._rank = rank
        self._whole = whole
        self._keeps_whole = any(rank in node for node in whole)
        self._control = control
        self._hops: dict[int, list[Hop]] = {}
        """Hops of each of the plan's streams, by its number."""
        self.waves = self._make_waves()
        self._turn_of = {rank: i + j for i, node in enumerate(members.sender_nodes) for j, rank in enumerate(node)}
        self._families = list(self._make_families())

    @property
    def obstacle(self) -> str:
        """Why it cannot be used; equal on all ranks."""
        if (count := len(self._families)) <= MOST_GROUPS:
            return ""
        senders, sets = len(self._members.senders), len(self._plan.node_sets)
        return f"for {senders} senders and {sets} sets of nodes that need the same, a rank would have up to {count} communicators"

    def connect(self) -> None:
        """Makes buffers, groups and their communicators. Collective over the epoch's ranks.

        Raises:
            LoadError: a rank cannot; the same on every rank.
        """
        most = max((len(wave.numbers) for wave in self.waves), default=1)
        nbytes = max((wave.nbytes for wave in self.waves), default=1)
        staging, failure = attempt(lambda: ExchangeStaging(self.device, nbytes, most))
        if failure is not None:
            failure = LoadError(f"{message_of(failure)}; transport='host' needs less memory of {self.device}")
        self._control.settle("making buffers on devices", failure)
        assert staging is not None
        self.staging = staging
        self.groups.make("connecting devices", *self._families)

    def engine(self, context: TransferContext, sink: Sink) -> Engine:
        """Returns the engine that moves one version."""
        seconds = message_timeout(context.control, self.waves).total_seconds()
        ring = ExchangeRing(self.staging, context.flow, context.report, seconds, verifies=not self._keeps_whole)
        mover = Broadcasts(context, ring, self) if self.waves else None
        return Engine(context, self.waves, ring, mover, sink)

    # ---- who sends what to whom ----

    def _make_families(self) -> Iterator[Family]:
        members = self._members
        for nodes in self._plan.node_sets:
            pairs: list[dict[int, int]] = []  # of a family: the sender by the rank that it sends to
            for owner in members.senders:
                entry = members.nodes[self._entry(owner, nodes)][members.rail_of[owner]]
                free = next((family for family in pairs if entry not in family), None)
                if free is None:
                    pairs.append(free := {})
                free[entry] = owner
            for family in pairs:
                yield tuple((owner, entry) for entry, owner in family.items())
            if len(nodes) > 1:
                yield tuple(self._rail(nodes, rail) for rail in range(members.rails))
        if reached := tuple(node for node in members.nodes if node not in self._whole):
            yield reached

    def _entry(self, owner: int, nodes: Sequence[int]) -> int:
        """The number of the node at which what a sender sends to some nodes enters: another for the next sender of its node, and
        for the one of its rail in the next node."""
        return nodes[self._turn_of[owner] % len(nodes)]

    def _rail(self, nodes: Sequence[int], rail: int) -> tuple[int, ...]:
        return tuple(sorted(self._members.nodes[node][rail] for node in nodes))

    def hops(self, number: int) -> list[Hop]:
        """Returns the hops of a bucket that this rank takes part in."""
        stream = self._plan.buckets.stream[number]
        if stream not in self._hops:
            self._hops[stream] = list(self._find_hops(self._plan.buckets.streams[stream]))
        return self._hops[stream]

    def _find_hops(self, stream: Stream) -> Iterator[Hop]:
        members, rail = self._members, self._members.rail_of[stream.owner]
        entry = members.nodes[self._entry(stream.owner, stream.nodes)][rail]
        if self._rank in (stream.owner, entry):
            yield Hop(_ENTRY, stream.owner, (stream.owner, entry))
        if self._rank == stream.owner:
            return
        node = next(node for node in members.nodes if self._rank in node)
        if self._rank == node[rail] and len(stream.nodes) > 1:
            yield Hop(_RAIL, entry, self._rail(stream.nodes, rail))
        if not self._keeps_whole and len(node) > 1:
            yield Hop(_NODE, node[rail], node)

    def _make_waves(self) -> list[Wave]:
        """All ranks take the buckets of a wave in the same order: each waits for those before only."""
        plan = self._plan
        waves: list[Wave] = []
        for numbers in plan.waves:
            mine = sorted(
                filter(self._takes, numbers), key=lambda number: plan.buckets.streams[plan.buckets.stream[number]]
            )
            if mine:
                waves.append(Wave.of(len(waves), mine, [plan.buckets.nbytes[number] for number in mine]))
        return waves

    def _takes(self, number: int) -> bool:
        """Returns True if a bucket passes this rank."""
        if self._rank in self._members.senders or not self._keeps_whole:
            return True
        owner = self._plan.buckets.streams[self._plan.buckets.stream[number]].owner
        return self._members.rail_of.get(self._rank) == self._members.rail_of[owner]

    def group(self, hop: Hop) -> str:
        """The name of its group."""
        return self.groups.name(hop.ranks)


def find_route(
    plan: ExchangePlan,
    members: Members,
    rank: int,
    control: Control,
    whole: Collection[tuple[int, ...]],
    link: DeviceLink | None,
    why: str,
) -> tuple[DeviceRoute | None, str]:
    """The route from device to device, or why there is none; the same on all ranks.

    Args:
        whole: as for :class:`DeviceRoute`.
        why: the :func:`obstacle` between the ranks' links.
    """
    if why:
        return None, why
    assert link is not None
    route = DeviceRoute(plan, members, rank, control, whole, link)
    return (None, route.obstacle) if route.obstacle else (route, "")


class Broadcasts:
    """See :class:`~epload.transport.movers.Mover`. What enters from senders has a stream of its own, so that it may come while
    the wave before is passed on."""

    def __init__(self, context: TransferContext, ring: ExchangeRing, route: DeviceRoute) -> None:
        self._context = context
        self._ring = ring
        self._route = route

    def move(self, wave: Wave) -> None:
        staging = self._route.staging
        hops = [(hop, i) for i, number in enumerate(wave.numbers) for hop in self._route.hops(number)]
        entries = [(hop, i) for hop, i in hops if hop.kind == _ENTRY]
        self._broadcast(wave, entries, staging.entry)
        staging.spread.wait_stream(staging.entry)
        rest = [(hop, i) for hop, i in hops if hop.kind != _ENTRY]
        self._broadcast(wave, sorted(rest, key=lambda each: each[0].kind), staging.spread)
        self._context.report.transport_steps += len(hops)

    def _broadcast(self, wave: Wave, hops: Sequence[tuple[Hop, int]], stream: torch.Stream) -> None:
        context = self._context
        for hop, i in hops:
            number, bucket = wave.numbers[i], self._ring.bucket(wave, i)
            doing = (
                f"broadcasts bucket {number} from rank {hop.root} to {[rank for rank in hop.ranks if rank != hop.root]}"
            )
            phase = "intra_node" if hop.kind == _NODE else "inter_node"
            # On the current stream, as the op would make another one and the current one wait for each other.
            with context.activity.doing(doing), context.report.timed(phase, doing) as span, stream:
                try:
                    broadcast(bucket, Route(hop.root, hop.root, "", self._route.group(hop)), "two_level", stream)
                except RuntimeError as error:
                    raise explain(context, error, number) from error
                span.nbytes = bucket.nbytes


class MemorySink(PlainSink):
    """Out of buckets on a device, into a node's memory for a whole version. See :class:`~epload.transport.sinks.Sink`."""

    def __init__(self, places: Mapping[int, Tensor], verify: Callable[[int, Tensor], None] | None) -> None:
        """
        Args:
            places: that of each bucket.
            verify: raises LoadError if a bucket's checksum is not that of its bytes.
        """
        self._places = places
        self._verify = verify

    def unpack(self, number: int, bucket: Tensor) -> None:
        place = self._places[number]
        self._copy(place, bucket)
        if self._verify is not None:  # what is kept, and not what was on the device
            self._verify(number, place)

    @staticmethod
    def _copy(place: Tensor, bucket: Tensor) -> None:
        place.copy_(bucket)
