"""Plans which boxes of a tensor move from which ranks to which nodes. Pure: boxes that ranks have and nodes want in, slots out.

All boundaries of all boxes form a grid, so that a cell of it lies in a box or outside. The cells that some node wants are divided
among the ranks that have them, and cut to the size of a message's part. Every rank computes the same slots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, product
from math import prod
from typing import NamedTuple

from torch import Tensor

from epload.core.columns import column, expand
from epload.core.placement import Box, intersect
from epload.core.views import Shape, with_dim

SPLIT_BYTES = 64 << 10
"""Minimum bytes of the part that each rank sends of a cell that several ranks have. If parts were smaller, they take turns."""
_MAX_MERGED = 256
"""Boxes that are compared with one another. More are the pieces of an interleaved layout, which fill no box."""
_Index = tuple[int, ...]
_Boxes = Sequence[tuple[Sequence[int], Sequence[Box]]]
"""Numbers of ranks or nodes, with the boxes that each of them has."""


class Slot(NamedTuple):
    """A box of a tensor that moves as a whole."""

    box: Box
    owners: tuple[int, ...]
    """Ranks that have it, of which one sends it: they take turns from tensor to tensor."""
    nodes: tuple[int, ...]
    """Numbers of the nodes that want it, ascending."""


def make_slots(
    shape: Shape,
    itemsize: int,
    of_senders: _Boxes,
    of_nodes: _Boxes,
    limit: int,
    min_bytes: int,
) -> tuple[list[Slot], Box | None]:
    """Returns the slots of one tensor.

    Args:
        of_senders: ranks that send, with the boxes that each has.
        of_nodes: numbers of nodes, with the boxes that each wants; boxes of one node may overlap.
        limit: bytes of a slot, unless one element has more.
        min_bytes: of a part, where a cell is divided among ranks.

    Returns:
        Slots in row-major order of their starts; a box that a node wants and no rank has, None if there is none.
    """
    cuts: list[Sequence[int]] = []
    boxes = [box for _, own in (*of_senders, *of_nodes) for box in own]
    for dim, length in enumerate(shape):
        starts = {start[dim] for start, _ in boxes}
        cuts.append(sorted({0, length, *starts, *(start[dim] + size[dim] for start, size in boxes)}))
    senders_of, nodes_of = _by_cell(cuts, of_senders), _by_cell(cuts, of_nodes)
    slots = []
    for cell in sorted(nodes_of):
        start = tuple(of_dim[i] for of_dim, i in zip(cuts, cell, strict=True))
        size = tuple(of_dim[i + 1] - of_dim[i] for of_dim, i in zip(cuts, cell, strict=True))
        if cell not in senders_of:
            return [], (start, size)
        for part, owners in _divide(start, size, itemsize, tuple(sorted(senders_of[cell])), min_bytes):
            nodes = tuple(sorted(nodes_of[cell]))
            slots += [Slot(box, owners, nodes) for box in _cut(*part, itemsize, limit)]
    return slots, None


def expand_slots(slots: Sequence[Sequence[Slot]], kind_of: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lists the slots of all tensors, out of those of each kind of tensors.

    Args:
        kind_of: int64 [t], of each tensor.

    Returns:
        int64 [n] each: the slot's number among all in ``slots``, the tensor, and the rank that sends it.
    """
    slot, tensor = expand(column([len(some) for some in slots]), kind_of)
    owners = [slot.owners for slot in chain.from_iterable(slots)]
    first = column([0, *map(len, owners)]).cumsum(0)
    return slot, tensor, column(list(chain.from_iterable(owners)))[first[slot] + tensor % first.diff()[slot]]


def merge_boxes(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Returns the box that boxes without overlaps fill, if they fill one; else these boxes. Equal boxes count once."""
    distinct = tuple(dict.fromkeys(boxes))
    if not 2 <= len(distinct) <= _MAX_MERGED:
        return distinct
    start = tuple(map(min, *(start for start, _ in distinct)))
    ends = (map(sum, zip(*box, strict=True)) for box in distinct)
    size = tuple(high - low for low, high in zip(start, map(max, *ends), strict=True))
    if sum(prod(size) for _, size in distinct) != prod(size):
        return distinct
    overlap = any(intersect(a, b) for i, a in enumerate(distinct) for b in distinct[:i])
    return distinct if overlap else ((start, size),)


def _by_cell(cuts: Sequence[Sequence[int]], of_each: _Boxes) -> dict[_Index, list[int]]:
    """Returns the numbers by the cells that lie in one or more of their boxes."""
    by_cell: dict[_Index, list[int]] = defaultdict(list)
    for numbers, boxes in of_each:
        cells: set[_Index] = set()
        for start, size in boxes:
            sides = zip(cuts, start, size, strict=True)
            cells.update(product(*(range(bisect_left(c, at), bisect_left(c, at + n)) for c, at, n in sides)))
        for cell in cells:
            by_cell[cell] += numbers
    return by_cell


def _divide(
    start: Shape, size: Shape, itemsize: int, owners: tuple[int, ...], min_bytes: int
) -> list[tuple[Box, tuple[int, ...]]]:
    """The parts that the ranks which have a cell send, along its longest dim; or the cell, if the parts would be small."""
    dim = max(range(len(size)), key=size.__getitem__, default=-1)
    count = len(owners)
    if count == 1 or dim < 0 or size[dim] < count or prod(size) * itemsize < count * min_bytes:
        return [((start, size), owners)]
    bounds = [size[dim] * i // count for i in range(count + 1)]
    return [
        ((with_dim(start, dim, start[dim] + low), with_dim(size, dim, high - low)), (owner,))
        for owner, low, high in zip(owners, bounds, bounds[1:], strict=False)
    ]


def _cut(start: Shape, size: Shape, itemsize: int, limit: int) -> Iterator[Box]:
    """Parts of a box of at most ``limit`` bytes, cut along its outer dims."""
    dim = next((dim for dim, length in enumerate(size) if length > 1), None)
    nbytes = prod(size) * itemsize
    if dim is None or nbytes <= limit:
        yield start, size
        return
    rows = max(1, limit // (nbytes // size[dim]))
    for begin in range(0, size[dim], rows):
        length = min(rows, size[dim] - begin)
        yield from _cut(with_dim(start, dim, start[dim] + begin), with_dim(size, dim, length), itemsize, limit)
