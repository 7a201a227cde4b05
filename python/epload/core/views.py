"""Tensors put together from regions of others, worked out without their data. Pure.

Stacking, concatenating, splitting, transposing and viewing never change a value, they only say where it goes. Each result is
a list of views: a box of the result, and the strided region of a source that fills it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from epload.core.placement import Box, row_major_strides

Shape = tuple[int, ...]


class View(NamedTuple):
    """A box of one tensor, and the strided region of another that fills it: ``to[box] = source.as_strided(size, ...)``."""

    start: Shape
    size: Shape
    """Elements of the box, one entry a dim."""
    offset: int
    """Where the region starts in the source, in elements of its row-major order."""
    strides: Shape
    """Steps in the source for each dim of the box, in elements."""

    def within(self, begin: int, end: int) -> list[View]:
        """The parts of it that elements [begin, end) of the source fill; a box if the range is one in this view."""
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


def _boxes_within(view: View, dims: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Boxes of indices whose elements lie in [begin, end), counted from the view's first; varies ``dims``, innermost first.

    A step along a dim is longer than all inner dims together reach, so only the ends of a range can cut across an index.
    """
    reach = sum((view.size[dim] - 1) * view.strides[dim] for dim in dims)
    nothing, whole = [0] * len(view.size), [n if i in dims else 1 for i, n in enumerate(view.size)]
    if end <= 0 or begin > reach or 0 in view.size:
        return
    if begin <= 0 and end > reach:
        yield tuple(nothing), tuple(whole)
        return
    dim, inner = dims[-1], dims[:-1]
    step, span = view.strides[dim], reach - (view.size[dim] - 1) * view.strides[dim]
    first = min(max(-(-begin // step), 0), view.size[dim])
    last = max(min((end - 1 - span) // step + 1, view.size[dim]), first)
    cut = {i for i in (first - 1, last, begin // step, (end - 1) // step) if 0 <= i < view.size[dim]}
    for index in sorted(cut - set(range(first, last))):
        for start, size in _boxes_within(view, inner, begin - index * step, end - index * step):
            yield (*start[:dim], index, *start[dim + 1 :]), size
    if first < last:
        yield (
            tuple(nothing[:dim] + [first] + nothing[dim + 1 :]),
            tuple(whole[:dim] + [last - first] + whole[dim + 1 :]),
        )


@dataclass(frozen=True)
class Assembly:
    """A tensor of which every element is one element of some source."""

    shape: Shape
    parts: tuple[tuple[int, View], ...]
    """Number of a source, and the view of it; the boxes fill the shape exactly once."""

    @staticmethod
    def of(source: int, shape: Shape) -> Assembly:
        """A source as it is."""
        return Assembly(shape, ((source, View((0,) * len(shape), shape, 0, row_major_strides(shape))),))


def concatenate(assemblies: Sequence[Assembly], dim: int) -> Assembly:
    """As torch.cat. Raises ValueError if the shapes do not go together."""
    first = assemblies[0].shape
    dim = dim_of(dim, len(first))
    at, parts = 0, []
    for assembly in assemblies:
        shape = assembly.shape
        if len(shape) != len(first) or any(
            n != m for i, (n, m) in enumerate(zip(shape, first, strict=True)) if i != dim
        ):
            raise ValueError(f"tensors of shape {list(first)} and {list(shape)} cannot be concatenated along dim {dim}")
        parts += [
            (source, view._replace(start=_set(view.start, dim, at + view.start[dim])))
            for source, view in assembly.parts
        ]
        at += shape[dim]
    return Assembly(_set(first, dim, at), tuple(parts))


def stack(assemblies: Sequence[Assembly], dim: int) -> Assembly:
    """As torch.stack."""
    dim = dim_of(dim, len(assemblies[0].shape) + 1)
    return concatenate(
        [
            Assembly(
                _insert(assembly.shape, dim, 1),
                tuple(
                    (
                        source,
                        View(_insert(v.start, dim, 0), _insert(v.size, dim, 1), v.offset, _insert(v.strides, dim, 1)),
                    )
                    for source, v in assembly.parts
                ),
            )
            for assembly in assemblies
        ],
        dim,
    )


def split(assembly: Assembly, dim: int, sizes: Sequence[int]) -> list[Assembly]:
    """As torch.split. Raises ValueError if the sizes are not those of the dim."""
    dim = dim_of(dim, len(assembly.shape))
    if sum(sizes) != assembly.shape[dim]:
        raise ValueError(f"dim {dim} of shape {list(assembly.shape)} cannot be split into {list(sizes)}")
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
    """As torch.unbind."""
    dim = dim_of(dim, len(assembly.shape))
    shape = assembly.shape[:dim] + assembly.shape[dim + 1 :]
    return [reshape(one, shape) for one in split(assembly, dim, [1] * assembly.shape[dim])]


def transpose(assembly: Assembly, dim0: int, dim1: int) -> Assembly:
    """As torch.transpose."""
    order = list(range(len(assembly.shape)))
    dim0, dim1 = dim_of(dim0, len(order)), dim_of(dim1, len(order))
    order[dim0], order[dim1] = dim1, dim0

    def turned(values: Shape) -> Shape:
        return tuple(values[i] for i in order)

    return Assembly(
        turned(assembly.shape),
        tuple(
            (source, View(turned(v.start), turned(v.size), v.offset, turned(v.strides))) for source, v in assembly.parts
        ),
    )


def reshape(assembly: Assembly, shape: Sequence[int]) -> Assembly:
    """As torch.reshape, -1 included. A box that is none in the new shape becomes several.

    Raises:
        ValueError: the number of elements differs.
    """
    old, wanted = assembly.shape, list(shape)
    if wanted.count(-1) == 1 and (rest := -prod(wanted)) and prod(old) % rest == 0:
        wanted[wanted.index(-1)] = prod(old) // rest
    if min(wanted, default=0) < 0 or prod(wanted) != prod(old):
        raise ValueError(f"a tensor of shape {list(old)} cannot be viewed as {list(shape)}")
    new = tuple(wanted)
    if new == old:
        return assembly
    if 0 in new:
        return Assembly(new, tuple((source, Assembly.of(source, new).parts[0][1]) for source, _ in assembly.parts))
    # The dims from `dim` on are still to be looked at; those before it are as wanted.
    dim = 0
    while dim < len(new) or dim < len(assembly.shape):
        if dim == len(assembly.shape):
            assembly = _split_dim(assembly, dim - 1, assembly.shape[-1], 1) if dim else _unsqueeze(assembly)
        elif dim == len(new):
            assembly = _merge_dims(assembly, dim - 1) if dim else Assembly((), _squeezed(assembly.parts))
            continue
        have = assembly.shape[dim]
        if have == new[dim]:
            dim += 1
        elif have % new[dim] == 0:
            assembly = _split_dim(assembly, dim, new[dim], have // new[dim])
        else:
            assembly = _merge_dims(assembly, dim)
    return assembly


def _unsqueeze(assembly: Assembly) -> Assembly:
    return stack([assembly], 0)


def _squeezed(parts: tuple[tuple[int, View], ...]) -> tuple[tuple[int, View], ...]:
    """Without those that have no elements, as every 0-d view has one."""
    return tuple((source, View((), (), view.offset, ())) for source, view in parts if 0 not in view.size)


def _merge_dims(assembly: Assembly, dim: int) -> Assembly:
    """``dim`` and the one after it become one."""
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
        parts += [
            (
                source,
                View(
                    _join(view.start, dim, start),
                    _join(view.size, dim, size),
                    view.offset + more,
                    _join(view.strides, dim, stride),
                ),
            )
            for start, size, stride, more in rows
        ]
    return Assembly(_join(shape, dim, shape[dim] * inner), tuple(parts))


def _split_dim(assembly: Assembly, dim: int, outer: int, inner: int) -> Assembly:
    """``dim`` becomes two, of lengths ``outer`` and ``inner``."""
    parts = []
    for source, view in assembly.parts:
        begin, stride = view.start[dim], view.strides[dim]
        end = begin + view.size[dim]
        while begin < end:  # at most a piece of the first row, whole rows, and a piece of the last
            row, at = divmod(begin, inner)
            rows = (end - begin) // inner if at == 0 and end - begin >= inner else 1
            length = inner if rows > 1 else min(inner - at, end - begin)
            parts.append(
                (
                    source,
                    View(
                        _part(view.start, dim, row, at),
                        _part(view.size, dim, rows, length),
                        view.offset + (begin - view.start[dim]) * stride,
                        _part(view.strides, dim, stride * inner, stride),
                    ),
                )
            )
            begin += rows * length
    return Assembly(_part(assembly.shape, dim, outer, inner), tuple(parts))


def dim_of(dim: int, ndim: int) -> int:
    """A dim counted from either end, from the front. Raises ValueError if there is none such."""
    if not -ndim <= dim < ndim:
        raise ValueError(f"there is no dim {dim} among {ndim}")
    return dim % ndim


def _set(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])


def _insert(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim:])


def _join(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 2 :])


def _part(values: Shape, dim: int, outer: int, inner: int) -> Shape:
    return (*values[:dim], outer, inner, *values[dim + 1 :])
