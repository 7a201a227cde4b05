"""Tracks which elements of which checkpoint tensors a derived tensor holds. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import NamedTuple

import torch

from epload.core import dtypes
from epload.core.placement import box_slices, intersect, row_major_strides
from epload.core.views import Assembly, Loop, Shape, View, boxes_of_region

MAX_VIEWS = 1 << 14
"""One write of more boxes than this is not worth planning; such tensors are transferred whole."""


class Region(NamedTuple):
    """A strided region of a storage, in elements."""

    size: Shape
    strides: Shape
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Region:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


class NotViews(Exception):
    """Raised if the content of a tensor cannot be expressed in views of checkpoint tensors; the text says why."""


@dataclass(frozen=True)
class Provenance:
    """The origin of the elements of a whole storage, of which tensors are regions."""

    sources: frozenset[int]
    """The checkpoint tensors that it depends on, by number."""
    assembly: Assembly | None
    """Origin of each element, in an index space whose row-major order is that of the storage. None if its elements are not
    elements of checkpoint tensors."""
    exact: bool = True
    """True if its dtype holds every value of the checkpoint tensors' dtypes."""
    reason: str = ""
    """Why there is no assembly."""

    @classmethod
    def of_source(cls, number: int, shape: Shape) -> Provenance:
        return cls(frozenset((number,)), Assembly.of(number, shape))

    @classmethod
    def computed(cls, parents: Sequence[Provenance], reason: str) -> Provenance:
        """The result of anything else than moving elements."""
        reasons = [parent.reason for parent in parents if parent.reason]
        return cls(frozenset().union(*(parent.sources for parent in parents)), None, False, (*reasons, reason)[0])

    def cast(self, source: torch.dtype, target: torch.dtype) -> Provenance:
        """A copy in another dtype. Casts one after the other are one cast only if none but the last rounds, and epload's own
        copies cast between wide floats alone."""
        if self.assembly is None or source == target:
            return self
        lossless = torch.promote_types(source, target) == target
        if not self.exact or not dtypes.converts(source, target):
            text = f"{dtypes.name(source)} to {dtypes.name(target)}"
            return Provenance.computed([self], f"converts {text}{'' if self.exact else ' after another conversion'}")
        return Provenance(self.sources, self.assembly, lossless)

    def copied(self, region: Region, shape: Shape, strides: Shape, into: Region) -> list[tuple[int, View]]:
        """Returns what a copy of a region of this storage to a region of another tensor fills: boxes of that tensor by source.

        Args:
            shape: of the other tensor.
            strides: of the other tensor.
            into: of the same size as ``region``, its offset relative to the other tensor.

        Raises:
            NotViews: it is computed, expanded, or of too many boxes.
            ValueError: ``into`` is not within the other tensor.
        """
        if self.assembly is None:
            raise NotViews(self.reason)
        if not _is_nested(region):
            raise NotViews("an element is used several times")
        found = list(islice(self._views(self.assembly, region, shape, strides, into), MAX_VIEWS + 1))
        if len(found) > MAX_VIEWS:
            raise NotViews(f"more than {MAX_VIEWS} boxes")
        return found

    def _views(
        self, assembly: Assembly, region: Region, shape: Shape, strides: Shape, into: Region
    ) -> Iterator[tuple[int, View]]:
        ((number, first), *others) = assembly.parts or ((-1, View((), (), 0, ())),)
        if not others and first == Assembly.of(number, assembly.shape).parts[0][1]:
            loops = [Loop(*loop) for loop in zip(region.size, into.strides, region.strides, strict=True)]
            for view in boxes_of_region(shape, strides, into.offset, loops, region.offset):
                yield number, view
            return
        loops = [Loop(*loop) for loop in zip(region.size, region.strides, into.strides, strict=True)]
        space = row_major_strides(assembly.shape)
        for piece in boxes_of_region(assembly.shape, space, region.offset, loops, into.offset):
            for number, part in assembly.parts:
                box = intersect((piece.start, piece.size), (part.start, part.size))
                if box is None:
                    continue
                start, size = box
                loops = [Loop(*loop) for loop in zip(size, piece.strides, part.strides, strict=True)]
                at, source_at = (
                    view.offset + sum((a - b) * s for a, b, s in zip(start, view.start, view.strides, strict=True))
                    for view in (piece, part)
                )
                for view in boxes_of_region(shape, strides, at, loops, source_at):
                    yield number, view


