"""Staging buffers that the ranks of one node share, with the node's board.

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
from typing import Any

import torch
from torch import Tensor

from epload.ranks.control import Control
from epload.transfer.board import Board

BUFFERS = 2
"""Waves under way at most, unless the memory is to hold all of them."""
_PAGE = 4096
_TOKEN_BYTES = 16


class NodeMemory:
    """Staging buffers and a board, of one rank alone or of all ranks of a node."""

    def __init__(
        self, memory: Tensor, nbytes: int, ranks: Sequence[int], rank: int, shared: bool, count: int = BUFFERS
    ) -> None:
        """
        Args:
            memory: uint8, zeros at first.
            nbytes: of one buffer.
            shared: whether every node shares its own.
            count: of buffers.
        """
        self.shared = shared
        head = _head_bytes(len(ranks))
        self.nbytes = nbytes
        self.ranks = tuple(ranks)
        self.buffers = [memory[head + i * _rounded(nbytes) :][:nbytes] for i in range(count)]
        words = memory[_TOKEN_BYTES:head].view(torch.int32)[: Board.size(len(ranks))]
        self.board = Board(words, ranks, rank)

    @classmethod
    def private(cls, rank: int, nbytes: int, shared: bool = False, count: int = BUFFERS) -> NodeMemory:
        """Returns memory for one rank alone; ``shared`` if it is all of its node, and the other nodes share theirs."""
        memory = torch.empty(_total(1, nbytes, count), dtype=torch.uint8)
        memory[: _head_bytes(1)] = 0
        return cls(memory, nbytes, (rank,), rank, shared, count)

    @classmethod
    def for_node(
        cls, control: Control, nodes: Sequence[Sequence[int]], nbytes: int, count: int = BUFFERS
    ) -> NodeMemory:
        """Returns memory that the node's ranks share, or private memory for every rank of the job if any cannot. Collective."""
        rank, node = control.rank, next(node for node in nodes if control.rank in node)
        if all(len(node) == 1 for node in nodes):
            return cls.private(rank, nbytes, True, count)
        total = _total(len(node), nbytes, count)
        mapped: mmap.mmap | None = None
        with ExitStack() as unless_shared, ExitStack() as until_open:
            unless_shared.callback(lambda: mapped.close() if mapped is not None else None)
            announced: list[Any] | None = None
            if rank == node[0] and len(node) > 1:
                with suppress(OSError):  # the others hear of none
                    fd, mapped, token = _make(total)
                    until_open.callback(os.close, fd)
                    announced = [os.getpid(), fd, token.hex()]
            made = control.settle(
                "sharing memory", None, announced, lambda views: {str(r): m for r, m in views.items() if m}
            )
            if mapped is None and str(node[0]) in made:
                pid, fd, token_text = made[str(node[0])]
                mapped = _open(pid, fd, token_text, total)
            usable = len(node) == 1 or mapped is not None
            shared = control.settle("sharing memory", None, usable, lambda views: all(views.values()))
            if shared:
                unless_shared.pop_all()
        if not shared or mapped is None:
            return cls.private(rank, nbytes, shared, count)
        return cls(torch.frombuffer(mapped, dtype=torch.uint8), nbytes, node, rank, True, count)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _head_bytes(ranks: int) -> int:
    return _rounded(_TOKEN_BYTES + 4 * Board.size(ranks))


def _total(ranks: int, nbytes: int, count: int) -> int:
    return _head_bytes(ranks) + count * _rounded(nbytes)


def _make(nbytes: int) -> tuple[int, mmap.mmap, bytes]:
    """Returns a descriptor, its mapping and the token at its start, by which others know that they have opened the same."""
    fd = os.memfd_create("epload", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        mapped = mmap.mmap(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    token = secrets.token_bytes(_TOKEN_BYTES)
    mapped[:_TOKEN_BYTES] = token
    return fd, mapped, token


def _open(pid: int, fd: int, token: str, nbytes: int) -> mmap.mmap | None:
    """Maps another process's memfd; None if it cannot be reached."""
    try:
        file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(file).st_size != nbytes:
            return None
        mapped = mmap.mmap(file, nbytes)
    except OSError:
        return None
    finally:
        os.close(file)
    return mapped if mapped[:_TOKEN_BYTES].hex() == token else None
