"""Describes what one rank has, or wants, of tensors that two jobs share: boxes, and where each is in a local tensor. Pure."""

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
class Share:
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

    def outline(self) -> Outline:
        """Returns the part of it that other ranks need to know."""
        return Outline(self.class_of, self.boxes, self.dtypes, self.mixed)

    def encode_parts(self) -> bytes:
        """Compressed: what the outline lacks, and those need that copy out of the local tensors."""
        return zlib.compress(json.dumps([self.classes, self.targets], separators=(",", ":")).encode(), 1)

    @classmethod
    def decode(cls, outline: Outline, parts: bytes) -> Share:
        """The inverse of :meth:`outline` and :meth:`encode_parts`."""
        classes, targets = json.loads(zlib.decompress(parts))
        of_classes = tuple(
            tuple(
                Part(tuple(start), tuple(size), tuple(local), tuple(dims), place)
                for start, size, local, dims, place in some
            )
            for some in classes
        )
        return cls(outline.class_of, of_classes, outline.dtypes, [tuple(some) for some in targets], outline.mixed)


@dataclass(frozen=True, eq=False)
class Outline:
    """A share as others see it: without the local tensors."""

    class_of: Tensor
    boxes: tuple[tuple[Box, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    mixed: tuple[bool, ...]

    @cached_property
    def digest(self) -> str:
        """Equal for two outlines only if they are."""
        return digest_of("".join(map(digest_of, self.encode())).encode())

    def encode(self) -> tuple[bytes, bytes]:
        """Compressed: :attr:`class_of`, which is equal on ranks with equal layouts, and the rest."""
        columns = zlib.compress(self.class_of.to(torch.int32).numpy().tobytes(), 1)
        names = [dtype_names.name(dtype) for dtype in self.dtypes]
        rest = json.dumps([self.boxes, names, self.mixed], separators=(",", ":"))
        return columns, zlib.compress(rest.encode(), 1)

    @classmethod
    def decode(cls, columns: bytes, rest: bytes) -> Outline:
        """The inverse of :meth:`encode`."""
        class_of = torch.frombuffer(bytearray(zlib.decompress(columns)), dtype=torch.int32).to(torch.int64)
        boxes, names, mixed = json.loads(zlib.decompress(rest))
        as_boxes = tuple(tuple((tuple(start), tuple(size)) for start, size in of_class) for of_class in boxes)
        return cls(class_of, as_boxes, tuple(map(dtype_names.from_name, names)), tuple(mixed))


def number_alike(kinds: Kinds, outlines: Iterable[Outline]) -> Tensor:
    """Numbers tensors that all ranks divide alike: of one shape and dtype, and in one class of each outline. int64 [t]."""
    key = numbered_rows([kinds.shape_of, kinds.dtype_of])
    for outline in {id(each.class_of): each for each in outlines}.values():
        key = numbered(key * (len(outline.boxes) + 1) + outline.class_of - NO_PART)
    return key


def digest_of(content: bytes) -> str:
    """Names a value by its content."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class ShareBuilder:
    """Collects the parts of one rank, tensor by tensor."""

    def __init__(self, tensors: int) -> None:
        self._class_of = [NO_PART] * tensors
        self._targets: list[tuple[int, ...]] = [()] * tensors
        self._numbers: dict[object, int] = {}
        self._classes: list[tuple[Part, ...]] = []
        self._dtypes: list[torch.dtype] = []
        self._mixed: list[bool] = []

    def add_alike(self, tensor: int, targets: tuple[int, ...], key: object) -> bool:
        """Adds a tensor whose parts and dtype are those that were added with an equal key; False if there are none.

        Args:
            tensor: its number.
            targets: the local tensors that the parts' ``place`` counts.
        """
        number = self._numbers.get(key)
        if number is None:
            return False
        if number != NO_PART:
            self._class_of[tensor], self._targets[tensor] = number, targets
        return True

    def add(
        self,
        tensor: int,
        targets: tuple[int, ...],
        dtype: torch.dtype,
        key: object,
        parts: Sequence[Part],
        mixed: bool = False,
    ) -> None:
        """Adds the first of the tensors with an equal key.

        Args:
            dtype: of the local tensors.
            mixed: whether they have several.
        """
        self._numbers[key] = len(self._classes) if parts else NO_PART
        if parts:
            self._classes.append(tuple(parts))
            self._dtypes.append(dtype)
            self._mixed.append(mixed)
        self.add_alike(tensor, targets, key)

    def build(self) -> Share:
        class_of = torch.tensor(self._class_of, dtype=torch.int64)
        return Share(class_of, tuple(self._classes), tuple(self._dtypes), self._targets, tuple(self._mixed))


def share_of_targets(
    shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], targets: Targets, placed: Sequence[tuple[Place, ...]]
) -> Share:
    """Returns the parts that a rank has of the tensors in a model.

    Args:
        shapes: of the tensors.
        dtypes: of the tensors; of a tensor with places of several dtypes, the share has this one.
        targets: of the model, as they are on this rank.
        placed: the places of each tensor, as from :func:`epload.mapping.place.place`.
    """
    owned = [owned_regions(layout, at) for layout, at in zip(targets.layouts, targets.coordinates, strict=True)]
    builder = ShareBuilder(len(shapes))
    index, layout_of, dtype_of = targets.index, targets.layout, targets.dtypes
    for i, places in enumerate(placed):
        if len(places) == 1:  # as most have, and there are many
            ((name, view),) = places
            number = index[name]
            single = id(view), layout_of[number], dtype_of[number]
            if builder.add_alike(i, (number,), single):
                continue
            builder.add(
                i, (number,), dtype_of[number], single, parts_of_view(view, shapes[i], owned[layout_of[number]])
            )
            continue
        if not places:
            continue
        numbers = tuple([index[name] for name, _ in places])
        dtype = dtype_of[numbers[0]]
        if mixed := any(dtype_of[number] != dtype for number in numbers):
            dtype = dtypes[i]
        views = [(view, layout_of[number]) for (_, view), number in zip(places, numbers, strict=True)]
        key = (dtype, mixed, *[(id(view), layout) for view, layout in views])
        if not builder.add_alike(i, numbers, key):
            parts = [
                part
                for place, (view, layout) in enumerate(views)
                for part in parts_of_view(view, shapes[i], owned[layout], place)
            ]
            builder.add(i, numbers, dtype, key, parts, mixed)
    return builder.build()


def whole_share(shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> Share:
    """The share of a rank that wants all tensors in full; local tensor i is tensor i."""
    builder = ShareBuilder(len(shapes))
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        if not builder.add_alike(i, (i,), (shape, dtype)):
            zeros = (0,) * len(shape)
            parts = [] if 0 in shape else [Part(zeros, shape, zeros, tuple(range(len(shape))))]
            builder.add(i, (i,), dtype, (shape, dtype), parts)
    return builder.build()


def copies_of_box(
    start: Shape,
    size: Shape,
    share: Share,
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
        number: of the tensor's class in the share.
        dtype: of the bucket's elements.
        once: whether one copy of each element is enough, as for a rank that packs them; else all parts have theirs.
        whole: the tensor's shape, if it is the tensor that lies in the bucket.
        strides: of the box in the bucket, in elements, if it is not packed.
    """
    strides = strides if strides is not None else row_major_strides(size if whole is None else whole)
    first = start if whole is None else (0,) * len(whole)
    found = []
    for part in share.classes[number]:
        if (shared := intersect((start, size), part.box)) is None:
            continue
        local, extent = part.within(*shared)
        steps = sum((a - b) * stride for a, b, stride in zip(shared[0], first, strides, strict=True))
        fill = [0] * (share.dims - len(local))
        row = [0, steps * dtype.itemsize, dtype_names.code(dtype), len(local), *local, *fill, *extent, *fill]
        found.append((row + [0 if dim < 0 else strides[dim] for dim in part.dims] + fill, part.place))
        if once and shared == (start, size):
            return found[-1:]
    return found


class CopyTemplates:
    """Copies that are equal for thousands of tensors but for their targets and offsets, each listed once."""

    def __init__(self, share: Share) -> None:
        self._share = share
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
        """Returns the copies of rows, whose targets are the share's local tensors, and the row of each copy.

        Args:
            tensor: int64 [n], the tensor of each row.
            template: int64 [n], the template of each row.
        """
        which, row = expand(column(self._counts), template)
        width = CopyTable.columns(self._share.dims)
        copies = CopyTable(column(list(chain.from_iterable(self._table))).reshape(-1, width)[which])
        copies.target[:] = padded(self._share.targets)[tensor[row], column(self._places)[which]]
        return copies, row
