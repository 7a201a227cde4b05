"""A rank's watch over a load: sends heartbeats, notices ended processes, and stops what the rank waits for when another fails.

It runs in a thread of its own, so that it works while the rank computes, reads or waits for a message. The leader of a node looks
for failures in the store every 1 to 1.5 s, unless its round waits for one there anyway, and tells the other ranks of the node.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

from epload.core import threads
from epload.core.log import logger
from epload.errors import LoadError, RankExited, RemoteFailure, message_of
from epload.ranks import heartbeat
from epload.ranks.failure import Alert, Failure
from epload.ranks.heartbeat import Position
from epload.ranks.node_connection import NodeConnection
from epload.ranks.processes import LocalProcesses, ProcessWatch

_ULIMIT_HINT = "raise the limit on open files (ulimit -n)"
_FIRST_BEAT = 0.5
"""Seconds from the begin of a load to a rank's first heartbeat."""
_QUIET_HEARTBEATS = 5
"""A rank logs its activity after so many heartbeats without progress, then after twice as many, and so on."""
BEAT, FAILED = "beat", "failed"
"""Tags of messages between the watches of a node."""


class Watched(Protocol):
    """The interface of a rank to its watch; implemented by ``Control``."""

    rank: int
    doing: str
    progress: int
    timeout: timedelta
    processes: LocalProcesses
    place: NodeConnection | None

    @property
    def position(self) -> Position: ...

    def waits_since(self) -> float: ...

    def fail(self, error: BaseException) -> Failure | None: ...

    def find_failure(self) -> None: ...

    def must_stop(self) -> bool: ...

    def spread(self, alert: Alert, sender: int) -> None: ...


class Concluding(Protocol):
    """The interface of a rank to a guard; implemented by ``Control``."""

    watch: Watch

    def conclude(self, error: BaseException) -> Failure | None: ...


class Stoppable(Protocol):
    """A wait that can be ended by another thread; a ``Board`` is one."""

    def fail(self) -> None: ...


