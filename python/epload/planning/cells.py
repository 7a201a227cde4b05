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
from epload.core.views import Shape

SPLIT_BYTES = 64 << 10
"""Minimum bytes of the part that each rank sends of a cell that several ranks have. If parts were smaller, they take turns."""
_MOST_MERGED = 256
"""Boxes that are compared with one another. More are the pieces of an interleaved layout, which fill no box."""
_Index = tuple[int, ...]


class Slot(NamedTuple):
    """A box of a tensor that moves as a whole."""

    start: Shape
    size: Shape
    owners: tuple[int, ...]
    """Ranks that have it, of which one sends it: they take turns from tensor to tensor."""
    nodes: tuple[int, ...]
    """Numbers of the nodes that want it, ascending."""


def make_slots(
    shape: Shape,
    itemsize: int,
    of_senders: Iterable[tuple[Sequence[int], Sequence[Box]]],
    of_nodes: Iterable[tuple[Sequence[int], Sequence[Box]]],
    limit: int,
    least: int = SPLIT_BYTES,
) -> tuple[list[Slot], Box | None]:
    """The slots of one tensor.

    Args:
        of_senders: ranks that send, with the boxes that each has.
        of_nodes: numbers of nodes, with the boxes that each wants; boxes of one node may overlap.
        limit: bytes of a slot, unless one element has more.
        least: bytes of a part, where a cell is divided among ranks.

    Returns:
        Slots in row-major order of their starts; a box that a node wants and no rank has, None if there is none.
    """
    holders, wanters = _by_boxes(of_senders), _by_boxes(of_nodes)
    grid = _Grid(shape, [*holders, *wanters])
    nodes_of: dict[_Index, set[int]] = defaultdict(set)
    for boxes, nodes in wanters.items():
        for cell in grid.cells(boxes):
            nodes_of[cell].update(nodes)
    holders_of: dict[_Index, list[int]] = defaultdict(list)
    for boxes, ranks in holders.items():
        for cell in grid.cells(boxes):
            if cell in nodes_of:
                holders_of[cell] += ranks
    slots = []
    for cell in sorted(nodes_of):
        start, size = grid.box(cell)
        owners, wanting = tuple(sorted(holders_of.get(cell, ()))), tuple(sorted(nodes_of[cell]))
        if not owners:
            return [], (start, size)
        for part, senders in _divide(start, size, itemsize, owners, least):
            slots += [Slot(*box, senders, wanting) for box in _cut(*part, itemsize, limit)]
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
    """The box that boxes without overlaps fill, if they fill one; else these boxes. Equal boxes count once."""
    distinct = tuple(dict.fromkeys(boxes))
    if not 2 <= len(distinct) <= _MOST_MERGED:
        return distinct
    low = tuple(map(min, zip(*(start for start, _ in distinct), strict=True)))
    ends = [tuple(map(int.__add__, start, size)) for start, size in distinct]
    size = tuple(map(int.__sub__, map(max, zip(*ends, strict=True)), low))
    disjoint = all(intersect(a, b) is None for i, a in enumerate(distinct) for b in distinct[:i])
    full = disjoint and sum(prod(size) for _, size in distinct) == prod(size)
    return ((low, size),) if full else distinct


def _by_boxes(of_each: Iterable[tuple[Sequence[int], Sequence[Box]]]) -> dict[tuple[Box, ...], list[int]]:
    """Returns the numbers by their boxes; skips those without boxes."""
    by_boxes: dict[tuple[Box, ...], list[int]] = defaultdict(list)
    for numbers, boxes in of_each:
        if boxes:
            by_boxes[tuple(boxes)] += numbers
    return by_boxes


class _Grid:
    """The cells into which the boundaries of some boxes divide a tensor, by their index in each dim."""

    def __init__(self, shape: Shape, boxes: Iterable[Sequence[Box]]) -> None:
        cuts: list[set[int]] = [{0, length} for length in shape]
        for some in boxes:
            for start, size in some:
                for dim, (begin, length) in enumerate(zip(start, size, strict=True)):
                    cuts[dim].update((begin, begin + length))
        self._cuts = [sorted(of_dim) for of_dim in cuts]

    def cells(self, boxes: Iterable[Box]) -> Iterator[_Index]:
        """Yields each cell that lies in one or more of the boxes, once."""
        seen: set[_Index] = set()
        for start, size in boxes:
            ranges = (
                range(bisect_left(cuts, begin), bisect_left(cuts, begin + length))
                for cuts, begin, length in zip(self._cuts, start, size, strict=True)
            )
            seen.update(product(*ranges))
        yield from seen

    def box(self, cell: _Index) -> Box:
        start = tuple(cuts[i] for cuts, i in zip(self._cuts, cell, strict=True))
        return start, tuple(cuts[i + 1] - cuts[i] for cuts, i in zip(self._cuts, cell, strict=True))


def _divide(
    start: Shape, size: Shape, itemsize: int, owners: tuple[int, ...], least: int
) -> list[tuple[Box, tuple[int, ...]]]:
    """The parts that the ranks which have a cell send, along its longest dim; or the cell, if the parts would be small."""
    dim = max(range(len(size)), key=size.__getitem__, default=-1)
    count = len(owners)
    if count == 1 or dim < 0 or size[dim] < count or prod(size) * itemsize < count * least:
        return [((start, size), owners)]
    bounds = [size[dim] * i // count for i in range(count + 1)]
    return [
        ((_set(start, dim, start[dim] + low), _set(size, dim, high - low)), (owner,))
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
        yield from _cut(_set(start, dim, start[dim] + begin), _set(size, dim, length), itemsize, limit)


def _set(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])
