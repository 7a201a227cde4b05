"""Staging buffers that the ranks of one node share, with the node's board.

The memory is a memfd: it has no name in any file system, so that nothing is left behind however its processes end. The leader
makes it, the others open it through ``/proc``. Where that is not possible (processes in different containers) every rank has
buffers of its own, and the node's step goes over the network.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from epload.control.control import Control
from epload.staging.board import Board

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
        """Shared by the node's ranks, or private for every rank of the job if any cannot share. Collective."""
        with NodeSharing(nodes, control.rank, nbytes, count) as sharing:
            if sharing.trivial:
                return sharing.finish(True)
            offers = control.settle("sharing memory", None, sharing.offer, collect_offers)
            fine = sharing.accept(offers)
            return sharing.finish(control.settle("sharing memory", None, fine, lambda views: all(views.values())))


class NodeSharing:
    """Making a node's memory, in two rounds of all ranks: in the first they exchange :attr:`offer`, in the second what
    :meth:`accept` has returned. A context manager, or :meth:`close` it."""

    def __init__(self, nodes: Sequence[Sequence[int]], rank: int, nbytes: int, count: int = BUFFERS) -> None:
        """``nbytes``: of one buffer, and ``count`` of buffers; equal on all ranks of a node."""
        self.trivial = all(len(node) == 1 for node in nodes)
        """True if there is nothing to share, nor to agree on."""
        self.nbytes, self.count = nbytes, count
        self.offer: list[Any] | None = None
        """Process, descriptor and token by which the node's other ranks find the memory that this one has made. For JSON."""
        self._rank = rank
        self._node = next(node for node in nodes if rank in node)
        self._fd = -1
        self._mapped: mmap.mmap | None = None
        if rank == self._node[0] and len(self._node) > 1:
            with suppress(OSError):  # the others find no offer
                self._fd, self._mapped, token = _make(_total(len(self._node), nbytes, count))
                self.offer = [os.getpid(), self._fd, token.hex()]

    def accept(self, offers: Mapping[str, list[Any]]) -> bool:
        """Returns True if this rank can use its node's memory. ``offers``: by rank, those that were made."""
        made = offers.get(str(self._node[0]))
        if self._mapped is None and made is not None:
            pid, fd, token = made
            self._mapped = _open(pid, fd, token, _total(len(self._node), self.nbytes, self.count))
        return len(self._node) == 1 or self._mapped is not None

    def finish(self, all_fine: bool) -> NodeMemory:
        """Ends the offer: whoever wanted the memory has mapped it. ``all_fine``: whether every rank has accepted."""
        if not all_fine or len(self._node) == 1:
            self.close()
            return NodeMemory.private(self._rank, self.nbytes, all_fine, self.count)
        assert self._mapped is not None
        memory, self._mapped = torch.frombuffer(self._mapped, dtype=torch.uint8), None
        self.close()
        return NodeMemory(memory, self.nbytes, self._node, self._rank, True, self.count)

    def close(self) -> None:
        """Takes back the offer, and drops what was accepted."""
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> NodeSharing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def collect_offers(views: Mapping[int, list[Any] | None]) -> dict[str, list[Any]]:
    """The offers that were made, as :meth:`NodeSharing.accept` takes them."""
    return {str(rank): offer for rank, offer in views.items() if offer is not None}


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _head_bytes(ranks: int) -> int:
    return _rounded(_TOKEN_BYTES + 4 * Board.size(ranks))


def _total(ranks: int, nbytes: int, count: int) -> int:
    return _head_bytes(ranks) + count * _rounded(nbytes)


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
