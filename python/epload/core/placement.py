"""Which regions of a tensor a rank owns. Pure: shapes, placements and coordinates in, regions out; no process group.

A region is a box in a tensor's global index space. Sharding of one dim is a list of index intervals, in local order; the
regions of a tensor are the product of its dims' intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and size, one entry a dim, in elements."""
Interval = tuple[int, int]
"""Start and length, in indices of one dim."""


@dataclass(frozen=True)
class Replicated:
    """The whole tensor on every rank of this mesh axis."""


@dataclass(frozen=True)
class Sharded:
    """``dim`` is cut along this mesh axis, as torch.chunk cuts it.

    ``split_factor`` > 1 is torch's _StridedShard. It says that ``dim`` is first cut into that many parts and each part then
    along this axis. Where axes to the right shard the same dim in as many parts, those parts are theirs (FSDP over TP: the
    right axis was applied first); else the rank keeps its piece of every part (a fused projection under TP).
    """

    dim: int
    split_factor: int = 1


Placement = Replicated | Sharded


@dataclass(frozen=True)
class Layout:
    """A tensor's global shape and how a mesh divides it. Equal on all ranks."""

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]


@dataclass(frozen=True)
class OwnedRegion:
    """A box of the global index space, and where it starts in the local shard."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    local_start: tuple[int, ...]


def chunk(intervals: Sequence[Interval], parts: int, index: int) -> list[Interval]:
    """Piece ``index`` of torch.chunk(parts) of the sequence of indices that ``intervals`` spell out; may be empty."""
    length = sum(size for _, size in intervals)
    each = -(-length // parts)
    return take(intervals, index * each, min(length, (index + 1) * each))


def take(intervals: Sequence[Interval], begin: int, end: int) -> list[Interval]:
    """Positions [begin, end) of the sequence of indices that ``intervals`` spell out."""
    taken = []
    position = 0
    for start, size in intervals:
        low, high = max(begin, position), min(end, position + size)
        if low < high:
            taken.append((start + low - position, high - low))
        position += size
    return taken


def owned_intervals(
    length: int, dim: int, mesh_shape: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> list[Interval]:
    """The indices of one dim that the rank at ``coordinate`` owns, in local order."""
    axes = [axis for axis, p in enumerate(placements) if isinstance(p, Sharded) and p.dim == dim]
    intervals: list[Interval] = [(0, length)] if length else []
    for axis, parts in application_order(axes, mesh_shape, placements):
        if parts == 1:
            intervals = chunk(intervals, mesh_shape[axis], coordinate[axis])
        else:
            pieces = [chunk(intervals, parts, part) for part in range(parts)]
            intervals = [i for piece in pieces for i in chunk(piece, mesh_shape[axis], coordinate[axis])]
    return _merge(intervals)


def application_order(
    axes: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> list[tuple[int, int]]:
    """The mesh axes that shard one dim in the order they cut it, each with the parts it finds that no axis made.

    An axis whose split factor is accounted for by axes to its right comes after them. The shards that the first
    ``split_factor`` parts do not explain are left as parts that the rank holds a piece of each.
    """
    order: list[tuple[int, int]] = []
    for axis in reversed(axes):  # right to left: what stands right of an axis is already placed
        placement = placements[axis]
        assert isinstance(placement, Sharded)
        parts = placement.split_factor
        covered = 0
        while covered < len(order) and parts % mesh_shape[order[covered][0]] == 0 and parts > 1:
            parts //= mesh_shape[order[covered][0]]
            covered += 1
        order.insert(covered if placement.split_factor > 1 else 0, (axis, parts))
    return order


def _merge(intervals: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, size in intervals:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((start, size))
    return merged


def owned_regions(layout: Layout, coordinate: Sequence[int]) -> list[OwnedRegion]:
    """What the rank at ``coordinate`` of the mesh owns. Empty if its shard is; one region of size () for a 0-d tensor."""
    per_dim = []
    for dim, length in enumerate(layout.shape):
        placed = []
        local = 0
        for start, size in owned_intervals(length, dim, layout.mesh_shape, layout.placements, coordinate):
            placed.append((start, size, local))
            local += size
        per_dim.append(placed)
    return [
        OwnedRegion(tuple(s for s, _, _ in box), tuple(n for _, n, _ in box), tuple(at for _, _, at in box))
        for box in product(*per_dim)
    ]


def local_shape(layout: Layout, coordinate: Sequence[int]) -> tuple[int, ...]:
    """Shape of the local shard of the rank at ``coordinate``."""
    return tuple(
        sum(size for _, size in owned_intervals(length, dim, layout.mesh_shape, layout.placements, coordinate))
        for dim, length in enumerate(layout.shape)
    )


def intersect(a: Box, b: Box) -> Box | None:
    """The box that two boxes share, None if they share no element."""
    start = tuple(map(max, a[0], b[0]))
    size = tuple(
        min(a_start + a_size, b_start + b_size) - low
        for a_start, a_size, b_start, b_size, low in zip(*a, *b, start, strict=True)
    )
    return (start, size) if all(n > 0 for n in size) else None


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor of this shape."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def box_of_range(shape: Sequence[int], begin: int, count: int) -> Box:
    """The box that elements [begin, begin + count) of a row-major tensor form. They must form one (see bucket_plan.h)."""
    start, size = [], []
    for length, stride in zip(shape, row_major_strides(shape), strict=True):
        start.append(begin // stride)
        begin %= stride
        size.append(min(max(count // stride, 1), length))
    return tuple(start), tuple(size)
