"""Tracks this rank's activity, for the errors of ranks that wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from epload.ranks.control import Control
from epload.ranks.place import Stop
from epload.report import TransferReport


@contextmanager
def working(control: Control, what: str) -> Iterator[Callable[[int], None]]:
    """A context for work between two rounds, whose function is called as bytes are done: they count as progress, and it raises
    RemoteFailure if another rank has failed."""
    stop = Stop()
    control.doing = what

    def done(nbytes: int) -> None:
        control.progress += nbytes + 1
        stop.check()

    with control.stopping(stop):
        yield done


class Activity:
    """Tracks the activity of each thread of one operation; ``control.doing`` joins them."""

    def __init__(self, control: Control, report: TransferReport) -> None:
        self._control = control
        self._report = report
        self._by_thread: dict[str, str] = {}

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        thread = threading.current_thread().name
        before = self._by_thread.get(thread)
        self._by_thread[thread] = what
        self._control.doing = ", ".join(list(self._by_thread.values()))
        yield  # an error leaves what the thread was doing in place, for its own text
        if before is None:
            self._by_thread.pop(thread, None)
        else:
            self._by_thread[thread] = before

    @contextmanager
    def waiting(self, what: str, ranks: Sequence[int]) -> Iterator[None]:
        """``what``: what the thread waits for, of these ranks."""
        with self.doing(f"waits until {what}"), self._report.timed("wait", what, ranks):
            yield
