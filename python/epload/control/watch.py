"""A rank's watch over a load: posts heartbeats, notices ended processes, and stops what the rank waits for when another fails.

It runs in a thread of its own, so that it works while the rank computes, reads or waits for a message.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from epload.control import heartbeat
from epload.control.failure import Failure, FailureStore
from epload.control.heartbeat import Heartbeats
from epload.control.processes import LocalProcesses, ProcessWatch
from epload.core import threads
from epload.core.log import logger
from epload.errors import LoadError, RankExited, message_of

_ULIMIT_HINT = "raise the limit on open files (ulimit -n)"
_QUIET_HEARTBEATS = 5
"""A rank logs its activity after so many heartbeats without progress, then after twice as many, and so on."""


class Watched(Protocol):
    """What a watch needs to know of its rank; a ``Control`` is one."""

    rank: int
    doing: str
    progress: int
    processes: LocalProcesses
    alarm: threading.Event
    heartbeats: Heartbeats | None
    failures: FailureStore | None

    @property
    def round(self) -> int: ...

    def fail(self, error: BaseException) -> Failure | None: ...


class Stoppable(Protocol):
    """A wait that can be ended by another thread; a ``Board`` is one."""

    def fail(self) -> None: ...


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

    def __enter__(self) -> Watch:
        if self._depth == 0 and self._control.heartbeats is not None:
            self._start()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._thread is not None:
            self._over = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)
            self._thread = None

    def _start(self) -> None:
        """Raises LoadError if the thread cannot run: without it, this rank would not notice that others have failed."""
        self._over = False
        try:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        except OSError as error:
            raise self._error(f"{message_of(error)}; {_ULIMIT_HINT}") from error
        try:
            self._thread = threads.start("epload-watch", self._run)
        except BaseException as error:
            os.close(self._wake)
            if isinstance(error, LoadError):
                raise self._error(str(error)) from error
            raise

    def _error(self, cause: str) -> LoadError:
        return LoadError(f"rank {self._control.rank} cannot watch over the other ranks: {cause}")

    @contextmanager
    def guards(self, waiting: Stoppable) -> Iterator[None]:
        """A context in which ``waiting.fail()`` is called when a rank publishes a hard failure or the store is lost."""
        self._guarded.append(waiting)
        try:
            yield
        finally:
            self._guarded.remove(waiting)

    def _run(self) -> None:
        control = self._control
        watched, count = ProcessWatch(()), 0
        try:
            while not self._over:
                self._beat()
                found = control.processes.find()
                if len(found) > count:
                    watched.close()
                    watched, count = ProcessWatch(found), len(found)
                watched.wait(self._wake, heartbeat.INTERVAL)
                if watched.ended.keys() - control.processes.ended.keys():
                    control.processes.ended = dict(watched.ended)
                    control.alarm.set()
        except OSError as error:
            control.fail(self._error(f"{message_of(error)}; {_ULIMIT_HINT}"))
            self._stop()
            control.alarm.set()
        except Exception as error:  # the store is lost, and with it any news of other ranks
            if not self._over:
                logger.warning("rank %d can no longer watch over the load: %s", control.rank, message_of(error))
                self._stop()
                control.alarm.set()
        finally:
            watched.close()

    def _beat(self) -> None:
        control = self._control
        assert control.heartbeats is not None
        assert control.failures is not None
        control.heartbeats.post(control.round, control.progress, control.doing)
        self._log_activity(control.progress, control.doing)
        if self._guarded:
            for other, pid in sorted(control.processes.ended.items()):
                control.fail(RankExited(other, pid))
            if control.failures.stopped():
                self._stop()

    def _stop(self) -> None:
        for waiting in list(self._guarded):
            waiting.fail()

    def _log_activity(self, progress: int, doing: str) -> None:
        """After 5 s without progress, then after 10 s, 20 s and so on."""
        self._quiet = self._quiet + 1 if (progress, doing) == self._seen else 0
        self._seen = (progress, doing)
        times, rest = divmod(self._quiet, _QUIET_HEARTBEATS)
        if doing and rest == 0 and times > 0 and times & (times - 1) == 0:
            logger.info("rank %d %s, %.0f s", self._control.rank, doing, self._quiet * heartbeat.INTERVAL)
