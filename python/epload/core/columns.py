"""Columns of integers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from epload.core.buffers import as_memoryview


def column(values: Sequence[int]) -> Tensor:
    """Integers as int64 [n]. ``torch.tensor`` takes ten times as long."""
    if not len(values):
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.frombuffer(array("q", values), dtype=torch.int64)


def arange(count: int) -> Tensor:
    """The numbers below ``count`` on CPU, whatever the default device. int64 [count]."""
    return torch.arange(count, device="cpu")


def from_raw(raw: bytearray) -> Tensor:
    """A column that shares memory with the bytes of its values, as native code passes it. int64 [n]."""
    return torch.frombuffer(raw, dtype=torch.int64) if raw else torch.empty(0, dtype=torch.int64, device="cpu")


def to_raw(values: Tensor) -> bytes:
    """The bytes of its values, to hash or send them, or for native code. ``values``: [n] on CPU."""
    return bytes(as_memoryview(values.contiguous()))


def batches(nbytes: Tensor, limit: int) -> tuple[Tensor, ...]:
    """Divides consecutive rows into batches of about ``limit`` bytes; returns the numbers of the rows of each.

    Args:
        nbytes: int64 [n], of each row.
    """
    _, counts = torch.unique_consecutive((nbytes.cumsum(0) - nbytes) // limit, return_counts=True)
    return torch.split(arange(len(nbytes)), counts.tolist())


def numbered(values: Tensor) -> Tensor:
    """Numbers values from 0 on, in their order. int64 [n]."""
    numbers: Tensor = torch.unique(values, return_inverse=True)[1]
    return numbers


def numbered_rows(columns: Sequence[Tensor]) -> Tensor:
    """Numbers rows of non-negative values from 0 on, in their order. int64 [n], as are the columns."""
    first, *others = map(numbered, columns)
    for values in others:
        first = numbered(first * (int(values.max()) + 1 if len(values) else 1) + values)
    return first


def expand(counts: Tensor, template: Tensor) -> tuple[Tensor, Tensor]:
    """Lists the entries of rows that each have those of a template, where the entries of all templates follow one another.

    Args:
        counts: int64 [k], the number of entries of each template.
        template: int64 [n], the template of each row.

    Returns:
        int64 [m]: each row's entries, one after the other; int64 [m]: the row of each.
    """
    sizes = counts[template]
    row = torch.repeat_interleave(arange(len(template)), sizes)
    within = arange(len(row)) - (sizes.cumsum(0) - sizes)[row]
    return (counts.cumsum(0) - counts)[template[row]] + within, row


def first_of_each(numbers: Tensor) -> Tensor:
    """Returns the first index of each number from 0 on, provided that every number up to the largest occurs. int64 [n]."""
    count = int(numbers.max()) + 1 if len(numbers) else 0
    first = torch.full((count,), len(numbers), device="cpu")
    return first.scatter_reduce(0, numbers, arange(len(numbers)), "amin")
