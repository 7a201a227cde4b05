"""The processes of this machine's other ranks: which there are, and which of them have ended, however they ended."""

from __future__ import annotations

import errno
import hashlib
import os
import select
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from epload.ranks.membership import namespace
from epload.ranks.messages import read_if_set


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
        self._unwatched: list[tuple[int, int, str]] = []
        """Rank, process id and start time of each process that is not watched yet."""
        self._watched: dict[int, tuple[int, int, str]] = {}
        """The same by file descriptor, for each process that is watched."""
        self._poll = select.poll()

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
            count = self._store.add(self._list, 0) if self._store is not None else 0
            while self._store is not None and self._seen < count:
                key = f"{self._list}/{self._seen + 1}"
                if (value := read_if_set(self._store, key)) is None:
                    break
                rank, pid, start = value.decode().split()
                if key != self._own_key:
                    self._unwatched.append((int(rank), int(pid), start))
                self._seen += 1

    def wait(self, others: Mapping[int, int], seconds: float) -> set[int]:
        """Sleeps until a process ends, another file descriptor is ready, or ``seconds`` have passed. For one thread.

        Args:
            others: file descriptors with the events to wait for.

        Returns:
            Those of ``others`` that are ready.

        Raises:
            OSError: this process has too many open files.
        """
        self._find()
        while self._unwatched:
            self._watch(self._unwatched[-1])
            self._unwatched.pop()
        for fd, events in others.items():
            self._poll.register(fd, events)
        try:
            ready = {fd for fd, _ in self._poll.poll(1e3 * max(seconds, 0.0))}
        finally:
            for fd in others:
                with suppress(KeyError):
                    self._poll.unregister(fd)
        for fd in ready - others.keys():
            rank, pid, _ = self._watched.pop(fd)
            self._poll.unregister(fd)
            os.close(fd)
            self.ended = {**self.ended, rank: pid}
        return ready & others.keys()

    def _watch(self, process: tuple[int, int, str]) -> None:
        """Watches a process, unless the system does not allow that."""
        rank, pid, start = process
        if not hasattr(os, "pidfd_open"):
            return
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.ended = {**self.ended, rank: pid}
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            return
        if _start_time(pid) != start:  # the process id has been reused
            os.close(fd)
            self.ended = {**self.ended, rank: pid}
            return
        self._watched[fd] = process
        self._poll.register(fd, select.POLLIN)

    def close(self) -> None:
        """Closes its files, until :meth:`wait` is called again. Not while a thread is in that."""
        while self._watched:
            fd, process = self._watched.popitem()
            os.close(fd)
            self._unwatched.append(process)
        self._poll = select.poll()

    def __del__(self) -> None:
        self.close()


def _start_time(pid: int) -> str:
    """Start time of a process, which together with its id is unique in its namespace."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return "?"
