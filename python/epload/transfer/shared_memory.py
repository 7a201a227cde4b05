"""Staging buffers that the ranks of one node share, with counters by which they, and their threads, know how far the others are.

The memory is a memfd: it has no name in any file system, so that nothing is left behind however its processes end. The leader
makes it, the others open it through ``/proc``. Where that is not possible (processes in different containers) every rank has
buffers of its own, and the node's step goes over the network.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from epload.core import system_calls
from epload.errors import RemoteFailure, WaitTimeout
from epload.native import ops
from epload.ranks.control import Control

BUFFERS = 2
"""Waves under way at most, unless the memory is to hold all of them."""
STEPS = {"read": "read", "move": "relayed", "check": "checked", "verify": "verified", "unpack": "unpacked"}
"""Steps that each rank takes with a wave, each with its participle for messages."""
_SLICE = 1.0
"""Seconds after which a wait returns to the interpreter, so that an interrupt is handled."""
_PAGE = 4096
_TOKEN_BYTES = 16


class NodeMemory:
    """Staging buffers, of one rank alone or of all ranks of a node, and counters of the waves that each rank has finished in each
    step. Threads and processes can share it."""

    def __init__(self, memory: Tensor, nbytes: int, ranks: Sequence[int], rank: int, shared: bool, count: int = BUFFERS) -> None:
        """
        Args:
            memory: uint8; the counters in it are zeros at first.
            nbytes: of one buffer.
            shared: whether every node shares its own.
            count: of buffers.
        """
        self.shared = shared
        self.nbytes = nbytes
        self.ranks = tuple(ranks)
        self.waves_before = 0
        """Number of waves of a sync that went through the buffers before, in which no rank has a part any more."""
        self.buffers = [memory[i * _rounded(nbytes) :][:nbytes] for i in range(count)]
        self.token = bytes(memory[-_TOKEN_BYTES:].tolist()).hex()
        """Equal on ranks with the same memory only."""
        self.counters = memory[count * _rounded(nbytes) : -_TOKEN_BYTES].view(torch.int32)
        """See ``ops.board_post``."""
        self._rank = rank

    @property
    def footprint(self) -> int:
        """Bytes of all buffers."""
        return len(self.buffers) * self.nbytes

    # ---- progress ----

    def restart(self) -> None:
        """Sets this rank back to the start of a load; all do it before any of them goes on."""
        for step in STEPS:
            self.post(step, 0)

    def post(self, step: str, waves: int) -> None:
        """Says that this rank has finished ``step`` of so many waves."""
        ops.board_post(self.counters, self._slot(step, self._rank), waves)

    def fail(self) -> None:
        """Wakes all that wait, now and later: this rank cannot go on."""
        ops.board_post(self.counters, -1, 1)

    def wait(self, step: str, waves: int, ranks: Sequence[int], limit: timedelta) -> None:
        """Returns when each of ``ranks`` has finished ``step`` of so many waves.

        Raises:
            WaitTimeout: it took longer than ``limit``.
            RemoteFailure: a rank of the node has failed.
        """
        slots = [self._slot(step, rank) for rank in ranks]
        until = monotonic() + limit.total_seconds()
        while True:
            seconds = until - monotonic()
            slot = ops.board_wait(self.counters, slots, waves, max(0.0, min(_SLICE, seconds)))
            if slot == ops.BOARD_REACHED:
                return
            if slot == ops.BOARD_FAILED:
                raise RemoteFailure("another rank failed")
            if seconds <= 0:
                raise WaitTimeout(
                    f"rank {self._rank} waited {limit.total_seconds():.0f} s for rank {self.ranks[slot // len(STEPS)]} of its "
                    f"node, which has not {STEPS[step]} wave {waves - 1}"
                )

    def _slot(self, step: str, rank: int) -> int:
        return self.ranks.index(rank) * len(STEPS) + list(STEPS).index(step)

    # ---- making it ----

    @classmethod
    def private(cls, rank: int, nbytes: int, shared: bool = False, count: int = BUFFERS) -> NodeMemory:
        """Returns memory for one rank alone; ``shared`` if it is all of its node, and the other nodes share theirs."""
        with torch.inference_mode(False):  # threads write to it, which are in no such mode
            memory = torch.empty(_total(1, nbytes, count), dtype=torch.uint8)
            memory[count * _rounded(nbytes) :] = 0
            memory[-_TOKEN_BYTES:] = torch.frombuffer(bytearray(secrets.token_bytes(_TOKEN_BYTES)), dtype=torch.uint8)
            return cls(memory, nbytes, (rank,), rank, shared, count)

    @classmethod
    def for_node(cls, control: Control, nodes: Sequence[Sequence[int]], nbytes: int, count: int = BUFFERS) -> NodeMemory:
        """Returns memory that the node's ranks share, or private memory for every rank of the job if any cannot. Collective."""
        rank, node = control.rank, next(node for node in nodes if control.rank in node)
        if all(len(node) == 1 for node in nodes):
            return cls.private(rank, nbytes, True, count)
        total = _total(len(node), nbytes, count)
        memory, shared = None, False
        try:
            with ExitStack() as until_open:
                announced = None
                if rank == node[0] and len(node) > 1:
                    with suppress(OSError):  # the others receive no announcement
                        fd, memory, token = _make(total)
                        until_open.callback(os.close, fd)
                        announced = [os.getpid(), fd, token]
                leaders: dict[str, Any] = control.agree("sharing memory", None, announced, _announced)
                if memory is None and str(node[0]) in leaders:
                    pid, fd, token = leaders[str(node[0])]
                    memory = _open(pid, fd, token, total)
                usable = len(node) == 1 or memory is not None
                shared = control.agree("sharing memory", None, usable, lambda views: all(views.values()))
        finally:
            if memory is not None and not shared:
                memory.close()
        if not shared or memory is None:
            return cls.private(rank, nbytes, shared, count)
        with torch.inference_mode(False):
            return cls(torch.frombuffer(memory, dtype=torch.uint8), nbytes, node, rank, True, count)


def _announced(views: dict[int, Any]) -> dict[int, Any]:
    return {rank: view for rank, view in views.items() if view}


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _total(ranks: int, nbytes: int, count: int) -> int:
    """Returns the bytes of some buffers, the counters and the token."""
    return count * _rounded(nbytes) + 4 * (ops.BOARD_FIXED_WORDS + ranks * len(STEPS)) + _TOKEN_BYTES


def _make(nbytes: int) -> tuple[int, mmap.mmap, str]:
    """Returns a descriptor, its mapping and the token at its end, by which others know that they have opened the same."""
    fd = system_calls.memfd_create("epload")
    try:
        os.ftruncate(fd, nbytes)
        memory = mmap.mmap(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    token = secrets.token_bytes(_TOKEN_BYTES)
    memory[-_TOKEN_BYTES:] = token
    return fd, memory, token.hex()


def _open(pid: int, fd: int, token: str, nbytes: int) -> mmap.mmap | None:
    """Maps another process's memfd; None if it cannot be reached."""
    try:
        file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(file, nbytes)
        finally:
            os.close(file)
    except (OSError, ValueError):  # ValueError: it is smaller, and so another one
        return None
    return memory if memory[-_TOKEN_BYTES:].hex() == token else None
