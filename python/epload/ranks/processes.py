"""The processes of this machine's other ranks: which there are, and which of them have ended, however they ended."""

from __future__ import annotations

import errno
import hashlib
import os
import select
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from epload.core import system_calls
from epload.ranks.membership import namespace
from epload.ranks.messages import read_if_set

_LOOK_SECONDS = 1.0
"""Between two looks at processes of which the system does not tell when they end."""
_Process = tuple[int, int, str]
"""A rank, the id of its process, and the time at which that started, which together with the id is unique in its namespace."""


class Processes:
    """Watches other ranks on this machine, which find one another through a list in the store while they rendezvous."""

    def __init__(self) -> None:
        self.ended: Mapping[int, int] = {}
        """Process id of each rank whose process has ended."""
        self._lock = threading.Lock()
        self._store: Store | None = None
        """Prefixed for the rendezvous; None unless more ranks may register."""
        self._list = self._own_key = ""
        self._seen = 0
        self._unwatched: list[_Process] = []
        self._watched: dict[int, _Process] = {}
        """Processes that are watched, by file descriptor."""
        self._polled: list[_Process] = []
        """Processes that the system does not allow to watch."""
        self._next_look = 0.0

    def register(self, store: Store, rank: int) -> None:
        """Adds this process to the machine's list. ``store``: prefixed for this rendezvous alone."""
        # Processes can watch each other if their machine and namespace of process ids are the same.
        self._list = f"on/{hashlib.blake2b(namespace('pid').encode(), digest_size=8).hexdigest()}"
        self._own_key = f"{self._list}/{store.add(self._list, 1)}"
        store.set(self._own_key, f"{rank} {os.getpid()} {_start_time(os.getpid())}")
        self._store = store

    def close_registry(self) -> list[str]:
        """Finds the last ranks, once all have registered. Returns the keys that this rank has to delete."""
        self._find()
        self._store = None
        return [self._own_key] if self._own_key != f"{self._list}/1" else [self._own_key, self._list]

    def _find(self) -> None:
        """Reads which ranks have registered since the last call."""
        with self._lock:
            if self._store is None:
                return
            for number in range(self._seen + 1, self._store.add(self._list, 0) + 1):
                key = f"{self._list}/{number}"
                if (value := read_if_set(self._store, key)) is None:
                    break
                self._seen = number
                if key != self._own_key:
                    rank, pid, start = value.decode().split()
                    self._unwatched.append((int(rank), int(pid), start))

    def wait(self, others: Mapping[int, int], seconds: float) -> None:
        """Sleeps until a process ends, another file descriptor is ready, or ``seconds`` have passed. For one thread.

        Args:
            others: file descriptors with the events to wait for.

        Raises:
            OSError: this process has too many open files.
        """
        self._find()
        while self._unwatched:
            self._watch(self._unwatched[-1])
            self._unwatched.pop()
        poll = select.poll()
        for fd, events in {**dict.fromkeys(self._watched, select.POLLIN), **others}.items():
            poll.register(fd, events)
        for fd, _ in poll.poll(1e3 * max(seconds, 0.0)):
            if fd in self._watched:
                self._end(self._watched.pop(fd))
                os.close(fd)
        if self._polled and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            for process in [process for process in self._polled if _has_ended(process)]:
                self._polled.remove(process)
                self._end(process)

    def _end(self, process: _Process) -> None:
        self.ended = {**self.ended, process[0]: process[1]}

    def _watch(self, process: _Process) -> None:
        _, pid, start = process
        try:
            fd = system_calls.pidfd_open(pid)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            if error.errno == errno.ESRCH:
                self._end(process)
            else:  # an old kernel, or a container that forbids it
                self._polled.append(process)
            return
        if "?" in (seen := _start_time(pid), start) or seen == start:
            self._watched[fd] = process
        else:  # the process id has been reused
            os.close(fd)
            self._end(process)

    def close(self) -> None:
        """Closes its files, until :meth:`wait` is called again. Not while a thread is in that."""
        while self._watched:
            fd, process = self._watched.popitem()
            os.close(fd)
            self._unwatched.append(process)
        self._unwatched += self._polled
        self._polled = []

    def __del__(self) -> None:
        self.close()


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat behind the name; empty if it cannot be read, as another user's may not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].decode().split()
    except (OSError, IndexError):
        return []


def _start_time(pid: int) -> str:
    return next(iter(_stat(pid)[19:]), "?")


def _has_ended(process: _Process) -> bool:
    _, pid, start = process
    if fields := _stat(pid):
        return fields[0] in "ZX" or ("?" not in (start, _start_time(pid)) and _start_time(pid) != start)
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.ESRCH
    return False
