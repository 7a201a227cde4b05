"""Making a transfer through a node's memory, and running any transfer so that a failure of another rank ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

from epload.observe.progress import Progress
from epload.planning.waves import Wave
from epload.ranks.control import Control
from epload.ranks.group_cache import GroupCache
from epload.transfer.context import TransferContext
from epload.transfer.engine import Engine
from epload.transfer.host_ring import HostRing
from epload.transfer.movers import SLOWEST, Mover
from epload.transfer.shared_memory import NodeMemory
from epload.transfer.sinks import Sink

Connect = Callable[[HostRing, float], Mover]
"""Makes the mover of a rank that passes buckets on. The number is the seconds that a message may take."""


class Transfer(Protocol):
    """An :class:`Engine`, or a direct read."""

    def run(self, bar: Progress) -> None: ...
    def fail(self) -> None:
        """Wakes all waits: another rank cannot go on. Thread-safe."""
        ...


def through_memory(
    context: TransferContext,
    memory: NodeMemory,
    waves: Sequence[Wave],
    sink: Sink,
    connect: Connect,
    waves_before: int = 0,
) -> Engine:
    """An engine whose buckets are staged in host memory.

    Args:
        memory: of the node, with buffers for the largest wave.
        waves_before: number of waves of this operation that went through the memory before.
    """
    timeout = message_timeout(context.control, waves)
    # The network's limit is over first, and its error says more.
    wait_timeout = 1.25 * timeout + timedelta(seconds=2)
    ring = HostRing(memory, context.flow, wait_timeout, context.activity, waves_before)
    relays = context.flow.rank in context.flow.relays
    return Engine(context, waves, ring, connect(ring, timeout.total_seconds()) if relays else None, sink)


def message_timeout(control: Control, waves: Sequence[Wave]) -> timedelta:
    """Returns the time that a message may take, in a transfer of these waves."""
    largest = max((wave.nbytes for wave in waves), default=0)
    return control.timeout + timedelta(seconds=largest / SLOWEST)


def run_transfer(transfer: Transfer, control: Control, groups: GroupCache, bar: Progress) -> None:
    """Runs it, until it is done or a rank fails. ``groups``: those that it uses.

    Raises:
        LoadError: as the transfer's own ``run``.
    """
    with control.stopping(transfer, groups):
        transfer.run(bar)
