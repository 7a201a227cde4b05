"""Moves a version from device to device: a bucket goes from its sender to one rank of a node, and from there to all that need it,
over the broadcasts of the devices' own backend, such as NCCL or HCCL."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from itertools import product
from typing import NamedTuple

import torch

from epload.core.attempt import attempt
from epload.errors import LoadError, message_of
from epload.planning.streams import ExchangePlan, Members, Stream
from epload.planning.waves import Wave
from epload.ranks.control import Control
from epload.ranks.group_cache import GroupCache
from epload.ranks.topology import Route
from epload.transfer.context import TransferContext
from epload.transfer.device import DeviceStaging
from epload.transfer.device_ring import DeviceRing
from epload.transfer.engine import Engine, message_timeout
from epload.transfer.movers import broadcast, explain
from epload.transfer.sinks import Sink

MOST_GROUPS = 12
"""Communicators of a rank. Each takes memory of the device, with HCCL 400 MB by default."""


class Hop(NamedTuple):
    """A broadcast."""

    root: int
    ranks: tuple[int, ...]


class DeviceRoute:
    """The route of one epoch, on one rank."""

    def __init__(
        self,
        plan: ExchangePlan,
        members: Members,
        control: Control,
        whole: Collection[tuple[int, ...]],
        device: torch.device,
        backend: str,
    ) -> None:
        """``whole``: the nodes that keep whole versions in host memory, so that one rank for each rail receives."""
        self.backend = backend
        self.device = device
        self.groups = GroupCache({device.type: backend}, control.rank, control, device)
        self._plan = plan
        self.members = members
        self._control = control
        self._whole = whole
        self._keeps_whole = any(control.rank in node for node in whole)
        self.waves = self._make_waves()
        self._turn_of = {rank: i + j for i, node in enumerate(members.sender_nodes) for j, rank in enumerate(node)}
        rails = range(members.rails)
        self._ranks_of = {(nodes, rail): self._spread(nodes, rail) for nodes, rail in product(plan.node_sets, rails)}
        """The ranks of each second hop, by its nodes and the rail of the sender."""
        self._families = self._make_families()

    @property
    def obstacle(self) -> str:
        """Why it cannot be used; equal on all ranks."""
        if (count := len(self._families)) <= MOST_GROUPS:
            return ""
        senders, sets = len(self.members.senders), len(self._plan.node_sets)
        return f"for {senders} senders and {sets} sets of nodes that need the same, a rank would have up to {count} communicators"

    def connect(self) -> None:
        """Makes buffers, groups and their communicators. Collective over the epoch's ranks.

        Raises:
            LoadError: a rank cannot; the same on every rank.
        """
        most = max((len(wave.numbers) for wave in self.waves), default=1)
        nbytes = max((wave.nbytes for wave in self.waves), default=1)
        staging, failure = attempt(lambda: DeviceStaging(self.device, nbytes, per_wave=most))
        if failure is not None:
            failure = LoadError(f"{message_of(failure)}; transport='host' needs less memory of {self.device}")
        self._control.settle("making buffers on devices", failure)
        assert staging is not None
        self.staging = staging
        self.groups.make("connecting devices", *self._families)

    @property
    def footprint(self) -> int:
        """Bytes of its buffers."""
        return self.staging.footprint

    def entered(self) -> AbstractContextManager[object]:
        """Returns a context for moving a version, whose stream orders it after what the caller has queued."""
        return self.staging.entered()

    def engine(self, context: TransferContext, sink: Sink) -> Engine:
        """Returns the engine that moves one version."""
        seconds = message_timeout(context.control, self.waves).total_seconds()
        verifies = not self._keeps_whole
        ring = DeviceRing(
            self.staging, context.flow, context.report, "inter_node", in_order=False, seconds=seconds, verifies=verifies
        )
        mover = Broadcasts(context, ring, self) if self.waves else None
        return Engine(context, self.waves, ring, mover, sink)

    # ---- who sends what to whom ----

    def _spread(self, nodes: Sequence[int], rail: int) -> tuple[int, ...]:
        """Returns the ranks that receive what some nodes need of a rail's senders."""
        chosen = [self.members.nodes[number] for number in nodes]
        return tuple(sorted(rank for node in chosen for rank in ((node[rail],) if node in self._whole else node)))

    def _entry(self, stream: Stream) -> int:
        """Returns the rank that a sender sends to: in another node for the next sender of its node, and for the one of its rail
        in the next node."""
        number = stream.nodes[self._turn_of[stream.owner] % len(stream.nodes)]
        return self.members.nodes[number][self.members.rail_of[stream.owner]]

    def _make_families(self) -> list[tuple[tuple[int, ...], ...]]:
        """Returns the groups of all hops, in families of which no two groups share a rank."""
        groups: list[tuple[int, ...]] = [
            (owner, self._entry(Stream(owner, nodes)))
            for nodes, owner in product(self._plan.node_sets, self.members.senders)
        ]
        groups += [ranks for ranks in self._ranks_of.values() if len(ranks) > 1]
        families: list[tuple[set[int], list[tuple[int, ...]]]] = []
        for group in dict.fromkeys(groups):
            family = next((family for family in families if family[0].isdisjoint(group)), None)
            if family is None:
                families.append(family := (set(), []))
            family[0].update(group)
            family[1].append(group)
        return [tuple(family) for _, family in families]

    def hops(self, number: int) -> list[Hop]:
        """Returns the hops of a bucket that this rank takes part in: from the sender to a rank, and from there to all that need
        the bucket."""
        stream = self._plan.buckets[number].stream
        entry, ranks = self._entry(stream), self._ranks_of[stream.nodes, self.members.rail_of[stream.owner]]
        hops = [Hop(stream.owner, (stream.owner, entry)), Hop(entry, ranks)]
        return [hop for hop in hops if self._control.rank in hop.ranks and len(hop.ranks) > 1]

    def _make_waves(self) -> list[Wave]:
        """All ranks take the buckets of a wave in the same order: each waits for those before only."""
        buckets = self._plan.buckets
        waves: list[Wave] = []
        for wave in self._plan.waves:
            numbers = sorted(filter(self._takes, wave.numbers), key=lambda number: buckets[number].stream)
            if numbers:
                waves.append(Wave.of(len(waves), numbers, [buckets[number].nbytes for number in numbers]))
        return waves

    def _takes(self, number: int) -> bool:
        """Returns True if a bucket passes this rank."""
        rail_of, rank = self.members.rail_of, self._control.rank
        return not self._keeps_whole or rail_of.get(rank) == rail_of[self._plan.buckets[number].stream.owner]


