"""Computes overlaps and differences of boxes of one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from epload.core.placement import Box, intersect


def overlapping(boxes: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Yields the indices of each two boxes that have elements in common."""
    if not boxes:
        return
    # Only boxes whose intervals overlap are compared, in the dim with the most distinct starts.
    dim = max(range(len(boxes[0][0])), key=lambda dim: len({start[dim] for start, _ in boxes}), default=None)
    order = sorted(range(len(boxes)), key=lambda i: boxes[i][0][dim] if dim is not None else 0)
    open_boxes: list[int] = []
    for i in order:
        if dim is not None:
            open_boxes = [j for j in open_boxes if boxes[j][0][dim] + boxes[j][1][dim] > boxes[i][0][dim]]
        yield from ((j, i) for j in open_boxes if intersect(boxes[j], boxes[i]) is not None)
        open_boxes.append(i)


def subtract(boxes: Sequence[Box], holes: Sequence[Box]) -> list[Box]:
    """Returns the parts of boxes that other boxes do not cover."""
    shared = [part for hole in holes for box in boxes if (part := intersect(box, hole)) is not None]
    if sum(prod(size) for _, size in shared) == sum(prod(size) for _, size in boxes) and not any(overlapping(shared)):
        return []  # as usual, and much faster
    rest = list(boxes)
    for hole in shared:
        rest = [part for box in rest for part in _subtract_one(box, hole)]
    return rest


def _subtract_one(box: Box, hole: Box) -> Iterator[Box]:
    shared = intersect(box, hole)
    if shared is None:
        yield box
        return
    start, size = list(box[0]), list(box[1])
    for dim, (low, length) in enumerate(zip(*shared, strict=True)):
        for begin, end in ((start[dim], low), (low + length, start[dim] + size[dim])):
            if begin < end:
                yield (*start[:dim], begin, *start[dim + 1 :]), (*size[:dim], end - begin, *size[dim + 1 :])
        start[dim], size[dim] = low, length
