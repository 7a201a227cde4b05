"""Describes what one rank has, or wants, of tensors that ranks divide: regions, and where each is in a local tensor. Pure."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from epload.core import dtypes as dtype_names
from epload.core.columns import column, expand, numbered, numbered_rows, padded
from epload.core.copy_table import CopyTable
from epload.core.pieces import Kinds
from epload.core.placement import Box, OwnedRegion, intersect, owned_parts, owned_regions, row_major_strides
from epload.core.views import Assembly, Shape, View
from epload.mapping.place import Place
from epload.model.targets import Targets

NO_PART = -1
"""The class of a tensor of which a rank has nothing."""
LocalView = tuple[int, View]
"""A box of a local tensor with the region of a tensor that has the same elements. The number counts the
tensor's local tensors."""


Copy = tuple[list[int], int]
"""A row of a copy table, and the number of its target among the tensor's local tensors."""


class Share(NamedTuple):
    """Describes what a rank has of a tensor. Thousands of tensors are divided in the same way, so shares are listed by class."""

    shape: Shape
    """Shape of the tensor."""
    views: tuple[LocalView, ...]
    dtype: torch.dtype
    """Dtype of the local tensors or, if they have several, of the tensor."""
    mixed: bool = False
    """True if the local tensors have several dtypes."""


class Part(NamedTuple):
    """A box of a tensor, and the box of a local tensor that has the same elements."""

    start: Shape
    """Start in the tensor, in elements."""
    size: Shape
    local_start: Shape
    """Start in the local tensor, in elements."""
    dims: tuple[int, ...]
    """Dim of the tensor along which each dim of the local tensor runs; -1 if the box has length 1 in it."""
    place: int = 0
    """Index of the local tensor among the tensor's targets."""

    @property
    def box(self) -> Box:
        return self.start, self.size

    def within(self, start: Shape, size: Shape) -> tuple[Shape, Shape]:
        """Start and size in the local tensor of a box of the tensor that lies in the part."""
        local_start = tuple(
            at if dim < 0 else at + start[dim] - self.start[dim]
            for at, dim in zip(self.local_start, self.dims, strict=True)
        )
        return local_start, tuple(1 if dim < 0 else size[dim] for dim in self.dims)


def local_views(view: View, owned: Sequence[OwnedRegion], place: int = 0) -> list[LocalView]:
    """Returns what a rank has of a tensor if it owns some regions of the target of a view."""
    views = []
    for start, size, local in owned_parts((view.start, view.size), owned):
        steps = sum((a - b) * stride for a, b, stride in zip(start, view.start, view.strides, strict=True))
        views.append((place, View(local, size, view.offset + steps, view.strides)))
    return views


