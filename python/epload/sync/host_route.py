"""Moves a version through host memory, over gloo: along a chain of nodes, whose ranks share the memory."""

from __future__ import annotations

from epload.observe.progress import Progress
from epload.planning.streams import ExchangePlan, Members
from epload.ranks.control import Control
from epload.ranks.group_cache import GroupCache
from epload.ranks.topology import Route
from epload.transfer.context import TransferContext
from epload.transfer.engine import run_transfer, through_memory
from epload.transfer.shared_memory import NodeMemory
from epload.transfer.sinks import Sink

_CHUNK_BYTES, _LONE_CHUNK_BYTES = 1 << 20, 16 << 20
"""Bytes of a message: small where nodes pass it on, so that filling a chain of them takes little time; else large, since each
wakes threads at both ends."""


class HostRoute:
    """The route of one epoch, on one rank."""

    backend = "host"
    device = None
    footprint = 0
    """Bytes of buffers other than the node's memory."""

    def __init__(self, plan: ExchangePlan, members: Members, control: Control, memory: NodeMemory) -> None:
        """Collective over the epoch's ranks. ``memory``: of the node."""
        self._plan = plan
        self._members = members
        self._control = control
        self._memory = memory
        self._waves_before = 0
        self.groups = GroupCache({"cpu": "gloo"}, control)
        self.groups.make("exchange", tuple(members.rail(rail) for rail in range(members.rails)))

    def run(self, context: TransferContext, sink: Sink, bar: Progress) -> None:
        """Moves one version."""
        rank, members = self._control.rank, self._members
        chunk_bytes = _CHUNK_BYTES if len(members.nodes) > 1 else _LONE_CHUNK_BYTES
        routes = {}
        if rank in context.flow.relays:
            routes[rank] = Route(rank, rank, self.groups.name(members.rail(members.rail_of[rank])), "")
        engine = through_memory(context, self._memory, self._plan.waves, sink, routes, chunk_bytes, self._waves_before)
        self._waves_before += len(self._plan.waves)
        run_transfer(engine, self._control, self.groups, bar)
