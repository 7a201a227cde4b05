"""Describes what one rank has, or wants, of tensors that ranks divide: boxes, and where each is in a local tensor. Pure."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from epload.core import dtypes as dtype_names
from epload.core.columns import column, expand, numbered, numbered_rows, padded
from epload.core.copy_table import CopyTable
from epload.core.pieces import Kinds
from epload.core.placement import Box, OwnedRegion, intersect, owned_parts, owned_regions, row_major_strides
from epload.core.views import Shape, View
from epload.mapping.place import Place
from epload.model.targets import Targets

NO_PART = -1
"""The class of a tensor of which a rank has nothing."""


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


def parts_of_view(view: View, shape: Shape, owned: Sequence[OwnedRegion], place: int = 0) -> list[Part]:
    """The parts of a tensor that a rank has through a view, if it owns some regions of the view's target.

    Args:
        view: of the tensor, in a target.
        shape: of the tensor.
        owned: regions of the target.
    """
    found = []
    for start, size, local in owned_parts((view.start, view.size), owned):
        steps = sum((a - b) * stride for a, b, stride in zip(start, view.start, view.strides, strict=True))
        found += [part._replace(place=place) for part in _boxes(view.offset + steps, size, view.strides, local, shape)]
    return found


def _boxes(offset: int, size: Shape, strides: Shape, local: Shape, shape: Shape) -> Iterator[Part]:
    """The boxes of a row-major tensor that make up a strided region of it. A dim of the region that runs along no dim of the
    tensor, or past the end of one, is divided."""
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
                yield from _boxes(
                    offset + begin * stride,
                    (*size[:i], length, *size[i + 1 :]),
                    strides,
                    (*local[:i], local[i] + begin, *local[i + 1 :]),
                    shape,
                )
            return
        extent[dim], dims[i] = count, dim
    yield Part(start, tuple(extent), local, tuple(dims))


@dataclass(frozen=True, eq=False)
class Holdings:
    """One rank's parts of all tensors. Thousands of tensors are divided alike, so parts are listed by class."""

    class_of: Tensor
    """int64 [t], the class of each tensor; ``NO_PART`` if the rank has nothing of it."""
    classes: tuple[tuple[Part, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    """Dtype of the local tensors of each class."""
    targets: Sequence[tuple[int, ...]]
    """Local tensors of each tensor, which :attr:`Part.place` counts."""
    mixed: tuple[bool, ...]
    """True for a class whose local tensors have several dtypes; then ``dtypes`` has that of the tensor."""

    @cached_property
    def boxes(self) -> tuple[tuple[Box, ...], ...]:
        """The distinct boxes of each class."""
        return tuple(tuple(dict.fromkeys(part.box for part in parts)) for parts in self.classes)

    @cached_property
    def dims(self) -> int:
        """The most dims of a local tensor, at least 1."""
        return max((len(part.local_start) for part in chain.from_iterable(self.classes)), default=1) or 1

    def summary(self) -> HoldingsSummary:
        return HoldingsSummary(self.class_of, self.boxes, self.dtypes, self.mixed)

    def encode_parts(self) -> bytes:
        """Returns, compressed, what the summary lacks and ranks that copy out of the local tensors need."""
        return zlib.compress(json.dumps([self.classes, self.targets], separators=(",", ":")).encode(), 1)

    @classmethod
    def decode(cls, summary: HoldingsSummary, parts: bytes) -> Holdings:
        """The inverse of :meth:`summary` and :meth:`encode_parts`."""
        classes, targets = json.loads(zlib.decompress(parts))
        of_classes = tuple(
            tuple(
                Part(tuple(start), tuple(size), tuple(local), tuple(dims), place)
                for start, size, local, dims, place in some
            )
            for some in classes
        )
        return cls(summary.class_of, of_classes, summary.dtypes, [tuple(some) for some in targets], summary.mixed)


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
    for summary in {id(each.class_of): each for each in summaries}.values():
        key = numbered(key * (len(summary.boxes) + 1) + summary.class_of - NO_PART)
    return key


def digest_of(content: bytes) -> str:
    """Names a value by its content."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class HoldingsBuilder:
    """Collects the parts of one rank, tensor by tensor."""

    def __init__(self, tensors: int) -> None:
        self._class_of = [NO_PART] * tensors
        self._targets: list[tuple[int, ...]] = [()] * tensors
        self._numbers: dict[object, int] = {}
        self._classes: list[tuple[tuple[Part, ...], torch.dtype, bool]] = []

    def add(
        self,
        tensor: int,
        targets: tuple[int, ...],
        dtype: torch.dtype,
        key: object,
        make_parts: Callable[[], Sequence[Part]],
        mixed: bool = False,
    ) -> None:
        """Adds a tensor.

        Args:
            tensor: its number.
            targets: the local tensors that the parts' ``place`` counts.
            dtype: of the local tensors.
            key: equal for tensors with equal parts, ``dtype`` and ``mixed``.
            make_parts: called for the first tensor with an equal key.
            mixed: whether the local tensors have several dtypes.
        """
        number = self._numbers.get(key)
        if number is None:
            parts = tuple(make_parts())
            number = self._numbers[key] = len(self._classes) if parts else NO_PART
            if parts:
                self._classes.append((parts, dtype, mixed))
        if number != NO_PART:
            self._class_of[tensor], self._targets[tensor] = number, targets

    def build(self) -> Holdings:
        classes, dtypes, mixed = zip(*self._classes, strict=True) if self._classes else ((), (), ())
        return Holdings(column(self._class_of), classes, dtypes, self._targets, mixed)


def holdings_of_targets(
    shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], targets: Targets, placed: Sequence[tuple[Place, ...]]
) -> Holdings:
    """Returns the parts that a rank has of the tensors in a model.

    Args:
        shapes: of the tensors.
        dtypes: of the tensors; the holdings have this one for a tensor with places of several dtypes.
        targets: of the model, as they are on this rank.
        placed: the places of each tensor, as from :func:`epload.mapping.place.place`.
    """
    owned = [owned_regions(layout, at) for layout, at in zip(targets.layouts, targets.coordinates, strict=True)]
    builder = HoldingsBuilder(len(shapes))
    for i, places in enumerate(placed):
        if not places:
            continue
        numbers = tuple([targets.index[name] for name, _ in places])
        dtype = targets.dtypes[numbers[0]]
        if mixed := any(targets.dtypes[number] != dtype for number in numbers):
            dtype = dtypes[i]
        views = [(view, targets.layout[number]) for (_, view), number in zip(places, numbers, strict=True)]

        def make_parts(shape: Shape = shapes[i], views: Sequence[tuple[View, int]] = views) -> list[Part]:
            parts = (parts_of_view(view, shape, owned[layout], at) for at, (view, layout) in enumerate(views))
            return list(chain.from_iterable(parts))

        key = (dtype, mixed, *[(id(view), layout) for view, layout in views])
        builder.add(i, numbers, dtype, key, make_parts, mixed)
    return builder.build()


def full_holdings(shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> Holdings:
    """Returns the holdings of a rank that wants all tensors in full; local tensor i is tensor i."""
    builder = HoldingsBuilder(len(shapes))
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        builder.add(i, (i,), dtype, (shape, dtype), partial(full_parts, shape))
    return builder.build()


def full_parts(shape: Shape) -> list[Part]:
    """Returns the parts of a tensor whose local tensor is all of it."""
    zeros = (0,) * len(shape)
    return [] if 0 in shape else [Part(zeros, shape, zeros, tuple(range(len(shape))))]


def copies_of_box(
    start: Shape,
    size: Shape,
    holdings: Holdings,
    number: int,
    dtype: torch.dtype,
    once: bool,
    whole: Shape | None = None,
    strides: Shape | None = None,
) -> list[tuple[list[int], int]]:
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
    found = []
    for part in holdings.classes[number]:
        if (shared := intersect((start, size), part.box)) is None:
            continue
        local, extent = part.within(*shared)
        steps = sum((a - b) * stride for a, b, stride in zip(shared[0], first, strides, strict=True))
        fill = [0] * (holdings.dims - len(local))
        row = [0, steps * dtype.itemsize, dtype_names.code(dtype), len(local), *local, *fill, *extent, *fill]
        found.append((row + [0 if dim < 0 else strides[dim] for dim in part.dims] + fill, part.place))
        if once and shared == (start, size):
            return found[-1:]
    return found


class CopyTemplates:
    """Copies that are equal for thousands of tensors but for their targets and offsets, each listed once."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._table: list[list[int]] = []
        self._places: list[int] = []
        self._counts: list[int] = []

    def add(self, copies: Sequence[tuple[list[int], int]]) -> int:
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
