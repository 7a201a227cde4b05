"""One load or broadcast at a time in a process. A second one, from another thread, is refused on every rank.

Ranks that enter two loads in different orders would each wait for the other, or exchange the bytes of two checkpoints. So a
thread that finds another in a load refuses its own, and tells the ranks that are, or will be, in the same load. Loads are told
apart by their number on their topology's control, which every rank takes in the order in which its threads enter, and by the
number of their loader, which ranks compare in the first round. Neither tells two loads apart whose loaders, or topologies, were
made in two threads, nor two loads of one loader: there the ranks may have paired the wrong loads already, so that the one that is
under way fails too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from epload.cluster.topology import Topology
from epload.control.failure import Failure
from epload.core.log import logger
from epload.errors import CallOrderError

_lock = threading.Lock()
_current: Call | None = None


@dataclass(frozen=True)
class Call:
    """Of a load or a broadcast, by the thread that makes this."""

    what: str
    """As users know it."""
    topology: Topology
    loader: object = None
    """None for a broadcast."""
    loader_made_by: threading.Thread | None = None
    """The thread in whose order the loader was made among those of its topology."""
    thread: threading.Thread = field(default_factory=threading.current_thread)

    def surely_paired(self, other: Call) -> bool:
        """Whether all ranks know this call from another, whatever the order in which they enter them."""
        if self.topology is not other.topology:
            ours, theirs = self.topology, other.topology
            return ours.ranks != theirs.ranks or ours.made_by is theirs.made_by
        if self.loader is None or other.loader is None:  # steps of a load and of a broadcast have different names
            return self.loader is not other.loader
        return self.loader is not other.loader and self.loader_made_by is other.loader_made_by


class Refused(Exception):
    """This rank takes no part in a load. Never seen by users: they get the failure's error."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


@contextmanager
def alone(call: Call, timeout: timedelta | None = None) -> Iterator[None]:
    """The context of a call, in which its control has begun a load.

    Raises:
        Refused: another thread is in such a context, or this one is. All ranks that enter this load raise the same.
    """
    global _current
    control = call.topology.control
    with _lock:
        number = control.take()
        other = _current
        if other is None:
            _current = call
        else:
            refused = _refuse(call, number, other)
    if other is not None:
        raise refused
    try:
        call.topology.freshen()
        control.begin(timeout, number)
        yield
    finally:
        control.end()
        with _lock:
            _current = None


def _refuse(call: Call, number: int, other: Call) -> Refused:
    control = call.topology.control
    by = "the same thread" if other.thread is call.thread else f"thread {other.thread.name}"
    logger.info("rank %d refuses %s, as %s is in %s", control.rank, call.what, by, other.what)
    if not call.surely_paired(other):
        other.topology.control.break_off(CallOrderError())
    failure = control.refuse(number, CallOrderError())
    if not failure.clean:
        call.topology.stale = True
    return Refused(failure)


def inside(topology: Topology) -> bool:
    """Whether the calling thread is in a load of this topology already, of which what it does now is a part."""
    call = _current
    return call is not None and call.topology is topology and call.thread is threading.current_thread()
