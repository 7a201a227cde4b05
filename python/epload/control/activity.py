"""What this rank is doing, for the errors of ranks that wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from epload.control.control import Control
from epload.report import TransferReport


class Activity:
    """What each thread of one operation is doing; ``control.doing`` joins it."""

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
