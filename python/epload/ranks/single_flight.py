"""One load, save, sync or broadcast at a time in a process. A second one, from another thread, is refused on every rank. One that
epload runs in the background is waited for.

Ranks that entered two loads in different orders would wait for one another, or exchange bytes of two checkpoints. So a thread
that finds another in a load refuses its own, and publishes that for the ranks that are, or will be, in the same load.

Two loads are told apart by their numbers on their topology's control, which every rank takes in the order in which its threads
enter them, and by the numbers of their loaders, which ranks compare in the first round. These do not tell apart two loads of one
loader, or two loads whose loaders or topologies were made in different threads: ranks may have paired the wrong loads already, so
that the load under way fails too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from epload.core.log import logger
from epload.errors import LoadError, call_order_error, kind_of, make_error, message_of
from epload.ranks.topology import Topology, as_topology

_lock = threading.RLock()
_current: Call | None = None
_background: dict[Future[Any], tuple[str, object]] = {}
"""Calls that run in threads of their own, with what they are called, and their group, which lives as long."""
_PATIENCE = 10.0
"""Seconds after which a call says for which others it waits."""


def _forget_parents_calls() -> None:
    """Called in a child of a fork, where no thread is in any of them."""
    global _lock, _current
    _lock, _current = threading.RLock(), None
    _background.clear()


os.register_at_fork(after_in_child=_forget_parents_calls)


def add_to_background(call: Future[Any], what: str, topology: Topology) -> None:
    """Has the next calls wait for one that runs in a thread of its own."""
    _background[call] = what, topology.group
    call.add_done_callback(_background.pop)


def wait_for_background() -> None:
    """Waits until all calls in the background have ended, whatever their outcome. Called before a call that takes its number
    itself, so that calls take their numbers in one order on all ranks."""
    if wait(list(_background), _PATIENCE).not_done:
        logger.warning("waits for what runs in the background: %s", ", ".join(what for what, _ in list(_background.values())))
        wait(list(_background))


@dataclass(frozen=True)
class Call:
    """A call of load or broadcast, in the thread that makes this object."""

    what: str
    """The public name of what is called."""
    topology: Topology
    loader: object = None
    """None for a broadcast."""
    loader_made_by: threading.Thread | None = None
    """The thread that made the loader."""
    thread: threading.Thread = field(default_factory=threading.current_thread)

    def distinguishable_from(self, other: Call) -> bool:
        """Returns True if all ranks can tell the two calls apart, in whatever order they enter them."""
        if self.topology is not other.topology:
            same_thread = self.topology.made_by is other.topology.made_by
            return same_thread or self.topology.ranks != other.topology.ranks
        if self.loader is None or other.loader is None:  # rounds of a load and of a broadcast have different names
            return self.loader is not other.loader
        return self.loader is not other.loader and self.loader_made_by is other.loader_made_by


@contextmanager
def exclusive(call: Call, timeout: timedelta | None = None, number: int | None = None) -> Iterator[None]:
    """The context of a call, in which its control has begun a load with ``timeout``, once none is left in the background.

    Args:
        number: the load's, if it was taken before, as for a call in the background, which does not wait for others.

    Raises:
        LoadError: a thread of this process is in such a context already, so that this rank takes no part in the load. All ranks
            that enter it raise the same error.
    """
    global _current
    control = call.topology.control
    if number is None:
        with preparing_call(call.topology):
            wait_for_background()
    with _lock:
        number = control.next_load() if number is None else number
        if _current is not None:
            raise _refuse(call, number, _current)
        _current = call  # also for a call in this thread, by the handler of a signal
        try:
            if call.topology.stale:
                call.topology.stale = False
                call.topology.groups.clear()
                call.topology.watched_groups.clear()
            control.begin(timeout, number)  # before another thread can find this load, and fail it
        except BaseException:
            _current = None
            raise
    try:
        yield
    finally:
        try:
            control.end()
            call.topology.groups.end_load()
        finally:  # an interrupt here must not make the process reject all later calls
            with _lock:
                _current = None


@contextmanager
def preparing_call(topology: Topology | None) -> Iterator[None]:
    """A context for what a rank does before :func:`exclusive`. An error or an interrupt in it ends the call on all: without it,
    the others would wait for this rank, or pair their call with its next one.

    Args:
        topology: the ranks that call; those of the whole job if None.

    Raises:
        ValueError, TypeError: an argument is out of range, or of another type.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        if (shared := _refuse_next(topology, error)) is None:
            raise
        raise shared from error
    except BaseException as error:
        if topology is None and isinstance(error, LoadError):  # of the round that finds the ranks: all of them raise it
            raise
        shared, is_interrupt = None, isinstance(error, KeyboardInterrupt | SystemExit)
        if topology is not None or Topology.is_discovered():  # else the ranks that come later are told by the rendezvous
            text = "interrupted" if is_interrupt else message_of(error)
            shared = _refuse_next(topology, LoadError(f"{text} before the call"))
        if shared is None or not isinstance(error, LoadError):
            raise
        raise shared from error


def _refuse_next(topology: Topology | None, error: Exception) -> Exception | None:
    """Publishes that this rank takes no part in its next load, and why. Returns the error that all ranks raise; None if it is
    alone."""
    if not isinstance(topology, Topology | None):
        return None  # it says of no other ranks
    control = as_topology(topology).control
    if control.store is None:
        return None
    refused = make_error(kind_of(error), f"{error} [rank {control.rank}]")
    return control.refuse(control.next_load(), refused).error()


def _refuse(call: Call, number: int, other: Call) -> Exception:
    """Publishes that this rank takes no part in a load. Returns the error that all ranks raise."""
    control = call.topology.control
    by = "the same thread" if other.thread is call.thread else f"thread {other.thread.name}"
    logger.info("rank %d refuses %s, as %s is in %s", control.rank, call.what, by, other.what)
    if not call.distinguishable_from(other):
        other.topology.control.abort(call_order_error())
    failure = control.refuse(number, call_order_error())
    if not failure.clean:
        call.topology.stale = True
    return failure.error()


def inside_load(topology: Topology) -> bool:
    """Returns True if the calling thread is in a load of this topology, so that its present call is a part of that load."""
    call = _current
    return call is not None and call.topology is topology and call.thread is threading.current_thread()
