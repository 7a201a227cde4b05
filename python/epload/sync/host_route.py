"""One version on its way: which rank passes what to which, out of the sender's shards, into a node's memory or a model."""

from __future__ import annotations

from epload.observe.progress import Progress
from epload.planning.streams import ExchangePlan, Members
from epload.ranks.control import Control
from epload.ranks.group_cache import GroupCache
from epload.ranks.topology import Route
from epload.transfer.context import Sink, TransferContext
from epload.transfer.engine import through_memory
from epload.transfer.shared_memory import NodeMemory

_CHUNK_BYTES, _LONE_CHUNK_BYTES = 1 << 20, 16 << 20
"""Bytes of a message: small where nodes pass it on, so that filling a chain of them takes little time; else large, since each
wakes threads at both ends."""


class HostRoute:
    """Moves versions through host memory, over gloo: along a chain of nodes, whose ranks share the memory."""

    backend = "host"
    device = None
    footprint = 0
    """Bytes of buffers other than the node's memory."""

    def __init__(self, members: Members, control: Control) -> None:
        """Collective over the generation's ranks."""
        self._members = members
        self._control = control
        self.groups = GroupCache({"cpu": "gloo"}, control)
        self.groups.make("exchange", tuple(map(members.rail, range(members.rails))))

    def run(self, context: TransferContext, memory: NodeMemory | None, sink: Sink, show_progress: bool = False) -> None:
        """Moves the buckets of one plan. ``memory``: of the node, in which no other plan's buckets are moving."""
        assert memory is not None
        assert isinstance(context.plan, ExchangePlan)
        rank, members, routes = self._control.rank, self._members, {}
        if rank in context.flow.relays:
            routes[rank] = Route(rank, rank, self.groups.name(members.rail(members.rail_of[rank])), "")
        chunk_bytes = _CHUNK_BYTES if len(members.nodes) > 1 else _LONE_CHUNK_BYTES
        waves = context.plan.waves
        engine = through_memory(context, memory, waves, sink, routes, chunk_bytes)
        memory.waves_before += len(waves)
        with Progress(context.plan.nbytes, show_progress) as bar, self._control.stopping(engine.fail, self.groups.fail):
            engine.run(bar)
