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

import torch
from torch import Tensor

from epload.control.control import Control
from epload.staging.board import Board

BUFFERS = 2
"""Waves under way at most."""
_PAGE = 4096
_TOKEN_BYTES = 16
_ABANDONED: list[NodeMemory] = []


class NodeMemory:
    """Two buffers and a board, of one rank alone or of all ranks of a node."""

    def __init__(self, memory: Tensor, nbytes: int, ranks: Sequence[int], rank: int, shared: bool) -> None:
        """``memory``: uint8, zeros at first. ``nbytes``: of one buffer. ``shared``: whether every node shares its own."""
        self.shared = shared
        head = _head_bytes(len(ranks))
        self.nbytes = nbytes
        self.ranks = tuple(ranks)
        self.buffers = [memory[head + i * _rounded(nbytes) :][:nbytes] for i in range(BUFFERS)]
        words = memory[_TOKEN_BYTES:head].view(torch.int32)[: Board.size(len(ranks))]
        self.board = Board(words, ranks, rank)

    @classmethod
    def private(cls, rank: int, nbytes: int, shared: bool = False) -> NodeMemory:
        """For one rank alone; ``shared`` if it is all of its node, and the other nodes share theirs."""
        memory = torch.empty(_total(1, nbytes), dtype=torch.uint8)
        memory[: _head_bytes(1)] = 0
        return cls(memory, nbytes, (rank,), rank, shared)

    @classmethod
    def for_node(cls, control: Control, nodes: Sequence[Sequence[int]], nbytes: int) -> NodeMemory:
        """Shared by the node's ranks, or private for every rank of the job if any cannot share. Collective."""
        rank = control.rank
        node = next(node for node in nodes if rank in node)
        if all(len(node) == 1 for node in nodes):
            return cls.private(rank, nbytes, shared=True)
        made: tuple[int, mmap.mmap, bytes] | None = None
        offer = None
        if rank == node[0] and len(node) > 1:
            try:
                made = _make(_total(len(node), nbytes))
                offer = [os.getpid(), made[0], made[2].hex()]
            except OSError:
                pass  # the others find no offer
        try:
            offers = control.settle("sharing memory", None, offer, lambda views: {str(r): v for r, v in views.items()})
            mapped = made[1] if made is not None else None
            if mapped is None and len(node) > 1 and offers[str(node[0])] is not None:
                pid, fd, token = offers[str(node[0])]
                mapped = _open(pid, fd, token, _total(len(node), nbytes))
            fine = len(node) == 1 or mapped is not None
            all_fine = control.settle("sharing memory", None, fine, lambda views: all(views.values()))
        finally:
            if made is not None:
                os.close(made[0])  # whoever wanted it has mapped it
        if not all_fine or len(node) == 1:
            return cls.private(rank, nbytes, shared=all_fine)
        assert mapped is not None
        return cls(torch.frombuffer(mapped, dtype=torch.uint8), nbytes, node, rank, True)

    def abandon(self) -> None:
        """Keeps the memory until the process ends: a transfer that timed out may still write to it."""
        _ABANDONED.append(self)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _head_bytes(ranks: int) -> int:
    return _rounded(_TOKEN_BYTES + 4 * Board.size(ranks))


def _total(ranks: int, nbytes: int) -> int:
    return _head_bytes(ranks) + BUFFERS * _rounded(nbytes)


def _make(nbytes: int) -> tuple[int, mmap.mmap, bytes]:
    """File descriptor, mapping and the token at its start, by which the others know that they have opened the same."""
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
