"""Placement geometry: which regions of a tensor a rank owns.

A region is an n-d box in a tensor's global index space. Along one dim a rank owns a list of intervals, in local order;
its regions are the Cartesian product of the intervals of all dims. All functions are pure and need no process group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and size of an n-d box, in elements, one entry per dim."""
Interval = tuple[int, int]
"""Start and length of a range of indices of one dim."""


@dataclass(frozen=True)
class Sharded:
    """The mesh axis shards ``dim`` as torch.chunk does.

    ``split_factor`` > 1 is torch's _StridedShard: ``dim`` is first split into that many parts, and this axis shards each part.
    If axes to the right shard the same dim into that many parts, the parts are theirs (FSDP over TP: the right axis was applied
    first). Otherwise the rank owns a piece of every part (a fused projection under TP).
    """

    dim: int
    split_factor: int = 1


Placement = Sharded | None
"""None: every rank of the mesh axis has the whole tensor."""


@dataclass(frozen=True)
class Layout:
    """A tensor's global shape, and how a mesh divides the tensor. Equal on all ranks."""

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    """One per mesh axis."""


class OwnedRegion(NamedTuple):
    """A box in the global index space that a rank owns, and where it starts in the rank's local shard."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    local_start: tuple[int, ...]


# ---- intervals of one dim ----


def chunk_intervals(intervals: Sequence[Interval], chunks: int, index: int) -> list[Interval]:
    """Returns chunk ``index`` of the concatenated intervals, divided as by torch.chunk. May be empty."""
    chunk_size = -(-sum(size for _, size in intervals) // chunks)
    begin, end = index * chunk_size, (index + 1) * chunk_size
    chunk, position = [], 0
    for start, size in intervals:
        low, high = max(begin, position), min(end, position + size)
        if low < high:
            chunk.append((start + low - position, high - low))
        position += size
    return chunk


def owned_intervals(layout: Layout, dim: int, coordinate: Sequence[int]) -> list[Interval]:
    """The indices of one dim that the rank at ``coordinate`` owns, in local order."""
    intervals: list[Interval] = [(0, layout.shape[dim])] if layout.shape[dim] else []
    for axis, parts in _sharding_order(layout, dim):
        split = [chunk_intervals(intervals, parts, part) for part in range(parts)]
        intervals = [i for part in split for i in chunk_intervals(part, layout.mesh_shape[axis], coordinate[axis])]
    merged: list[Interval] = []
    for start, size in intervals:
        if merged and sum(merged[-1]) == start:
            start, before = merged.pop()
            size += before
        merged.append((start, size))
    return merged


def _sharding_axes(layout: Layout, dim: int) -> list[int]:
    """The mesh axes that shard a dim."""
    return [axis for axis, p in enumerate(layout.placements) if isinstance(p, Sharded) and p.dim == dim]


def _sharding_order(layout: Layout, dim: int) -> list[tuple[int, int]]:
    """The mesh axes that shard one dim, in the order in which they apply, each with its number of parts (1: not strided).

    An axis whose split factor is the product of the sizes of axes to its right applies after those axes. A factor that remains
    means that the axis shards that many parts separately.
    """
    order: list[tuple[int, int]] = []
    # Right to left, so that the axes to the right are already in order.
    for axis in reversed(_sharding_axes(layout, dim)):
        placement = layout.placements[axis]
        assert isinstance(placement, Sharded)
        parts = placement.split_factor
        covered = 0
        while covered < len(order) and parts % layout.mesh_shape[order[covered][0]] == 0 and parts > 1:
            parts //= layout.mesh_shape[order[covered][0]]
            covered += 1
        order.insert(covered if placement.split_factor > 1 else 0, (axis, parts))
    return order


# ---- boxes ----


def owned_regions(layout: Layout, coordinate: Sequence[int]) -> list[OwnedRegion]:
    """The regions that the rank at ``coordinate`` of the mesh owns.

    Empty if the local shard is empty; one region of size () for a 0-d tensor.
    """
    per_dim = []
    for dim in range(len(layout.shape)):
        intervals = owned_intervals(layout, dim, coordinate)
        ends = accumulate((size for _, size in intervals), initial=0)
        per_dim.append([(start, size, local) for (start, size), local in zip(intervals, ends, strict=False)])
    return [
        OwnedRegion(tuple(s for s, _, _ in box), tuple(n for _, n, _ in box), tuple(at for _, _, at in box))
        for box in product(*per_dim)
    ]


def owned_shape(layout: Layout, coordinate: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the local shard of the rank at ``coordinate`` of the mesh."""
    dims = range(len(layout.shape))
    return tuple(sum(size for _, size in owned_intervals(layout, dim, coordinate)) for dim in dims)


@lru_cache(maxsize=1024)
def shard_boundaries(layout: Layout, dim: int) -> tuple[frozenset[int], bool]:
    """Returns the indices of a dim at which what some rank owns starts or ends, and True if some rank owns several intervals."""
    axes = _sharding_axes(layout, dim)
    if all(layout.mesh_shape[axis] == 1 for axis in axes):
        return frozenset(), False
    ranks = product(*(range(n if axis in axes else 1) for axis, n in enumerate(layout.mesh_shape)))
    owned = [owned_intervals(layout, dim, coordinate) for coordinate in ranks]
    boundaries = frozenset(at for intervals in owned for start, size in intervals for at in (start, start + size))
    return boundaries, any(len(intervals) > 1 for intervals in owned)


def owned_parts(box: Box, owned: Iterable[OwnedRegion]) -> Iterator[OwnedRegion]:
    """The parts of a box that lie in owned regions."""
    for region in owned:
        if (shared := intersect(box, (region.start, region.size))) is not None:
            start, size = shared
            local_start = (at + a - b for at, a, b in zip(region.local_start, start, region.start, strict=True))
            yield OwnedRegion(start, size, tuple(local_start))


def box_slices(start: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    """The index of a box in a tensor."""
    return tuple(slice(begin, begin + length) for begin, length in zip(start, size, strict=True))


def intersect(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes, None if it is empty."""
    start = tuple(map(max, a[0], b[0]))
    size = tuple(
        min(a_start + a_size, b_start + b_size) - low for a_start, a_size, b_start, b_size, low in zip(*a, *b, start, strict=True)
    )
    return (start, size) if all(n > 0 for n in size) else None


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of this shape."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def contiguous_runs(size: Sequence[int], strides: Sequence[int]) -> tuple[int, list[int]]:
    """Returns the length of the contiguous runs of a box in a row-major tensor, and where each starts in it, from the box's first
    element on. ``strides``: of the box, not increasing. All in elements."""
    dims, length = list(range(len(size))), 1
    while dims and (size[dims[-1]] == 1 or strides[dims[-1]] == length):
        length *= size[dims.pop()]
    steps = ([i * strides[dim] for i in range(size[dim])] for dim in dims)
    return length, list(map(sum, product(*steps)))
