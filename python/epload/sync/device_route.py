"""Moves a version from device to device: a bucket goes from its sender to one rank of a node, and from there to all that need it,
over the broadcasts of the devices' own backend, such as NCCL or HCCL."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product

import torch

from epload.core.attempt import Attempt
from epload.errors import LoadError, message_of
from epload.observe.progress import Progress
from epload.planning.streams import ExchangePlan, Members, Stream
from epload.planning.waves import Wave
from epload.ranks.control import Control
from epload.ranks.group_cache import GroupCache
from epload.ranks.topology import Route
from epload.transfer.context import TransferContext
from epload.transfer.device import DeviceStaging
from epload.transfer.device_ring import DeviceRing
from epload.transfer.engine import Engine, message_timeout, run_transfer
from epload.transfer.movers import broadcast
from epload.transfer.sinks import Sink

MAX_GROUPS = 12
"""Communicators of a rank. Each takes memory of the device, with HCCL 400 MB by default."""


Hop = tuple[int, tuple[int, ...]]
"""A broadcast: its root and its ranks."""


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
        self.groups = GroupCache({device.type: backend}, control, device)
        self._plan = plan
        self._members = members
        self._control = control
        self._whole = whole
        self._keeps_whole = any(control.rank in node for node in whole)
        self._waves = self._make_waves()
        self._turn_of = {rank: i + j for i, node in enumerate(members.sender_nodes) for j, rank in enumerate(node)}
        rails = range(members.rails)
        self._ranks_of = {(nodes, rail): self._spread(nodes, rail) for nodes, rail in product(plan.node_sets, rails)}
        """The ranks of each second hop, by its nodes and the rail of the sender."""
        self._disjoint_groups = self._make_disjoint_groups()

    @property
    def obstacle(self) -> str:
        """Why it cannot be used; equal on all ranks."""
        if (count := len(self._disjoint_groups)) <= MAX_GROUPS:
            return ""
        senders, sets = len(self._members.senders), len(self._plan.node_sets)
        return f"for {senders} senders and {sets} sets of nodes that need the same, a rank would have up to {count} communicators"

    def connect(self) -> None:
        """Makes buffers, groups and their communicators. Collective over the epoch's ranks.

        Raises:
            LoadError: a rank cannot; the same on every rank.
        """
        most = max((len(wave.numbers) for wave in self._waves), default=1)
        nbytes = max((wave.nbytes for wave in self._waves), default=1)
        staging, failure = Attempt(lambda: DeviceStaging(self.device, nbytes, per_wave=most)), None
        if staging.failure is not None:
            failure = LoadError(f"{message_of(staging.failure)}; transport='host' needs less memory of {self.device}")
        self._control.settle("making buffers on devices", failure)
        self._staging = staging.value
        try:
            self.groups.make("connecting devices", *self._disjoint_groups)
        except BaseException:
            self.groups.clear()
            raise

    @property
    def footprint(self) -> int:
        """Bytes of its buffers."""
        return self._staging.footprint

    def run(self, context: TransferContext, sink: Sink, bar: Progress) -> None:
        """Moves one version, after what the caller has queued."""
        seconds = message_timeout(self._control, self._waves).total_seconds()
        verifies = not self._keeps_whole
        self._ring = DeviceRing(
            self._staging,
            context,
            "inter_node",
            in_order=False,
            seconds=seconds,
            verifies=verifies,
        )
        self._context = context
        engine = Engine(context, self._waves, self._ring, self if self._waves else None, sink)
        with self._staging.entered():
            run_transfer(engine, self._control, self.groups, bar)

    def move(self, wave: Wave) -> None:
        """See :class:`~epload.transfer.movers.Mover`. What enters from senders has a stream of its own, so that it may come while
        the wave before is passed on."""
        staging, senders = self._staging, self._members.senders
        hops = [(hop, i) for i, number in enumerate(wave.numbers) for hop in self._hops(number)]
        for hop, i in hops:
            if hop[0] in senders:
                self._broadcast(wave, hop, i, staging.entry)
        staging.forwarding.wait_stream(staging.entry)
        for hop, i in hops:
            if hop[0] not in senders:
                self._broadcast(wave, hop, i, staging.forwarding)
        self._context.report.transport_steps += len(hops)

    def _broadcast(self, wave: Wave, hop: Hop, i: int, stream: torch.Stream) -> None:
        context, (root, ranks) = self._context, hop
        number, bucket = wave.numbers[i], self._ring.bucket(wave, i)
        doing = f"broadcasts bucket {number} from rank {root} to {[rank for rank in ranks if rank != root]}"
        # On the current stream, as the op would make another one and the current one wait for each other.
        with context.moving("inter_node", doing, number) as span, stream:
            broadcast(bucket, Route(root, root, "", self.groups.name(ranks)), "two_level", stream)
            span.nbytes = bucket.nbytes

    # ---- who sends what to whom ----

    def _spread(self, nodes: Sequence[int], rail: int) -> tuple[int, ...]:
        """Returns the ranks that receive what some nodes need of a rail's senders."""
        chosen = [self._members.nodes[number] for number in nodes]
        return tuple(sorted(rank for node in chosen for rank in ((node[rail],) if node in self._whole else node)))

    def _entry(self, stream: Stream) -> int:
        """Returns the rank that a sender sends to: in another node for the next sender of its node, and for the one of its rail
        in the next node."""
        number = stream.nodes[self._turn_of[stream.owner] % len(stream.nodes)]
        return self._members.nodes[number][self._members.rail_of[stream.owner]]

    def _make_disjoint_groups(self) -> list[tuple[tuple[int, ...], ...]]:
        """Returns the groups of all hops, in sets of which no two groups share a rank."""
        groups: list[tuple[int, ...]] = [
            (owner, self._entry(Stream(owner, nodes)))
            for nodes, owner in product(self._plan.node_sets, self._members.senders)
        ]
        groups += [ranks for ranks in self._ranks_of.values() if len(ranks) > 1]
        sets: list[list[tuple[int, ...]]] = []
        for group in dict.fromkeys(groups):
            chosen = next((some for some in sets if all(map(set(group).isdisjoint, some))), None)
            if chosen is None:
                sets.append(chosen := [])
            chosen.append(group)
        return list(map(tuple, sets))

    def _hops(self, number: int) -> list[Hop]:
        """Returns the hops of a bucket that this rank takes part in: from the sender to a rank, and from there to all that need
        the bucket."""
        stream = self._plan.buckets[number].stream
        entry, ranks = self._entry(stream), self._ranks_of[stream.nodes, self._members.rail_of[stream.owner]]
        hops = [(stream.owner, (stream.owner, entry)), (entry, ranks)]
        return [hop for hop in hops if self._control.rank in hop[1] and len(hop[1]) > 1]

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
        rail_of, rank = self._members.rail_of, self._control.rank
        return not self._keeps_whole or rail_of.get(rank) == rail_of[self._plan.buckets[number].stream.owner]