class Stop:
    """Tells whoever polls it that another rank has failed."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def fail(self) -> None:
        self._event.set()

    def requested(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        """Raises RemoteFailure if another rank has failed."""
        if self.requested():
            raise RemoteFailure("another rank failed")


class Watch:
    """A reentrant context manager, in which the watch's thread runs. Each control has one."""

    def __init__(self, control: Watched) -> None:
        self._control = control
        self._guarded: list[Stoppable] = []
        self._wake = -1
        self._quiet, self._seen = 0, (-1, "")
        self._over = False
        self._depth = 0
        self._thread: threading.Thread | None = None
        self._next_beat = self._next_look = 0.0

    def __enter__(self) -> Watch:
        if self._depth == 0 and self._control.place is not None:
            self._start(self._control.place)
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._thread is not None:
            self._over = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            self._thread = None
            self._close()

    def _start(self, place: NodeConnection) -> None:
        """Raises LoadError if a thread cannot run: without it, this rank would not notice that others have failed."""
        self._over = False
        try:
            place.alarm.open()
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            if place.waiter is not None:
                place.waiter.start()
            self._thread = threads.start("epload-watch", lambda: self._run(place))
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                raise self._error(f"{message_of(error)}; {_ULIMIT_HINT}") from error
            if isinstance(error, LoadError):
                raise self._error(str(error)) from error
            raise

    def _close(self) -> None:
        assert self._control.place is not None
        if self._control.place.waiter is not None:
            self._control.place.waiter.stop()
        self._control.place.alarm.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _error(self, cause: str) -> LoadError:
        return LoadError(f"rank {self._control.rank} cannot watch over the other ranks: {cause}")

    @contextmanager
    def guards(self, *waiting: Stoppable) -> Iterator[None]:
        """A context in which ``fail()`` of each is called when a rank publishes a hard failure or the store is lost."""
        self._guarded += waiting
        try:
            if self._control.must_stop():  # since before this
                self.stop()
            yield
        finally:
            for each in waiting:
                self._guarded.remove(each)

    def stop(self) -> None:
        """Ends what waits in :meth:`guards`."""
        for waiting in list(self._guarded):
            waiting.fail()

    def _run(self, place: NodeConnection) -> None:
        control = self._control
        # Ranks that come together hear of one another in the first round: most loads are over before this says anything.
        self._next_beat = time.monotonic() + min(_FIRST_BEAT, control.timeout.total_seconds() / 4)
        self._next_look = time.monotonic() + place.heartbeats.look_interval
        try:
            while not self._over:
                if time.monotonic() >= self._next_beat:
                    self._next_beat = time.monotonic() + heartbeat.INTERVAL
                    self._beat(place)
                if time.monotonic() >= self._next_look:
                    self._next_look = time.monotonic() + place.heartbeats.look_interval
                    if place.tree.leads:
                        control.find_failure()
                watched = control.processes.watch()
                if watched.ended.keys() - control.processes.ended.keys():
                    control.processes.ended = dict(watched.ended)
                    place.alarm.set()
                    self._report_ended()
                self._listen(watched, place)
        except OSError as error:
            control.fail(self._error(f"{message_of(error)}; {_ULIMIT_HINT}"))
            self.stop()
            place.alarm.set()
        except Exception as error:  # the store is lost, and with it any news of other ranks
            if not self._over:
                logger.warning("rank %d can no longer watch over the load: %s", control.rank, message_of(error))
                self.stop()
                place.alarm.set()

    def _listen(self, watched: ProcessWatch, place: NodeConnection) -> None:
        """Waits until the next heartbeat, or until a process ends; takes in what the node's other ranks say meanwhile."""
        links = {link.fileno(): (rank, link) for rank, link in place.links.watch.items() if not link.closed}
        until = min(self._next_beat, self._next_look)
        for fd in watched.wait([self._wake, *links], until - time.monotonic()) - {self._wake}:
            rank, link = links[fd]
            for tag, data in link.receive():
                if tag == BEAT:
                    place.heartbeats.hear(rank, data)
                elif tag == FAILED:
                    self._control.spread(Alert.decode(data), rank)

    def _beat(self, place: NodeConnection) -> None:
        control = self._control
        position = control.position
        sent = place.heartbeats.beat(position, control.progress, control.doing)
        for link in place.links.watch.values():
            if not link.closed and not link.is_half_full():  # a rank that is minutes late must still hear of a failure
                link.notify(BEAT, sent)
        self._log_activity(control.progress, control.doing)
        if place.tree.leads:
            since = control.waits_since()
            waits = since > 0 and time.monotonic() - since >= heartbeat.INTERVAL
            if place.heartbeats.due(position if waits else None):
                place.heartbeats.post(position)
        self._report_ended()

    def _report_ended(self) -> None:
        if self._guarded:
            for other, pid in sorted(self._control.processes.ended.items()):
                self._control.fail(RankExited(other, pid))

    def _log_activity(self, progress: int, doing: str) -> None:
        """After 5 s without progress, then after 10 s, 20 s and so on."""
        self._quiet = self._quiet + 1 if (progress, doing) == self._seen else 0
        self._seen = (progress, doing)
        times, rest = divmod(self._quiet, _QUIET_HEARTBEATS)
        if doing and rest == 0 and times > 0 and times & (times - 1) == 0:
            logger.info("rank %d %s, %.0f s", self._control.rank, doing, self._quiet * heartbeat.INTERVAL)


class Guard:
    """A context in which the watch runs, and out of which every rank raises the same error."""

    def __init__(self, control: Concluding) -> None:
        self._control = control
        self.failure: Failure | None = None
        """The failure of the operation on all ranks; None if it has not failed, or has succeeded on the others."""

    def __enter__(self) -> Guard:
        try:
            self._control.watch.__enter__()
        except BaseException as error:  # the other ranks wait for this one
            self._raise(error)
            raise
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self._raise(error)
        finally:
            self._control.watch.__exit__()

    def _raise(self, error: BaseException) -> None:
        """Publishes the error, and raises what the other ranks raise if that is another one."""
        self.failure = self._control.conclude(error)
        # None: the load has succeeded on all ranks, and this one was interrupted while it returned.
        if self.failure is None or not isinstance(error, Exception):
            return
        shared = self.failure.error()
        if (type(shared), str(shared)) != (type(error), str(error)):
            raise shared from error
