"""Pieces of a checkpoint's tensors, and what planning needs to know of those tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, overload

import torch
from torch import Tensor


class Metadata(Protocol):
    """Of a checkpoint's tensors, one entry a tensor in each column; equal on all ranks. A ``Manifest`` is one."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def dtypes(self) -> tuple[torch.dtype, ...]: ...
    @property
    def source(self) -> str:
        """The path, or "state dict"; for messages."""
        ...

    @property
    def digest(self) -> bytes:
        """Shared by two only if their tensors are the same in the same order."""
        ...


class Piece(NamedTuple):
    """Bytes [tensor_offset, tensor_offset + nbytes) of tensor number ``tensor`` of the manifest, wanted at an offset."""

    tensor: int
    tensor_offset: int
    bucket_offset: int
    nbytes: int


class Pieces(Sequence[Piece]):
    """Many pieces, in columns: those of a bucket number in the thousands."""

    def __init__(self, columns: Tensor) -> None:
        """``columns``: int64 [n, 4], the fields of Piece."""
        self.columns = columns

    @staticmethod
    def of(pieces: Sequence[Piece]) -> Pieces:
        if isinstance(pieces, Pieces):
            return pieces
        return Pieces(torch.tensor(pieces, dtype=torch.int64).reshape(-1, len(Piece._fields)))

    def __len__(self) -> int:
        return len(self.columns)

    def __iter__(self) -> Iterator[Piece]:
        return map(Piece._make, self.columns.tolist())

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> Pieces: ...
    def __getitem__(self, index: int | slice) -> Piece | Pieces:
        part = self.columns[index]
        return Pieces(part) if isinstance(index, slice) else Piece(*part.tolist())