class Broadcasts:
    """See :class:`~epload.transfer.movers.Mover`. What enters from senders has a stream of its own, so that it may come while
    the wave before is passed on."""

    def __init__(self, context: TransferContext, ring: DeviceRing, route: DeviceRoute) -> None:
        self._context = context
        self._ring = ring
        self._route = route

    def move(self, wave: Wave) -> None:
        staging, senders = self._route.staging, self._route.members.senders
        hops = [(hop, i) for i, number in enumerate(wave.numbers) for hop in self._route.hops(number)]
        self._broadcast(wave, [(hop, i) for hop, i in hops if hop.root in senders], staging.entry)
        staging.spread.wait_stream(staging.entry)
        self._broadcast(wave, [(hop, i) for hop, i in hops if hop.root not in senders], staging.spread)
        self._context.report.transport_steps += len(hops)

    def _broadcast(self, wave: Wave, hops: Sequence[tuple[Hop, int]], stream: torch.Stream) -> None:
        context = self._context
        for hop, i in hops:
            number, bucket = wave.numbers[i], self._ring.bucket(wave, i)
            doing = (
                f"broadcasts bucket {number} from rank {hop.root} to {[rank for rank in hop.ranks if rank != hop.root]}"
            )
            route = Route(hop.root, hop.root, "", self._route.groups.name(hop.ranks))
            # On the current stream, as the op would make another one and the current one wait for each other.
            with context.activity.doing(doing), context.report.timed("inter_node", doing) as span, stream:
                try:
                    broadcast(bucket, route, "two_level", stream)
                except RuntimeError as error:
                    raise explain(context, error, number) from error
                span.nbytes = bucket.nbytes
