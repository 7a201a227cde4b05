"""Comparing the tensors of two checkpoints, piece by piece, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, prod
from typing import NamedTuple

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.core.dtypes import name as dtype_name
from epload.core.pieces import Piece

_CHUNK_ELEMENTS = 1 << 20


class Kind(NamedTuple):
    """The dtype and shape of a tensor in a checkpoint's header."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ValueDifference:
    """The difference between the values of one tensor in two checkpoints."""

    name: str
    differing: int
    """Elements that differ by more than the tolerances."""
    count: int
    """Number of elements."""
    largest: float
    """The largest absolute difference; infinite where one value is NaN, or infinite, and the other is another."""
    mean: float
    """The mean absolute difference of all elements; infinite if the largest is."""


@dataclass(frozen=True)
class HeaderDifferences:
    """The result of comparing the headers of two checkpoints, each list in the order of the first that has the names."""

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    shapes: dict[str, tuple[Kind, Kind]]
    """Tensors whose shapes differ; their values are not compared."""
    dtypes: dict[str, tuple[Kind, Kind]]
    """Tensors of equal shape whose dtypes differ."""
    common: tuple[str, ...]
    """Tensors of equal shape."""

    @property
    def any(self) -> bool:
        return bool(self.only_first or self.only_second or self.shapes or self.dtypes)


def compare_headers(first: Checkpoint, second: Checkpoint, pattern: re.Pattern[str] | None = None) -> HeaderDifferences:
    """``pattern``: compares only tensors whose name it matches anywhere."""
    a, b = (
        {
            name: Kind(dtype_name(dtype), shape)
            for name, dtype, shape in zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True)
            if pattern is None or pattern.search(name) is not None
        }
        for manifest in (first.manifest, second.manifest)
    )
    both = {name: (a[name], b[name]) for name in a if name in b}
    shapes = {name: pair for name, pair in both.items() if pair[0].shape != pair[1].shape}
    common = tuple(name for name in both if name not in shapes)
    return HeaderDifferences(
        only_first=tuple(name for name in a if name not in b),
        only_second=tuple(name for name in b if name not in a),
        shapes=shapes,
        dtypes={name: both[name] for name in common if a[name].dtype != b[name].dtype},
        common=common,
    )


def compare_values(
    first: Checkpoint,
    second: Checkpoint,
    names: tuple[str, ...],
    rtol: float = 0.0,
    atol: float = 0.0,
    progress: Callable[[int], object] | None = None,
) -> Iterator[ValueDifference]:
    """Compares tensors of equal shapes, a million elements at a time; dtypes may differ. Raises CheckpointError.

    Two NaN are equal; so are 0 and -0. Differences are computed in float64, in which integers beyond 2**53 are rounded; whether
    two integers differ is exact.

    Args:
        rtol, atol: an element of the first differs if it is further from that of the second than ``atol + rtol * abs(second)``.
        progress: called with the number of bytes read of the first after each piece.
    """
    number_of = [{name: i for i, name in enumerate(checkpoint.manifest.names)} for checkpoint in (first, second)]
    for name in names:
        i, j = (numbers[name] for numbers in number_of)
        count = prod(first.manifest.shapes[i])
        differing, largest, total = 0, 0.0, 0.0
        for begin in range(0, count, _CHUNK_ELEMENTS):
            elements = min(_CHUNK_ELEMENTS, count - begin)
            a, b = _read(first, i, begin, elements), _read(second, j, begin, elements)
            if progress is not None:
                progress(a.nbytes)
            if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                continue
            off, distance = _differences(a, b, rtol, atol)
            differing += int(off.sum())
            largest = max(largest, float(distance.max()))
            total += float(distance.sum())
        if differing:
            yield ValueDifference(name, differing, count, largest, total / count)


def _read(checkpoint: Checkpoint, number: int, begin: int, elements: int) -> Tensor:
    dtype = checkpoint.manifest.dtypes[number]
    buffer = torch.empty(elements * dtype.itemsize, dtype=torch.uint8)
    checkpoint.fill(buffer, [Piece(number, begin * dtype.itemsize, 0, len(buffer))])
    return buffer.view(dtype)


def _differences(a: Tensor, b: Tensor, rtol: float, atol: float) -> tuple[Tensor, Tensor]:
    """Returns which elements differ, and the absolute difference of each."""
    x, y = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
    if not (rtol or atol) and not any(t.dtype.is_floating_point or t.is_complex() for t in (a, b)):
        return torch.from_numpy(a.numpy() != b.numpy()), (x - y).abs()  # exact: also between int64 and uint64
    equal = (x == y) | (x.isnan() & y.isnan())
    distance = torch.where(equal, 0.0, (x - y).abs().nan_to_num(nan=inf, posinf=inf))
    return ~equal & ~((distance < inf) & (distance <= atol + rtol * y.abs())), distance
