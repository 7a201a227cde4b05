"""Moves a version through host memory, over gloo: along a chain of nodes, whose ranks share the memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from epload.planning.streams import ExchangePlan, Members
from epload.ranks.control import Control
from epload.ranks.group_cache import GroupCache
from epload.ranks.topology import Route
from epload.transfer.context import TransferContext
from epload.transfer.engine import Engine, through_memory
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
    """Bytes of buffers besides the node's memory."""

    def __init__(self, plan: ExchangePlan, members: Members, control: Control, memory: NodeMemory) -> None:
        """Collective over the epoch's ranks. ``memory``: of the node."""
        self._plan = plan
        self._members = members
        self._rank = control.rank
        self._memory = memory
        self._waves_before = 0
        self.groups = GroupCache({"cpu": "gloo"}, control.rank, control)
        self.groups.make("exchange", tuple(members.rail(rail) for rail in range(members.rails)))

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def engine(self, context: TransferContext, sink: Sink) -> Engine:
        """Returns the engine that moves one version."""
        chunk_bytes = _CHUNK_BYTES if len(self._members.nodes) > 1 else _LONE_CHUNK_BYTES
        routes = {}
        if self._rank in context.flow.relays:
            group = self.groups.name(self._members.rail(self._members.rail_of[self._rank]))
            routes[self._rank] = Route(self._rank, self._rank, group, "")
        engine = through_memory(context, self._memory, self._plan.waves, sink, routes, chunk_bytes, self._waves_before)
        self._waves_before += len(self._plan.waves)
        return engine
