"""Symbolic stack, concatenate, split, transpose and reshape: which elements of which tensors make up the result. Pure.

These operations move elements and compute no values. Their result is described by views: boxes of the result, each with the
strided region of a source that fills it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from epload.core.placement import Box, row_major_strides

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

    def within(self, begin: int, end: int) -> list[View]:
        """The parts of the view that elements [begin, end) of the source fill; one view if these elements are a box of it."""
        last = self.offset + sum((n - 1) * stride for n, stride in zip(self.size, self.strides, strict=True))
        if begin <= self.offset and last < end and 0 not in self.size:
            return [self]
        inner_first = sorted((dim for dim, n in enumerate(self.size) if n > 1), key=self.strides.__getitem__)
        return [
            View(
                tuple(map(int.__add__, self.start, start)),
                size,
                self.offset + sum(map(int.__mul__, start, self.strides)),
                self.strides,
            )
            for start, size in _boxes_within(self, inner_first, begin - self.offset, end - self.offset)
        ]

    def replace_dims(self, dims: slice, start: Shape, size: Shape, offset: int, strides: Shape) -> View:
        """A view at another offset, with some of its dims replaced."""
        kept = (self.start, start), (self.size, size), (self.strides, strides)
        starts, sizes, steps = ((*old[: dims.start], *new, *old[dims.stop :]) for old, new in kept)
        return View(starts, sizes, offset, steps)


def _boxes_within(view: View, dims: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Boxes of indices over ``dims`` (innermost first) whose elements lie in [begin, end), relative to the view's offset.

    A stride exceeds the extent of all inner dims together, so a range partly covers only the indices at its two ends.
    """
    extent = sum((view.size[dim] - 1) * view.strides[dim] for dim in dims)
    zeros, whole = (0,) * len(view.size), tuple(n if i in dims else 1 for i, n in enumerate(view.size))
    if end <= 0 or begin > extent or 0 in view.size:
        return
    if begin <= 0 and end > extent:
        yield zeros, whole
        return
    dim, inner = dims[-1], dims[:-1]
    stride, inner_extent = view.strides[dim], extent - (view.size[dim] - 1) * view.strides[dim]
    first = min(max(-(-begin // stride), 0), view.size[dim])
    last = max(min((end - 1 - inner_extent) // stride + 1, view.size[dim]), first)
    partial = {i for i in (first - 1, last, begin // stride, (end - 1) // stride) if 0 <= i < view.size[dim]}
    for index in sorted(i for i in partial if not first <= i < last):
        for start, size in _boxes_within(view, inner, begin - index * stride, end - index * stride):
            yield _set(start, dim, index), size
    if first < last:
        yield _set(zeros, dim, first), _set(whole, dim, last - first)


@dataclass(frozen=True)
class Assembly:
    """A tensor whose every element is an element of some source."""

    shape: Shape
    parts: tuple[tuple[int, View], ...]
    """Pairs of the number of a source and a view of it; the boxes cover the shape exactly once."""

    @staticmethod
    def of(source: int, shape: Shape) -> Assembly:
        """The whole of a source."""
        return Assembly(shape, ((source, View((0,) * len(shape), shape, 0, row_major_strides(shape))),))


def concatenate(assemblies: Sequence[Assembly], dim: int) -> Assembly:
    """Like torch.cat. Raises ValueError if the shapes differ in another dim, or there is nothing to concatenate."""
    if not assemblies:
        raise ValueError("expected at least one tensor to concatenate, got none")
    first = assemblies[0].shape
    dim = normalize_dim(dim, len(first))
    at, parts = 0, []
    for assembly in assemblies:
        shape = assembly.shape
        if len(shape) != len(first) or _set(shape, dim, 0) != _set(first, dim, 0):
            raise ValueError(f"cannot concatenate tensors of shape {list(first)} and {list(shape)} along dim {dim}")
        parts += [
            (source, view._replace(start=_set(view.start, dim, at + view.start[dim])))
            for source, view in assembly.parts
        ]
        at += shape[dim]
    return Assembly(_set(first, dim, at), tuple(parts))


def stack(assemblies: Sequence[Assembly], dim: int) -> Assembly:
    """Like torch.stack. Raises ValueError if the shapes differ, or there is nothing to stack."""
    if not assemblies:
        raise ValueError("expected at least one tensor to stack, got none")
    shape = assemblies[0].shape
    dim = normalize_dim(dim, len(shape) + 1)
    before, after, parts = slice(dim), slice(dim, None), []
    for at, assembly in enumerate(assemblies):
        if assembly.shape != shape:
            raise ValueError(f"cannot stack tensors of shape {list(shape)} and {list(assembly.shape)}")
        for source, (start, size, offset, strides) in assembly.parts:
            step = strides[dim] * shape[dim] if dim < len(shape) else 1  # as a reshape has it
            view = View(
                (*start[before], at, *start[after]), (*size[before], 1, *size[after]), offset,
                (*strides[before], step, *strides[after]),
            )  # fmt: skip
            parts.append((source, view))
    return Assembly((*shape[before], len(assemblies), *shape[after]), tuple(parts))


def split(assembly: Assembly, dim: int, sizes: Sequence[int]) -> list[Assembly]:
    """Like torch.split. Raises ValueError if the sizes do not add up to the length of the dim."""
    dim = normalize_dim(dim, len(assembly.shape))
    if sum(sizes) != assembly.shape[dim]:
        raise ValueError(f"cannot split dim {dim} of shape {list(assembly.shape)} into {list(sizes)}")
    found, at = [], 0
    for size in sizes:
        parts = []
        for source, view in assembly.parts:
            low, high = max(view.start[dim], at), min(view.start[dim] + view.size[dim], at + size)
            if low < high:
                offset = view.offset + (low - view.start[dim]) * view.strides[dim]
                start, length = _set(view.start, dim, low - at), _set(view.size, dim, high - low)
                parts.append((source, View(start, length, offset, view.strides)))
        found.append(Assembly(_set(assembly.shape, dim, size), tuple(parts)))
        at += size
    return found


def unstack(assembly: Assembly, dim: int) -> list[Assembly]:
    """Like torch.unbind."""
    dim = normalize_dim(dim, len(assembly.shape))
    shape = assembly.shape[:dim] + assembly.shape[dim + 1 :]
    return [reshape(one, shape) for one in split(assembly, dim, [1] * assembly.shape[dim])]


def transpose(assembly: Assembly, dim0: int, dim1: int) -> Assembly:
    """Like torch.transpose."""
    order = list(range(len(assembly.shape)))
    dim0, dim1 = normalize_dim(dim0, len(order)), normalize_dim(dim1, len(order))
    order[dim0], order[dim1] = dim1, dim0

    def permute(values: Shape) -> Shape:
        return tuple(values[i] for i in order)

    return Assembly(
        permute(assembly.shape),
        tuple(
            (source, View(permute(v.start), permute(v.size), v.offset, permute(v.strides)))
            for source, v in assembly.parts
        ),
    )


def reshape(assembly: Assembly, shape: Sequence[int]) -> Assembly:
    """Like torch.reshape, -1 included. A box that is not a box in the new shape becomes several.

    Raises:
        ValueError: the number of elements differs.
    """
    old, sizes = assembly.shape, list(shape)
    if sizes.count(-1) == 1 and (rest := -prod(sizes)) and prod(old) % rest == 0:
        sizes[sizes.index(-1)] = prod(old) // rest
    if min(sizes, default=0) < 0 or prod(sizes) != prod(old):
        raise ValueError(f"cannot reshape a tensor of shape {list(old)} to {list(shape)}")
    new = tuple(sizes)
    if new == old:
        return assembly
    if 0 in new:
        return Assembly(new, tuple((source, Assembly.of(source, new).parts[0][1]) for source, _ in assembly.parts))
    # Dims before `dim` are those of the new shape.
    dim = 0
    while dim < len(new) or dim < len(assembly.shape):
        if dim == len(assembly.shape):
            assembly = _split_dim(assembly, dim - 1, assembly.shape[-1], 1) if dim else _unsqueezed(assembly)
        elif dim == len(new):
            assembly = _merge_dims(assembly, dim - 1) if dim else _squeezed(assembly)
            continue
        length = assembly.shape[dim]
        if length == new[dim]:
            dim += 1
        elif length % new[dim] == 0:
            assembly = _split_dim(assembly, dim, new[dim], length // new[dim])
        else:
            assembly = _merge_dims(assembly, dim)
    return assembly


def _unsqueezed(assembly: Assembly) -> Assembly:
    """A 0-d tensor as one of shape [1]."""
    return Assembly((1,), tuple((source, View((0,), (1,), view.offset, (1,))) for source, view in assembly.parts))


def _squeezed(assembly: Assembly) -> Assembly:
    """A tensor of shape [1] as a 0-d one, without empty views: a 0-d view has one element."""
    return Assembly(
        (), tuple((source, View((), (), view.offset, ())) for source, view in assembly.parts if all(view.size))
    )


def _merge_dims(assembly: Assembly, dim: int) -> Assembly:
    """Merges ``dim`` and the next one."""
    shape, inner = assembly.shape, assembly.shape[dim + 1]
    parts = []
    for source, view in assembly.parts:
        (a, b), (n, m), (s, t) = (values[dim : dim + 2] for values in (view.start, view.size, view.strides))
        if n == 1:
            rows = [(a * inner + b, m, t, 0)]
        elif m == inner and (m == 1 or s == t * m):
            rows = [(a * inner, n * m, s if m == 1 else t, 0)]
        else:
            rows = [((a + i) * inner + b, m, t, i * s) for i in range(n)]
        for start, size, stride, skipped in rows:
            merged = view.replace_dims(slice(dim, dim + 2), (start,), (size,), view.offset + skipped, (stride,))
            parts.append((source, merged))
    return Assembly((*shape[:dim], shape[dim] * inner, *shape[dim + 2 :]), tuple(parts))


def _split_dim(assembly: Assembly, dim: int, outer: int, inner: int) -> Assembly:
    """Splits ``dim`` into two of lengths ``outer`` and ``inner``."""
    parts = []
    for source, view in assembly.parts:
        begin, stride = view.start[dim], view.strides[dim]
        end = begin + view.size[dim]
        while begin < end:  # part of the first row, whole rows, part of the last row
            row, at = divmod(begin, inner)
            rows = (end - begin) // inner if at == 0 and end - begin >= inner else 1
            length = inner if rows > 1 else min(inner - at, end - begin)
            offset = view.offset + (begin - view.start[dim]) * stride
            row_view = view.replace_dims(
                slice(dim, dim + 1), (row, at), (rows, length), offset, (stride * inner, stride)
            )
            parts.append((source, row_view))
            begin += rows * length
    return Assembly((*assembly.shape[:dim], outer, inner, *assembly.shape[dim + 1 :]), tuple(parts))


class Loop(NamedTuple):
    """A dim of a strided region that two tensors have in common."""

    size: int
    """Length of the dim; in elements, as are the strides."""
    stride: int
    """Stride in the storage of the first tensor."""
    other: int
    """Stride in the storage of the second tensor."""


def boxes_of_region(
    shape: Shape, strides: Shape, offset: int, loops: Sequence[Loop], other_offset: int = 0
) -> Iterator[View]:
    """The boxes of a tensor that a strided region of its storage covers, with the region of a second tensor that fills each.

    Args:
        shape: of the tensor.
        strides: of the tensor. A stride must exceed the extent of all inner dims together.
        offset: start of the region, relative to the tensor's first element.
        loops: dims of the region, in any order.
        other_offset: start of the region in the second tensor.

    Raises:
        ValueError: the region is not within the tensor, or contains an element twice.
    """
    if 0 in shape or any(loop.size == 0 for loop in loops):
        return
    dims = sorted((dim for dim, n in enumerate(shape) if n > 1), key=strides.__getitem__, reverse=True)
    regions = [(offset, other_offset, _coalesced(loops))]
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
                regions.append((*at, sorted(rest + inner, key=_stride, reverse=True)))
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


def _coalesced(loops: Sequence[Loop]) -> list[Loop]:
    """Sorts loops by descending stride and merges them into as few as possible."""
    merged: list[Loop] = []
    for loop in sorted((loop for loop in loops if loop.size > 1), key=_stride, reverse=True):
        outer = merged[-1] if merged else None
        if outer and (outer.stride, outer.other) == (loop.stride * loop.size, loop.other * loop.size):
            merged[-1] = loop._replace(size=outer.size * loop.size)
        else:
            merged.append(loop)
        if not loop.stride or (outer and outer.stride == loop.stride):
            raise ValueError("the region contains an element twice")
    return merged


def _stride(loop: Loop) -> int:
    return loop.stride


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
    """The dim, counted from the front. Raises ValueError if it is out of range."""
    if not -ndim <= dim < ndim:
        raise ValueError(f"dim {dim} is out of range for a tensor with {ndim} dims")
    return dim % ndim


def _set(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])
