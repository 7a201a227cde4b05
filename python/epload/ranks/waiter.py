"""Waiting for keys of the store without polling: in a thread, because a wait inside the store cannot be interrupted."""

from __future__ import annotations

import os
import queue
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from epload.core import threads

_SLICE = timedelta(minutes=5)
"""Limit of one wait inside the store, which prints a warning whenever it ends without the keys."""
_MIN_POLL, _MAX_POLL, _POLL_SHARE = 0.0002, 0.25, 1 / 8
"""Seconds between two checks of a store that can only be polled: limits, and the share of the time waited so far."""
_GRACE_SECONDS = 5.0
"""Seconds that a wait that is no longer needed has to end."""


class Alarm:
    """Wakes the thread that runs the rounds, which polls it together with its links. Thread-safe; open while the watch runs."""

    def __init__(self) -> None:
        self._fd = -1
        self._lock = threading.Lock()
        """Held by who sets or closes it: once it is closed, the system may give its number to another file."""

    def open(self) -> None:
        """Raises OSError if the process has too many open files."""
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)


class Wait:
    """One wait for keys. ``done`` is set last."""

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys
        self.values: list[bytes] = []
        self.error: Exception | None = None
        self.done = False
        self.given_up = False

    def result(self) -> list[bytes]:
        """The values. Raises the error of the store if the wait has failed."""
        if self.error is not None:
            raise self.error
        return self.values


class Waiter:
    """Waits for keys on a connection of its own, one wait after another."""

    def __init__(self, store: Store, alarm: Alarm) -> None:
        """``store``: a connection that others use only while no wait is under way, if the store can have several."""
        self.store = store
        self.lock = threading.Lock()
        """Held by others while they use a connection that depends on :attr:`waits`."""
        self.waits = 0
        """Under way, and then the connection is blocked."""
        self._alarm = alarm
        self._waits: queue.SimpleQueue[Wait | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._blocks = _can_block(store)
        if self._blocks:
            store.set_timeout(_SLICE)

    def start(self) -> None:
        """Raises LoadError if there are too many threads."""
        self._thread = threads.start("epload-wait", self._run)

    def stop(self) -> None:
        """Once all waits are over, or will soon be."""
        if self._thread is not None:
            self._waits.put(None)
            self._thread.join(_GRACE_SECONDS)
            self._thread = None

    def wait_for(self, keys: list[str]) -> Wait:
        """Begins to wait until all ``keys`` are set. Then the alarm is set."""
        wait = Wait(keys)
        with self.lock:
            self.waits += 1
        self._waits.put(wait)
        return wait

    def _run(self) -> None:
        while (wait := self._waits.get()) is not None:
            try:
                wait.values = self._block(wait) if self._blocks else self._poll(wait)
            except Exception as error:
                wait.error = error
            with self.lock:
                self.waits -= 1
            wait.done = True
            self._alarm.set()

    def _block(self, wait: Wait) -> list[bytes]:
        while True:
            try:
                return self.store.multi_get(wait.keys)
            except DistStoreError:  # the slice is over
                if wait.given_up:
                    raise

    def _poll(self, wait: Wait) -> list[bytes]:
        began = time.monotonic()
        while not self.store.check(wait.keys):
            if wait.given_up:
                raise DistStoreError("given up")
            time.sleep(min(max(_POLL_SHARE * (time.monotonic() - began), _MIN_POLL), _MAX_POLL))
        return self.store.multi_get(wait.keys)


def _can_block(store: Any) -> bool:
    """Returns True if the store is a connection of its own (torch 2.11 cannot make one), in which a wait blocks nobody else."""
    if not hasattr(store, "clone"):
        return False
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return isinstance(store, TCPStore)