def _boxes(view: View, shape: Shape, place: int) -> Iterator[Part]:
    """The boxes of a row-major tensor that make up a strided region of it. A dim of the region that runs along no dim of the
    tensor, or past the end of one, is divided."""
    local, size, offset, strides = view
    if 0 in size:
        return
    rows = row_major_strides(shape)
    start = tuple(offset // row % length for row, length in zip(rows, shape, strict=True))
    extent, dims = [1] * len(shape), [-1] * len(size)
    for i, (count, stride) in enumerate(zip(size, strides, strict=True)):
        if count == 1:
            continue
        dim = next((d for d, row in enumerate(rows) if row == stride and shape[d] > 1), None)
        room = 0 if dim is None else shape[dim] - start[dim]
        if dim is None or room < count:
            first = max(room, 1)
            for begin, length in ((0, first), (first, count - first)):
                some = View(
                    (*local[:i], local[i] + begin, *local[i + 1 :]),
                    (*size[:i], length, *size[i + 1 :]),
                    offset + begin * stride,
                    strides,
                )
                yield from _boxes(some, shape, place)
            return
        extent[dim], dims[i] = count, dim
    yield Part(start, tuple(extent), local, tuple(dims), place)


@dataclass(frozen=True, eq=False)
class Holdings:
    """Describes what one rank has of all tensors."""

    class_of: Tensor
    """int64 [t], the class of each tensor; ``NO_PART`` if the rank has nothing of it."""
    classes: tuple[Share, ...]
    targets: Sequence[tuple[int, ...]]
    """Local tensors of each tensor."""

    @cached_property
    def parts(self) -> tuple[tuple[Part, ...], ...]:
        """The boxes of each class."""
        return tuple(
            tuple(part for place, view in share.views for part in _boxes(view, share.shape, place))
            for share in self.classes
        )

    @cached_property
    def dims(self) -> int:
        """The most dims of a local tensor, at least 1."""
        return max((len(view.size) for share in self.classes for _, view in share.views), default=1) or 1

    def summary(self) -> HoldingsSummary:
        boxes = tuple(tuple(dict.fromkeys(part.box for part in parts)) for parts in self.parts)
        return HoldingsSummary(
            self.class_of,
            boxes,
            tuple(share.dtype for share in self.classes),
            tuple(share.mixed for share in self.classes),
        )

    def encode_parts(self) -> bytes:
        """Returns, compressed, what the summary lacks and ranks that copy out of the local tensors need."""
        shares = [(share.shape, share.views) for share in self.classes]
        return zlib.compress(json.dumps([shares, self.targets], separators=(",", ":")).encode(), 1)

    @classmethod
    def decode(cls, summary: HoldingsSummary, parts: bytes) -> Holdings:
        """The inverse of :meth:`summary` and :meth:`encode_parts`."""
        shares, targets = json.loads(zlib.decompress(parts))
        classes = tuple(
            Share(tuple(shape), tuple((place, _view(*fields)) for place, fields in views), dtype, mixed)
            for (shape, views), dtype, mixed in zip(shares, summary.dtypes, summary.mixed, strict=True)
        )
        return cls(summary.class_of, classes, [tuple(some) for some in targets])


def _view(start: Sequence[int], size: Sequence[int], offset: int, strides: Sequence[int]) -> View:
    return View(tuple(start), tuple(size), offset, tuple(strides))


@dataclass(frozen=True, eq=False)
class HoldingsSummary:
    """Holdings as other ranks see them: without the local tensors."""

    class_of: Tensor
    boxes: tuple[tuple[Box, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    mixed: tuple[bool, ...]

    @cached_property
    def digest(self) -> str:
        """Digest that is equal for equal summaries only."""
        return digest_of("".join(map(digest_of, self.encode())).encode())

    def encode(self) -> tuple[bytes, bytes]:
        """Returns, compressed, :attr:`class_of`, which is equal on ranks with equal layouts, and the rest."""
        columns = zlib.compress(self.class_of.to(torch.int32).numpy().tobytes(), 1)
        names = [dtype_names.name(dtype) for dtype in self.dtypes]
        rest = json.dumps([self.boxes, names, self.mixed], separators=(",", ":"))
        return columns, zlib.compress(rest.encode(), 1)

    @classmethod
    def decode(cls, columns: bytes, rest: bytes) -> HoldingsSummary:
        """The inverse of :meth:`encode`."""
        class_of = torch.frombuffer(bytearray(zlib.decompress(columns)), dtype=torch.int32).to(torch.int64)
        boxes, names, mixed = json.loads(zlib.decompress(rest))
        as_boxes = tuple(tuple((tuple(start), tuple(size)) for start, size in some) for some in boxes)
        return cls(class_of, as_boxes, tuple(map(dtype_names.from_name, names)), tuple(mixed))


def number_alike(kinds: Kinds, summaries: Iterable[HoldingsSummary]) -> Tensor:
    """Numbers tensors that all ranks divide alike: of one shape and dtype, and in one class of each summary. int64 [t]."""
    key = numbered_rows([kinds.shape_of, kinds.dtype_of])
    for summary in {id(summary.class_of): summary for summary in summaries}.values():
        key = numbered(key * (len(summary.boxes) + 1) + summary.class_of - NO_PART)
    return key


def digest_of(content: bytes) -> str:
    """Names a value by its content."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def holdings_of_targets(
    shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], targets: Targets, placed: Sequence[tuple[Place, ...]]
) -> Holdings:
    """Returns what a rank has of some tensors in a model.

    Args:
        shapes, dtypes: of the tensors.
        targets: of the model, as they are on this rank.
        placed: the places of each tensor, as from :func:`epload.mapping.place.place`.
    """
    owned = [owned_regions(layout, at) for layout, at in zip(targets.layouts, targets.coordinates, strict=True)]
    index, layout_of, dtype_of = targets.index, targets.layout, targets.dtypes
    classes: dict[object, tuple[int, Share]] = {}
    class_of, local = [NO_PART] * len(shapes), [tuple[int, ...]()] * len(shapes)
    for i, places in enumerate(placed):
        numbers = tuple([index[name] for name, _ in places])
        # Equal views of different tensors are mostly one object.
        key = (
            shapes[i],
            dtypes[i],
            *[(id(view), layout_of[index[name]], dtype_of[index[name]]) for name, view in places],
        )
        if key not in classes:
            distinct = {dtype_of[number] for number in numbers}
            dtype = distinct.pop() if len(distinct) == 1 else dtypes[i]
            views = (local_views(view, owned[layout_of[index[name]]], at) for at, (name, view) in enumerate(places))
            share = Share(shapes[i], tuple(chain.from_iterable(views)), dtype, len(distinct) > 0)
            classes[key] = (len(classes), share) if share.views else (NO_PART, share)
        class_of[i], local[i] = classes[key][0], numbers
    return Holdings(column(class_of), tuple(share for _, share in classes.values()), local)


def full_holdings(shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> Holdings:
    """Returns the holdings of a rank that wants all tensors in full; local tensor i is tensor i."""
    kinds = dict.fromkeys(zip(shapes, dtypes, strict=True))
    numbers = {(shape, dtype): i if 0 not in shape else NO_PART for i, (shape, dtype) in enumerate(kinds)}
    shares = [Share(shape, ((0, Assembly.of(0, shape).parts[0][1]),), dtype) for shape, dtype in kinds]
    class_of = [numbers[kind] for kind in zip(shapes, dtypes, strict=True)]
    return Holdings(column(class_of), tuple(shares), [(i,) for i in range(len(shapes))])


def copies_of_range(holdings: Holdings, number: int, dtype: torch.dtype, begin: int, nbytes: int) -> list[Copy]:
    """Copy-table rows between some bytes of a tensor, which lie at offset 0 of a bucket, and what a rank has of them, each with
    the number of the local tensor.

    Args:
        number: of the tensor's class in the holdings.
        dtype: of the tensor.
        begin: where the bytes start in the tensor.
    """
    first, last = begin // dtype.itemsize, (begin + nbytes) // dtype.itemsize
    copies: list[Copy] = []
    if number == NO_PART:
        return copies
    for place, whole in holdings.classes[number].views:
        for view in whole.within(first, last):
            fill = [0] * (holdings.dims - len(view.size))
            row = [0, (view.offset - first) * dtype.itemsize, dtype_names.code(dtype), len(view.size)]
            copies.append(([*row, *view.start, *fill, *view.size, *fill, *view.strides, *fill], place))
    return copies


def copies_of_box(
    start: Shape,
    size: Shape,
    holdings: Holdings,
    number: int,
    dtype: torch.dtype,
    once: bool,
    whole: Shape | None = None,
    strides: Shape | None = None,
) -> list[Copy]:
    """Copy-table rows between a box of a tensor and a rank's parts of the tensor, each with the part's place. The box is packed,
    at offset 0 of a bucket, or lies in the whole tensor, which does.

    Args:
        start, size: of the box.
        number: of the tensor's class in the holdings.
        dtype: of the bucket's elements.
        once: whether one copy of each element is enough, as for a rank that packs them; else all parts have theirs.
        whole: the tensor's shape, if it is the tensor that lies in the bucket.
        strides: of the box in the bucket, in elements, if it is not packed.
    """
    strides = strides if strides is not None else row_major_strides(size if whole is None else whole)
    first = start if whole is None else (0,) * len(whole)
    copies = []
    for part in holdings.parts[number]:
        if (shared := intersect((start, size), part.box)) is None:
            continue
        local, extent = part.within(*shared)
        steps = sum((a - b) * stride for a, b, stride in zip(shared[0], first, strides, strict=True))
        fill = [0] * (holdings.dims - len(local))
        row = [0, steps * dtype.itemsize, dtype_names.code(dtype), len(local), *local, *fill, *extent, *fill]
        copies.append((row + [0 if dim < 0 else strides[dim] for dim in part.dims] + fill, part.place))
        if once and shared == (start, size):
            return copies[-1:]
    return copies


class CopyTemplates:
    """Copies that are equal for thousands of tensors but for their targets and offsets, each listed once."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._table: list[list[int]] = []
        self._places: list[int] = []
        self._counts: list[int] = []

    def add(self, copies: Sequence[Copy]) -> int:
        """Adds a template, the result of :func:`copies_of_box`, and returns its number."""
        self._table += [row for row, _ in copies]
        self._places += [place for _, place in copies]
        self._counts.append(len(copies))
        return len(self._counts) - 1

    def expand(self, tensor: Tensor, template: Tensor) -> tuple[CopyTable, Tensor]:
        """Returns the copies of rows, whose targets are the holdings' local tensors, and the row of each copy.

        Args:
            tensor: int64 [n], the tensor of each row.
            template: int64 [n], the template of each row.
        """
        which, row = expand(column(self._counts), template)
        width = CopyTable.columns(self._holdings.dims)
        copies = CopyTable(column(list(chain.from_iterable(self._table))).reshape(-1, width)[which])
        copies.target[:] = padded(self._holdings.targets)[tensor[row], column(self._places)[which]]
        return copies, row
