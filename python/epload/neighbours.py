"""Notices at once when another process of this machine ends, however it ends."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from pathlib import Path


def machine_and_process() -> str:
    """By which another process on the same machine finds this one: boot id, namespace of process ids, id and start time."""
    return f"{_boot_id()} {_namespace()} {os.getpid()} {_start_time(os.getpid())}"


class Neighbours:
    """Processes of this machine that are watched. One that cannot be watched is left out. For one thread at a time."""

    def __init__(self, identities: Iterable[tuple[int, str]]) -> None:
        """``identities``: ranks, each with its :func:`machine_and_process`."""
        self._rank_of: dict[int, int] = {}
        """Rank of each process, by file descriptor."""
        self._pids: dict[int, int] = {}
        self._poll = select.poll()
        self.gone: dict[int, int] = {}
        """Process id of each rank whose process has ended."""
        here = [_boot_id(), _namespace()]
        for rank, identity in identities:
            boot_id, namespace, pid, start = identity.rsplit(" ", 3)
            if [boot_id, namespace] != here or not hasattr(os, "pidfd_open"):
                continue
            try:
                fd = os.pidfd_open(int(pid))
            except ProcessLookupError:
                self.gone[rank] = int(pid)
                continue
            except OSError:
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
