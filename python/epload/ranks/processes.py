"""The processes of this machine's other ranks: which there are, and which of them have ended, however they ended."""

from __future__ import annotations

import errno
import hashlib
import os
import select
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from epload.ranks.messages import read_if_set


class LocalProcesses:
    """Other ranks on this machine, which find one another through a list in the store while they rendezvous. Thread-safe."""

    def __init__(self) -> None:
        self.ended: Mapping[int, int] = {}
        """Process id of each rank whose process has ended; set by the watch."""
        self._found: list[tuple[int, str]] = []
        self._lock = threading.Lock()
        self._store: Store | None = None
        """While more ranks may register."""
        self._list = self._own_key = ""
        self._seen = 0
        self._watch: ProcessWatch | None = None
        self._watched = 0
        """Number of processes that the watch covers."""

    def register(self, store: Store, rank: int) -> None:
        """Adds this process to the machine's list. ``store``: prefixed for this rendezvous alone."""
        self._list = f"on/{hashlib.blake2b(_pid_namespace().encode(), digest_size=8).hexdigest()}"
        self._own_key = f"{self._list}/{store.add(self._list, 1)}"
        store.set(self._own_key, f"{rank} {_process_identity()}")
        self._store = store

    def close_registry(self) -> list[str]:
        """Once all ranks have registered: finds the last ones. Returns the keys that this rank has to delete."""
        self.find()
        self._store = None
        return [self._own_key] if self._own_key != f"{self._list}/1" else [self._own_key, self._list]

    def find(self) -> list[tuple[int, str]]:
        """Looks for ranks that have registered since the last call: one call to the store, and one for each new rank.

        Returns:
            Every rank found so far, with the identity of its process.
        """
        with self._lock:
            if (store := self._store) is not None:
                self._read_new(store)
            return list(self._found)

    def watch(self) -> ProcessWatch:
        """A watch over every rank found so far, which is kept until more are found. For one thread at a time.

        Raises OSError if this process has too many open files.
        """
        found = self.find()
        if self._watch is None or len(found) > self._watched:
            if self._watch is not None:
                self._watch.close()
            self._watch, self._watched = None, len(found)
            self._watch = ProcessWatch(found)
        return self._watch

    def close(self) -> None:
        """Ends the watch over them, until :meth:`watch` is called again. Not while a thread uses it."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _read_new(self, store: Store) -> None:
        count = store.add(self._list, 0)
        while self._seen < count:
            key = f"{self._list}/{self._seen + 1}"
            value = read_if_set(store, key)
            if value is None:
                break
            if key != self._own_key:
                rank, identity = value.decode().split(" ", 1)
                self._found.append((int(rank), identity))
            self._seen += 1


class ProcessWatch:
    """Waits for processes of this machine to end. Leaves out those that the system does not allow to be watched.

    For one thread at a time.
    """

    def __init__(self, identities: Iterable[tuple[int, str]]) -> None:
        """``identities``: as from :meth:`LocalProcesses.find`. Raises OSError if this process has too many open files."""
        self._rank_of: dict[int, int] = {}
        """Rank of each process, by file descriptor."""
        self._pids: dict[int, int] = {}
        self._poll = select.poll()
        self.ended: dict[int, int] = {}
        """Process id of each rank whose process has ended."""
        for rank, identity in identities:
            pid, start = identity.split()
            if not hasattr(os, "pidfd_open"):
                continue
            try:
                fd = os.pidfd_open(int(pid))
            except ProcessLookupError:
                self.ended[rank] = int(pid)
                continue
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    self.close()
                    raise
                continue
            if _start_time(int(pid)) != start:  # the process id has been reused
                os.close(fd)
                self.ended[rank] = int(pid)
                continue
            self._rank_of[fd] = rank
            self._pids[rank] = int(pid)
            self._poll.register(fd, select.POLLIN)

    def wait(self, others: Iterable[int], seconds: float) -> set[int]:
        """Sleeps until a process ends, another file descriptor becomes readable, or ``seconds`` have passed.

        Returns:
            Those of ``others`` that are readable.
        """
        watched = set(others)
        try:
            for fd in watched:
                self._poll.register(fd, select.POLLIN)
            ready = {fd for fd, _ in self._poll.poll(max(seconds, 0.0) * 1e3)}
        finally:
            for fd in watched:
                with suppress(KeyError):
                    self._poll.unregister(fd)
        for fd in ready - watched:
            rank = self._rank_of.pop(fd)
            self._poll.unregister(fd)
            os.close(fd)
            self.ended[rank] = self._pids[rank]
        return ready & watched

    def close(self) -> None:
        while self._rank_of:
            os.close(self._rank_of.popitem()[0])
        self._poll = select.poll()

    def __del__(self) -> None:
        self.close()


def _pid_namespace() -> str:
    """Boot id and namespace of process ids: equal on processes that can watch each other."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = "?"
    try:
        return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{boot_id} ?"


def _process_identity() -> str:
    """Process id and start time of this process, which together are unique in its namespace."""
    return f"{os.getpid()} {_start_time(os.getpid())}"


def _start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return "?"
