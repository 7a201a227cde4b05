"""Moves a version from device to device: a bucket goes from its sender to one rank of a node, and from there to all that need it,
over the broadcasts of the devices' own backend, such as NCCL or HCCL."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import product

import torch
from torch import Tensor

from epload.core.attempt import Attempt
from epload.core.regions import Regions
from epload.errors import LoadError, message_of
from epload.observe.progress import Progress
from epload.planning.streams import ExchangePlan, Members, Stream
from epload.planning.waves import Wave
from epload.ranks.control import Control
from epload.ranks.group_cache import GroupCache
from epload.ranks.topology import Route
from epload.transfer.context import Sink, TransferContext
from epload.transfer.device import DeviceStaging
from epload.transfer.device_ring import DeviceRing
from epload.transfer.engine import Engine, message_timeout
from epload.transfer.movers import broadcast
from epload.transfer.shared_memory import NodeMemory

MAX_GROUPS = 12
"""Communicators of a rank. Each takes memory of the device, with HCCL 400 MB by default."""


Hop = tuple[int, tuple[int, ...]]
"""A broadcast: its root and its ranks."""


class DeviceRoute:
    """The route of one generation, on one rank."""

    def __init__(
        self,
        plan: ExchangePlan,
        members: Members,
        control: Control,
        staging_nodes: Collection[tuple[int, ...]],
        device: torch.device,
        backend: str,
    ) -> None:
        """``staging_nodes``: those that keep whole versions in host memory, so that one rank for each rail receives."""
        self.backend = backend
        self.device = device
        self.groups = GroupCache({device.type: backend}, control, device)
        self._plan = plan
        self._members = members
        self._control = control
        self._staging_nodes = frozenset(staging_nodes)
        self._stages_among = next((len(node) for node in staging_nodes if control.rank in node), 0)
        """Ranks of this node, if it keeps whole versions; else 0."""
        self._waves = self._make_waves()
        self._hops = {
            Stream(owner, nodes, number): self._hops_of(owner, nodes)
            for (number, nodes), owner in product(enumerate(plan.node_sets), members.senders)
        }
        """The hops of each stream's buckets: from the sender to a rank, and from there to all that need them."""
        groups = [ranks for i in (0, 1) for hops in self._hops.values() if len(ranks := hops[i][1]) > 1]
        self._disjoint_groups: list[list[tuple[int, ...]]] = []
        """The groups of all hops, in sets of which no two groups share a rank."""
        for group in dict.fromkeys(groups):
            for disjoint in self._disjoint_groups:
                if all(map(set(group).isdisjoint, disjoint)):
                    disjoint.append(group)
                    break
            else:
                self._disjoint_groups.append([group])

    def _hops_of(self, owner: int, nodes: tuple[int, ...]) -> tuple[Hop, Hop]:
        """A sender sends to another node than the one before it in its node, and to the rank of its rail there."""
        members = self._members
        rail = members.rail_of[owner]
        node_of_sender = next((number, node) for number, node in enumerate(members.sender_nodes) if owner in node)
        offset = node_of_sender[0] + node_of_sender[1].index(owner)
        entry = members.nodes[nodes[offset % len(nodes)]][rail]
        ranks: list[int] = []
        for node in map(members.nodes.__getitem__, nodes):
            ranks += [node[rail]] if node in self._staging_nodes else node
        return (owner, (owner, entry)), (entry, tuple(sorted(ranks)))

    def _make_waves(self) -> list[Wave]:
        """All ranks take the buckets of a wave in the same order: each waits for those before only."""
        buckets, rail_of = self._plan.buckets, self._members.rail_of
        rail = rail_of.get(self._control.rank)
        waves: list[Wave] = []
        for wave in self._plan.waves:
            passing = [n for n in wave.numbers if not self._stages_among or rail_of[buckets[n].stream.owner] == rail]
            numbers = sorted(passing, key=lambda number: buckets[number].stream)
            if numbers:
                waves.append(Wave.of(len(waves), numbers, [buckets[number].nbytes for number in numbers]))
        return waves

    @property
    def obstacle(self) -> str:
        """Why it cannot be used; equal on all ranks."""
        if (count := len(self._disjoint_groups)) <= MAX_GROUPS:
            return ""
        senders, sets = len(self._members.senders), len(self._plan.node_sets)
        return f"for {senders} senders and {sets} sets of nodes that need the same, a rank would have up to {count} communicators"

    def connect(self) -> None:
        """Makes buffers, groups and their communicators. Collective over the generation's ranks.

        Raises:
            LoadError: a rank cannot; the same on every rank.
        """
        per_wave = max((len(wave.numbers) for wave in self._waves), default=1)
        nbytes = max((wave.nbytes for wave in self._waves), default=1)
        ranks, failure = self._stages_among, None
        staging = Attempt(lambda: DeviceStaging(self.device, nbytes, per_wave=per_wave, ranks=ranks))
        if staging.failure is not None:
            failure = LoadError(f"{message_of(staging.failure)}; transport='host' needs less memory of {self.device}")
        self._control.agree("making buffers on devices", failure)
        self._staging = staging.value
        try:
            self.groups.make("connecting devices", *map(tuple, self._disjoint_groups))
        except BaseException:
            self.groups.clear()
            raise

    def staged(self, buckets: Mapping[int, Tensor], verify: Callable[[int, Tensor], None] | None) -> Sink:
        """Returns a sink that copies buckets from the device into the memory that each has in a whole version on the host.

        Args:
            verify: raises LoadError if a bucket in that memory has another checksum than its bytes.
        """
        pipe = self._staging.pipe.native if self._staging.pipe is not None else None

        def take(number: int, bucket: Tensor) -> None:
            Regions.of_bytes(bucket, pipe).pack(buckets[number])
            if verify is not None:  # what stays, and not what was on the device
                verify(number, buckets[number])

        return Sink(take)

    @property
    def footprint(self) -> int:
        """Bytes of its buffers."""
        return self._staging.footprint

    def run(self, context: TransferContext, memory: NodeMemory | None, sink: Sink, show_progress: bool = False) -> None:
        """Moves one version, after what the caller has queued. ``memory``: not used."""
        self._context = context
        self._ring = DeviceRing(
            self._staging, context, "inter_node",
            seconds=message_timeout(self._control, self._waves).total_seconds(), verifies=not self._stages_among,
        )  # fmt: skip
        engine = Engine(context, self._waves, self._ring, self.move if self._waves else None, sink)
        stopping = self._control.stopping(engine.fail, self.groups.fail)
        with self._staging.entered(), Progress(self._plan.nbytes, show_progress) as bar, stopping:
            engine.run(bar)

    def move(self, wave: Wave) -> None:
        """See :data:`~epload.transfer.movers.Mover`. What enters from senders has a stream of its own, so that it may come while
        the wave before is passed on."""
        staging = self._staging
        self._broadcast(wave, 0, staging.entry)
        staging.forwarding.wait_stream(staging.entry)
        self._broadcast(wave, 1, staging.forwarding)

    def _broadcast(self, wave: Wave, which: int, stream: torch.Stream) -> None:
        """Makes the first or the second hop of a wave's buckets, where this rank takes part in it."""
        context = self._context
        for i, number in enumerate(wave.numbers):
            root, ranks = self._hops[self._plan.buckets[number].stream][which]
            if self._control.rank not in ranks or len(ranks) == 1:
                continue
            doing = f"broadcasts bucket {number} from rank {root} to {[rank for rank in ranks if rank != root]}"
            # On the current stream, as the op would make another one and the current one wait for each other.
            with context.moving("inter_node", doing, number) as span, stream:
                bucket = self._ring.bucket(wave, i)
                broadcast(bucket, Route(root, root, "", self.groups.name(ranks)), "two_level", stream)
                span.nbytes = bucket.nbytes
            context.report.transport_steps += 1
