"""Symbolic stack, concatenate, split, transpose and reshape: which elements of which tensors make up the result. Pure.

These operations move elements and compute no values. Their result is described by views: boxes of the result, each with the
strided region of a source that fills it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import NamedTuple, SupportsIndex

from epload.core.placement import row_major_strides

Shape = tuple[int, ...]


class View(NamedTuple):
    """A box of one tensor, and the strided region of a source that fills it: ``target[box] = source.as_strided(size, ...)``."""

    start: Shape
    size: Shape
    """Length of the box along each dim, in elements."""
    offset: int
    """Start of the region in the source, in elements of its row-major order."""
    strides: Shape
    """Strides in the source for each dim of the box, in elements."""

    @staticmethod
    def whole(shape: Shape) -> View:
        """Returns the view of all elements of a source."""
        return View((0,) * len(shape), shape, 0, row_major_strides(shape))

    @staticmethod
    def of_box(start: Shape, size: Shape, shape: Shape) -> View:
        """Returns the view of a box of a source of this shape that fills a tensor with the box alone."""
        return View.whole(shape).crop(start, size)._replace(start=(0,) * len(size))

    def crop(self, start: Shape, size: Shape) -> View:
        """Returns the part of the view that fills the box of this start and size, which is within the view's box."""
        steps = (map(int.__sub__, start, self.start), self.strides)
        return View(start, size, self.offset + sum(map(int.__mul__, *steps)), self.strides)

    def narrow(self, dim: int, first: int, count: int) -> View:
        """Returns the part of the view with ``count`` indices of a dim, from ``first`` on, counted from the start of the box."""
        return self.crop(with_dim(self.start, dim, self.start[dim] + first), with_dim(self.size, dim, count))

    def within(self, begin: int, end: int) -> list[View]:
        """Returns the parts of the view that elements [begin, end) of the source fill; one view if these are a box of it."""
        extent = sum((n - 1) * stride for n, stride in zip(self.size, self.strides, strict=True))
        begin, end = begin - self.offset, end - self.offset
        if 0 in self.size or end <= 0 or extent < begin:
            return []
        if begin <= 0 and extent < end:
            return [self]
        # A stride exceeds the extent of all inner dims together, so that only the rows at both ends are partly covered.
        dim = max((dim for dim, n in enumerate(self.size) if n > 1), key=self.strides.__getitem__)
        count, stride = self.size[dim], self.strides[dim]
        inner_extent = extent - (count - 1) * stride
        first = max(-(-begin // stride), 0)
        last = min((end - 1 - inner_extent) // stride + 1, count)
        rows = [(first - 1, 1), (first, last - first), (last, 1)] if first <= last else [(last, 1)]
        pieces = [self.narrow(dim, row, n) for row, n in rows if 0 <= row < count and n > 0]
        return [part for piece in pieces for part in piece.within(begin + self.offset, end + self.offset)]


@dataclass(frozen=True)
class Assembly:
    """A tensor whose every element is an element of some source."""

    shape: Shape
    parts: tuple[tuple[int, View], ...]
    """Pairs of the number of a source and a view of it; the boxes cover the shape exactly once."""

    @staticmethod
    def of(source: int, shape: Shape) -> Assembly:
        """Returns the whole of a source."""
        return Assembly(shape, ((source, View.whole(shape)),))


def concatenate(assemblies: Sequence[Assembly], dim: int) -> Assembly:
    """Like torch.cat. Raises ValueError if the shapes differ in another dim, or there is nothing to concatenate."""
    if not assemblies:
        raise ValueError("expected at least one tensor to concatenate, got none")
    first = assemblies[0].shape
    dim = normalize_dim(dim, len(first))
    at, parts = 0, []
    for assembly in assemblies:
        shape = assembly.shape
        if len(shape) != len(first) or with_dim(shape, dim, 0) != with_dim(first, dim, 0):
            raise ValueError(f"cannot concatenate tensors of shape {list(first)} and {list(shape)} along dim {dim}")
        parts += [(i, view._replace(start=with_dim(view.start, dim, at + view.start[dim]))) for i, view in assembly.parts]
        at += shape[dim]
    return Assembly(with_dim(first, dim, at), tuple(parts))


def stack(assemblies: Sequence[Assembly], dim: int) -> Assembly:
    """Like torch.stack. Raises ValueError if the shapes differ, or there is nothing to stack."""
    if not assemblies:
        raise ValueError("expected at least one tensor to stack, got none")
    shape = assemblies[0].shape
    dim = normalize_dim(dim, len(shape) + 1)
    if (other := next((a.shape for a in assemblies if a.shape != shape), None)) is not None:
        raise ValueError(f"cannot stack tensors of shape {list(shape)} and {list(other)}")
    return concatenate([reshape(assembly, (*shape[:dim], 1, *shape[dim:])) for assembly in assemblies], dim)


def split(assembly: Assembly, dim: int, sizes: Sequence[int]) -> list[Assembly]:
    """Like torch.split. Raises ValueError if the sizes do not add up to the length of the dim."""
    dim = normalize_dim(dim, len(assembly.shape))
    if sum(sizes) != assembly.shape[dim]:
        raise ValueError(f"cannot split dim {dim} of shape {list(assembly.shape)} into {list(sizes)}")
    pieces, at = [], 0
    for size in sizes:
        parts = []
        for source, view in assembly.parts:
            start = view.start[dim]
            low, high = max(start, at), min(start + view.size[dim], at + size)
            if low < high:
                piece = view.narrow(dim, low - start, high - low)
                parts.append((source, piece._replace(start=with_dim(view.start, dim, low - at))))
        pieces.append(Assembly(with_dim(assembly.shape, dim, size), tuple(parts)))
        at += size
    return pieces


def unstack(assembly: Assembly, dim: int) -> list[Assembly]:
    """Like torch.unbind."""
    dim = normalize_dim(dim, len(assembly.shape))
    shape = assembly.shape[:dim] + assembly.shape[dim + 1 :]
    return [reshape(piece, shape) for piece in split(assembly, dim, [1] * assembly.shape[dim])]


def transpose(assembly: Assembly, dim0: int, dim1: int) -> Assembly:
    """Like torch.transpose."""
    order = list(range(len(assembly.shape)))
    dim0, dim1 = normalize_dim(dim0, len(order)), normalize_dim(dim1, len(order))
    order[dim0], order[dim1] = dim1, dim0
    return permute(assembly, order)


def permute(assembly: Assembly, dims: Sequence[int]) -> Assembly:
    """Like torch.permute."""

    def ordered(values: Shape) -> Shape:
        return tuple([values[dim] for dim in dims])

    views = [(i, View(ordered(v.start), ordered(v.size), v.offset, ordered(v.strides))) for i, v in assembly.parts]
    return Assembly(ordered(assembly.shape), tuple(views))


def reshape(assembly: Assembly, shape: Sequence[int]) -> Assembly:
    """Like torch.reshape, -1 included. A box that is not a box in the new shape becomes several.

    Raises ValueError: the number of elements differs."""
    old, sizes = assembly.shape, list(shape)
    if sizes.count(-1) == 1 and (rest := -prod(sizes)) and prod(old) % rest == 0:
        sizes[sizes.index(-1)] = prod(old) // rest
    if min(sizes, default=0) < 0 or prod(sizes) != prod(old):
        raise ValueError(f"cannot reshape a tensor of shape {list(old)} to {list(shape)}")
    new = tuple(sizes)
    if new == old:
        return assembly
    if 0 in new:
        return Assembly(new, tuple((source, View.whole(new)) for source, _ in assembly.parts))
    strides, new_strides = row_major_strides(old), row_major_strides(new)
    parts = []
    for source, view in assembly.parts:
        # A box is a strided region of the whole tensor in row-major order, whatever its shape.
        loops = [Loop(*dim) for dim in zip(view.size, strides, view.strides, strict=True)]
        begin = sum(map(int.__mul__, view.start, strides))
        parts += [(source, box) for box in boxes_of_region(new, new_strides, begin, loops, view.offset)]
    return Assembly(new, tuple(parts))


class Loop(NamedTuple):
    """A dim of a strided region that two tensors have in common."""

    size: int
    """Length of the dim; in elements, as are the strides."""
    stride: int
    """Stride in the storage of the first tensor."""
    other: int
    """Stride in the storage of the second tensor."""


def boxes_of_region(shape: Shape, strides: Shape, offset: int, loops: Sequence[Loop], other_offset: int = 0) -> Iterator[View]:
    """The boxes of a tensor that a strided region of its storage covers, with the region of a second tensor that fills each.

    Args:
        shape: of the tensor.
        strides: of the tensor. A stride must exceed the extent of all inner dims together.
        offset: start of the region, relative to the tensor's first element.
        loops: dims of the region, in any order.
        other_offset: start of the region in the second tensor.

    Raises ValueError: the region is not within the tensor, or contains an element twice."""
    if 0 in shape or any(loop.size == 0 for loop in loops):
        return
    dims = sorted((dim for dim, n in enumerate(shape) if n > 1), key=strides.__getitem__, reverse=True)
    regions = [(offset, other_offset, coalesced(loops))]
    while regions:
        offset, other_offset, loops = regions.pop()
        start = _position(shape, strides, dims, offset)
        loop_of: dict[int, Loop] = {}
        for i, loop in enumerate(loops):
            dim = next((dim for dim in dims if strides[dim] <= loop.stride), None)
            if dim is None or dim in loop_of:
                raise ValueError("the region contains an element twice, or is outside of the tensor")
            if strides[dim] == loop.stride and start[dim] + loop.size <= shape[dim]:
                loop_of[dim] = loop
                continue
            rest = loops[:i] + loops[i + 1 :]
            for first, inner in _parts(loop, shape[dim], start[dim], strides[dim]):
                at = offset + first * loop.stride, other_offset + first * loop.other
                inner = [part for part in inner if part.size > 1]
                regions.append((*at, sorted(rest + inner, key=attrgetter("stride"), reverse=True)))
            break
        else:
            yield _box(start, loop_of, other_offset)


def _parts(loop: Loop, length: int, start: int, stride: int) -> Iterator[tuple[int, list[Loop]]]:
    """Divides a loop that is not within a dim of this length and stride: where each part starts in the loop, and its loops."""
    if loop.stride != stride:
        yield from ((i, []) for i in range(loop.size))
    elif start:
        yield 0, [Loop(length - start, loop.stride, loop.other)]
        yield length - start, [loop._replace(size=loop.size - (length - start))]
    else:
        rows, rest = divmod(loop.size, length)
        yield 0, [Loop(rows, loop.stride * length, loop.other * length), loop._replace(size=length)]
        if rest:
            yield rows * length, [loop._replace(size=rest)]


def coalesced(loops: Sequence[Loop]) -> list[Loop]:
    """Sorts loops by descending stride and merges them into as few as possible."""
    merged: list[Loop] = []
    for loop in sorted((loop for loop in loops if loop.size > 1), key=attrgetter("stride"), reverse=True):
        outer = merged[-1] if merged else None
        if outer and (outer.stride, outer.other) == (loop.stride * loop.size, loop.other * loop.size):
            merged[-1] = loop._replace(size=outer.size * loop.size)
        else:
            merged.append(loop)
        if not loop.stride or (outer and outer.stride == loop.stride):
            raise ValueError("the region contains an element twice")
    return merged


def _position(shape: Shape, strides: Shape, dims: Sequence[int], offset: int) -> list[int]:
    """The index of the element at an offset. ``dims`` are those longer than 1, by descending stride."""
    index = [0] * len(shape)
    rest = offset
    for dim in dims:
        index[dim], rest = divmod(rest, strides[dim])
    if rest or any(not 0 <= i < n for i, n in zip(index, shape, strict=True)):
        raise ValueError(f"offset {offset} is outside of a tensor of shape {list(shape)} and strides {list(strides)}")
    return index


def _box(start: Sequence[int], loop_of: dict[int, Loop], offset: int) -> View:
    size, strides = [1] * len(start), [0] * len(start)
    inner = 1
    for dim in reversed(range(len(start))):
        if (loop := loop_of.get(dim)) is not None:
            size[dim], strides[dim] = loop.size, loop.other
        else:
            strides[dim] = inner
        inner = size[dim] * strides[dim]
    return View(tuple(start), tuple(size), offset, tuple(strides))


def normalize_dim(dim: int, ndim: int) -> int:
    """The dim, counted from the front. Raises ValueError if it is no int or out of range."""
    if not isinstance(dim, SupportsIndex):
        raise ValueError(f"expected a dim that is an int, got {dim!r}")
    if not -ndim <= dim < ndim:
        raise ValueError(f"dim {dim} is out of range for a tensor with {ndim} dims")
    return dim % ndim


def with_dim(values: Shape, dim: int, value: int) -> Shape:
    """Returns the values with another one for this dim."""
    return (*values[:dim], value, *values[dim + 1 :])
