"""Compares the tensors of two checkpoints, and looks for NaN and Inf in one, piece by piece, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint, read_in_chunks
from epload.checkpoint.byte_store import Progress
from epload.checkpoint.manifest import Manifest
from epload.core import dtypes
from epload.errors import CheckpointError

_CHUNK_ELEMENTS = 1 << 20


def find_non_finite(checkpoint: Checkpoint, progress: Progress) -> Iterator[dict[str, Any]]:
    """Reads all of a checkpoint. Yields the name of each tensor that has NaN or Inf, the numbers of both, and that of its
    elements. Raises CheckpointError."""
    manifest = checkpoint.manifest
    for number, (name, shape) in enumerate(zip(manifest.names, manifest.shapes, strict=True)):
        nans = infs = 0
        for values in read_in_chunks(checkpoint, number, _CHUNK_ELEMENTS):
            progress(values.nbytes)
            if values.is_complex():  # as pairs: torch counts neither kind in complex numbers
                values = torch.view_as_real(values)
            if values.is_floating_point() and values.dtype in dtypes.TABLE:  # float4 has neither, and torch does not convert it
                values = values.float() if values.dtype.itemsize == 1 else values  # torch has no isinf for float8
                nans += int(values.isnan().sum())
                infs += int(values.isinf().sum())
        if nans or infs:
            yield {"name": name, "nans": nans, "infs": infs, "count": prod(shape)}


def compare_headers(first: Manifest, second: Manifest, pattern: re.Pattern[str]) -> dict[str, Any]:
    """Returns the names in only one of two checkpoints (``only_first``, ``only_second``), the pairs of dtype and shape of tensors
    whose shapes differ (``shapes``) or only the dtypes (``dtypes``), and the names of tensors of equal shape (``common``).
    ``pattern``: compares only tensors whose name it matches anywhere."""
    a, b = (
        {
            name: (dtypes.name(dtype), list(shape))
            for name, dtype, shape in zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True)
            if pattern.search(name)
        }
        for manifest in (first, second)
    )
    both = {name: (a[name], b[name]) for name in a if name in b}
    shapes = {name: pair for name, pair in both.items() if pair[0][1] != pair[1][1]}
    common = [name for name in both if name not in shapes]
    return {
        "only_first": [name for name in a if name not in both],
        "only_second": [name for name in b if name not in both],
        "shapes": shapes,
        "dtypes": {name: both[name] for name in common if a[name] != b[name]},
        "common": common,
    }


def compare_values(
    first: Checkpoint, second: Checkpoint, names: list[str], progress: Progress, rtol: float = 0.0, atol: float = 0.0
) -> Iterator[dict[str, Any]]:
    """Compares tensors of equal shapes, a million elements at a time; dtypes may differ. Yields for each tensor that differs its
    name, how many elements differ by more than the tolerances (``differing``), how many it has (``count``), and of all absolute
    differences the largest and the mean; these are infinite where one value is NaN, or infinite, and the other is another. Raises
    CheckpointError, also for values that differ in a dtype that torch does not convert.

    Two NaN are equal; so are 0 and -0. Differences are computed in float64, in which integers beyond 2**53 are rounded; whether
    two integers differ is exact.

    Args:
        progress: for the reads of the first.
        rtol, atol: an element of the first differs if it is further from that of the second than ``atol + rtol * abs(second)``.
    """
    number_of = [{name: i for i, name in enumerate(checkpoint.manifest.names)} for checkpoint in (first, second)]
    for name in names:
        i, j = (numbers[name] for numbers in number_of)
        count = prod(first.manifest.shapes[i])
        differing, largest, total = 0, 0.0, 0.0
        chunks = (read_in_chunks(first, i, _CHUNK_ELEMENTS), read_in_chunks(second, j, _CHUNK_ELEMENTS))
        for a, b in zip(*chunks, strict=True):
            progress(a.nbytes)
            if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                continue
            if alien := next((t.dtype for t in (a, b) if t.dtype not in dtypes.TABLE), None):
                raise CheckpointError(
                    f"{name} differs, but torch does not convert values of {dtypes.name(alien)}, to say by how much; pass "
                    "--headers, or leave it out with --filter"
                )
            off, distance = _differences(a, b, rtol, atol)
            differing += int(off.sum())
            largest = max(largest, float(distance.max()))
            total += float(distance.sum())
        if differing:
            yield {
                "name": name, "differing": differing, "count": count, "largest": largest, "mean": total / count,
            }  # fmt: skip


def _differences(a: Tensor, b: Tensor, rtol: float, atol: float) -> tuple[Tensor, Tensor]:
    """Returns which elements differ, and the absolute difference of each."""
    x, y = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
    if not (rtol or atol) and not any(t.dtype.is_floating_point or t.is_complex() for t in (a, b)):
        i, j = (t.view(torch.int64) if t.dtype == torch.uint64 else t.to(torch.int64) for t in (a, b))
        differs = i != j
        if (a.dtype == torch.uint64) != (b.dtype == torch.uint64):
            differs |= i < 0  # the bits of a number from 2**63 on
        return differs, (x - y).abs()
    equal = (x == y) | (x.isnan() & y.isnan())
    distance = torch.where(equal, 0.0, (x - y).abs().nan_to_num(nan=inf, posinf=inf))
    return ~equal & ~((distance < inf) & (distance <= atol + rtol * y.abs())), distance
