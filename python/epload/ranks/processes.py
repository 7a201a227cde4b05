"""The processes of this machine's other ranks: which there are, and which of them have ended, however they ended."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from epload.ranks.membership import namespace
from epload.ranks.messages import read_if_set

_LOOK_SECONDS = 0.5
"""Seconds between two looks at the processes."""
_Process = tuple[int, int, str]
"""A rank, the id of its process, and the time at which that started, which together with the id is unique in its namespace."""


class Processes:
    """Watches other ranks on this machine, which find one another through a list in the store while they rendezvous."""

    def __init__(self) -> None:
        self.ended: Mapping[int, int] = {}
        """Process id of each rank whose process has ended."""
        self._lock, self._looking = threading.Lock(), threading.Lock()
        self._store: Store | None = None
        """Prefixed for the rendezvous; None unless more ranks may register."""
        self._list = self._own_key = ""
        self._seen = 0
        self._running: list[_Process] = []
        self.next_look = 0.0
        """Value of ``time.monotonic()`` before which :meth:`look` does nothing."""

    def register(self, store: Store, rank: int) -> None:
        """Adds this process to the machine's list. ``store``: prefixed for this rendezvous alone."""
        # Processes can watch each other if their machine and namespace of process ids are the same.
        self._list = f"on/{hashlib.blake2b(namespace('pid').encode(), digest_size=8).hexdigest()}"
        self._own_key = f"{self._list}/{store.add(self._list, 1)}"
        store.set(self._own_key, f"{rank} {os.getpid()} {_start_time(_stat(os.getpid()))}")
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
                    self._running.append((int(rank), int(pid), start))

    def look(self, at_once: bool = False) -> None:
        """Looks which processes have ended: twice a second at most, unless ``at_once``. Thread-safe."""
        with self._looking:
            if time.monotonic() < self.next_look and not at_once:
                return
            self.next_look = time.monotonic() + _LOOK_SECONDS
            if not at_once:
                self._find()
            for process in [process for process in self._running if _has_ended(process)]:
                self._running.remove(process)
                self.ended = {**self.ended, process[0]: process[1]}


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat behind the name; empty if it cannot be read, as another user's may not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].decode().split()
    except (OSError, IndexError):
        return []


def _start_time(fields: list[str]) -> str:
    return next(iter(fields[19:]), "?")


def _has_ended(process: _Process) -> bool:
    _, pid, start = process
    if fields := _stat(pid):
        return fields[0] in "ZX" or ("?" not in (start, seen := _start_time(fields)) and seen != start)
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.ESRCH
    return False