def copy_of(parent: Provenance, region: Region, result: Region) -> Provenance:
    """Returns the provenance of a new storage with a copy of a region, whose layout is ``result``."""
    return joined([(parent, region, result)], result)


def joined(copies: Sequence[tuple[Provenance, Region, Region]], result: Region) -> Provenance:
    """Returns the provenance of a new storage that copies of regions of others fill.

    Args:
        copies: of each what is copied, and the region of the new storage that it fills.
        result: the new tensor, which is the whole storage.
    """
    parents = [parent for parent, _, _ in copies]
    order = sorted(range(len(result.size)), key=lambda dim: (-result.strides[dim], dim))
    shape = tuple(result.size[dim] for dim in order)
    inner = row_major_strides(shape)
    if any(n > 1 and result.strides[dim] != stride for dim, n, stride in zip(order, shape, inner, strict=True)):
        return Provenance.computed(parents, "copied to a tensor with gaps")
    try:
        parts = [part for parent, region, into in copies for part in parent.copied(region, shape, inner, into)]
    except NotViews as error:
        return Provenance.computed(parents, str(error))
    sources = frozenset().union(*(parent.sources for parent in parents))
    return Provenance(sources, Assembly(shape, tuple(parts)), all(parent.exact for parent in parents))


def _is_nested(region: Region) -> bool:
    """Returns True if each stride exceeds the extent of all inner dims together, as :meth:`View.within` needs."""
    extent = 0
    for stride, size in sorted((s, n) for n, s in zip(region.size, region.strides, strict=True) if n > 1):
        if stride <= extent:
            return False
        extent += (size - 1) * stride
    return True


def overlapping(boxes: Sequence[tuple[Shape, Shape]]) -> Iterator[tuple[int, int]]:
    """The pairs of boxes (start, size) of one tensor that have elements in common, by index."""
    # By the dim that tells most of them apart, only boxes whose intervals overlap are compared.
    if not boxes:
        return
    ndim = len(boxes[0][0])
    dim = max(range(ndim), key=lambda dim: len({start[dim] for start, _ in boxes}), default=None)
    order = sorted(range(len(boxes)), key=lambda i: boxes[i][0][dim] if dim is not None else 0)
    open_boxes: list[int] = []
    for i in order:
        start, size = boxes[i]
        if dim is not None:
            open_boxes = [j for j in open_boxes if boxes[j][0][dim] + boxes[j][1][dim] > start[dim]]
        yield from ((j, i) for j in open_boxes if intersect(boxes[j], (start, size)) is not None)
        open_boxes.append(i)


def subtract(box: tuple[Shape, Shape], holes: Sequence[tuple[Shape, Shape]]) -> list[tuple[Shape, Shape]]:
    """The box without those parts of it that other boxes cover, as boxes."""
    left = [box]
    for hole in holes:
        left = [part for each in left for part in _minus(each, hole)]
    return left


def uncovered(boxes: Sequence[tuple[Shape, Shape]], holes: Sequence[tuple[Shape, Shape]]) -> list[tuple[Shape, Shape]]:
    """The parts of boxes that others leave; quick where these have no elements in common and leave nothing."""
    shared = [part for hole in holes for box in boxes if (part := intersect(box, hole)) is not None]
    if sum(prod(size) for _, size in shared) == sum(prod(size) for _, size in boxes) and not any(overlapping(shared)):
        return []
    return [part for box in boxes for part in subtract(box, shared)]


def _minus(box: tuple[Shape, Shape], hole: tuple[Shape, Shape]) -> Iterator[tuple[Shape, Shape]]:
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


__all__ = [
    "NotViews",
    "Provenance",
    "Region",
    "box_slices",
    "copy_of",
    "joined",
    "overlapping",
    "subtract",
    "uncovered",
]
