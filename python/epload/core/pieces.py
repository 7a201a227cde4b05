"""Pieces, the unit in which a checkpoint is read, and the tensor metadata that planning needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, overload

import torch
from torch import Tensor

from epload.core.columns import column

T = TypeVar("T")


Kinds = tuple[list[tuple[tuple[int, ...], torch.dtype]], Tensor]
"""The distinct pairs of shape and dtype of a checkpoint's tensors, as they appear; and int64 [t]: which of them each has."""


def distinct_values(values: Sequence[T]) -> tuple[list[T], Tensor]:
    """The distinct values in the order in which they appear, and for each value which of them it is (int64 [n])."""
    numbers = {value: i for i, value in enumerate(dict.fromkeys(values))}
    return list(numbers), column([numbers[value] for value in values])


_FP8_METHODS = ("", "fp8", "mxfp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "quark")
"""Methods whose weights may be fp8 with scales."""
Block = tuple[int, int]
"""Rows and columns of a weight that share a scale."""


class Quantization(NamedTuple):
    """The quantization that a checkpoint's configuration declares, as far as loading depends on it. Equal on all ranks."""

    method: str = ""
    """The ``quant_method``; empty if there is none."""
    blocks: tuple[Block, ...] = ()
    """The blocks that weights may be divided into: one for each group of weights that has blocks."""
    exponents: bool = False
    """True if scales stored as uint8 are E8M0 exponents: the byte b stands for 2^(b - 127)."""

    @property
    def is_fp8(self) -> bool:
        """False for methods whose weights are all packed."""
        return self.method in _FP8_METHODS

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Quantization:
        """Returns it from its fields in JSON."""
        method, blocks, exponents = fields
        return cls(method, tuple((rows, columns) for rows, columns in blocks), exponents)


class Metadata(Protocol):
    """Names, shapes and dtypes of a checkpoint's tensors, one entry per tensor in each column; equal on all ranks.

    :class:`epload.Manifest` implements it.
    """

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def dtypes(self) -> tuple[torch.dtype, ...]: ...
    @property
    def source(self) -> str:
        """The path, or "state dict"; for error messages."""
        ...

    @property
    def kinds(self) -> Kinds: ...
    @property
    def digest(self) -> bytes:
        """Equal for two checkpoints only if they have the same tensors in the same order."""
        ...

    @property
    def quantization(self) -> Quantization | None:
        """The declaration of quantized weights in the checkpoint's configuration."""
        ...


class Piece(NamedTuple):
    """A byte range of one checkpoint tensor, and where :meth:`Checkpoint.fill` writes it.

    The tensor's bytes are those of its elements in row-major order, in the dtype of the manifest. A piece may begin and end
    inside an element.
    """

    tensor: int
    """Index of the tensor in the manifest."""
    tensor_offset: int
    """First byte of the range, from the start of the tensor."""
    bucket_offset: int
    """Offset of the range from the start of the buffer, in bytes."""
    nbytes: int
    """Length of the range in bytes."""


class Pieces(Sequence[Piece]):
    """An immutable sequence of :class:`Piece`, stored by column: a bucket can have thousands of them.

    Iterating makes a :class:`Piece` for each; code that runs once per bucket uses :attr:`columns`. A slice is a view.
    """

    def __init__(self, columns: Tensor) -> None:
        """
        Args:
            columns: int64 CPU tensor [n, 4]; its columns are the fields of :class:`Piece`, in order. Not copied.
        """
        self.columns = columns

    @staticmethod
    def of(pieces: Sequence[Piece]) -> Pieces:
        """Converts any sequence of pieces; returns ``pieces`` itself if it is a :class:`Pieces`."""
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


def is_extra_state(name: str) -> bool:
    """Returns True for the name under which torch puts what ``get_extra_state`` returns, which is not loaded or saved."""
    return name.rpartition(".")[2] == "_extra_state"
