"""Notices at once when another process of this machine ends, however it ends."""

from __future__ import annotations

import errno
import hashlib
import os
import select
import threading
from collections.abc import Iterable
from pathlib import Path

from torch.distributed.distributed_c10d import Store


def machine() -> str:
    """Equal on processes that can watch each other: boot id and namespace of process ids."""
    return f"{_boot_id()} {_namespace()}"


def process() -> str:
    """By which another process on the same :func:`machine` finds this one: process id and start time."""
    return f"{os.getpid()} {_start_time(os.getpid())}"


class Registry:
    """Where the ranks of one machine find each other's processes while they meet: a list in the store, for each machine one."""

    def __init__(self, store: Store, rank: int) -> None:
        """Enters this process. ``store``: in a place of this meeting's own."""
        self._store = store
        self._list = f"on/{hashlib.blake2b(machine().encode(), digest_size=8).hexdigest()}"
        self._found: list[tuple[int, str]] = []
        number = store.add(self._list, 1)
        self._me = f"{self._list}/{number}"
        store.set(self._me, f"{rank} {process()}")
        self.keys = [self._me] if number > 1 else [self._me, self._list]
        """That this rank deletes."""
        self._seen = 0
        self._lock = threading.Lock()

    def look(self) -> list[tuple[int, str]]:
        """The other ranks that have entered so far. One call to the store, and two for each that is new. Thread-safe."""
        with self._lock:
            return self._look()

    def _look(self) -> list[tuple[int, str]]:
        count = self._store.add(self._list, 0)
        while self._seen < count:
            key = f"{self._list}/{self._seen + 1}"
            if not self._store.check([key]):
                break
            if key != self._me:
                rank, identity = self._store.get(key).decode().split(" ", 1)
                self._found.append((int(rank), identity))
            self._seen += 1
        return list(self._found)


class ProcessWatch:
    """Processes of this machine that are watched. One that the system does not let be watched is left out. For one thread at a
    time."""

    def __init__(self, identities: Iterable[tuple[int, str]]) -> None:
        """``identities``: ranks, each with its :func:`process`. Raises OSError if this process has too many open files."""
        self._rank_of: dict[int, int] = {}
        """Rank of each process, by file descriptor."""
        self._pids: dict[int, int] = {}
        self._poll = select.poll()
        self.gone: dict[int, int] = {}
        """Process id of each rank whose process has ended."""
        for rank, identity in identities:
            pid, start = identity.split()
            if not hasattr(os, "pidfd_open"):
                continue
            try:
                fd = os.pidfd_open(int(pid))
            except ProcessLookupError:
                self.gone[rank] = int(pid)
                continue
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    self.close()
                    raise
                continue
            if _start_time(int(pid)) != start:  # the number is another process's by now
                os.close(fd)
                self.gone[rank] = int(pid)
                continue
            self._rank_of[fd] = rank
            self._pids[rank] = int(pid)
            self._poll.register(fd, select.POLLIN)

    def wait(self, wake: int, seconds: float) -> None:
        """Sleeps until a process ends, ``wake`` (a file descriptor) can be read, or ``seconds`` have passed."""
        self._poll.register(wake, select.POLLIN)
        self._note(self._poll.poll(seconds * 1e3))
        self._poll.unregister(wake)

    def _note(self, events: list[tuple[int, int]]) -> None:
        for fd, _ in events:
            rank = self._rank_of.pop(fd, None)
            if rank is not None:
                self._poll.unregister(fd)
                os.close(fd)
                self.gone[rank] = self._pids[rank]

    def close(self) -> None:
        while self._rank_of:
            os.close(self._rank_of.popitem()[0])
        self._poll = select.poll()

    def __del__(self) -> None:
        self.close()


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "?"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "?"


def _start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return "?"
