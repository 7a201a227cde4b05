"""Describes what one rank has, or wants, of tensors that ranks divide: regions, and where each is in a local tensor. Pure."""

from __future__ import annotations

import hashlib
import json
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from epload.core import dtypes as dtype_names
from epload.core.columns import column, expand, numbered, to_raw
from epload.core.copy_table import Copy, CopyTable, copy_row
from epload.core.pieces import Metadata
from epload.core.placement import Box, OwnedRegion, intersect, owned_parts, owned_regions, row_major_strides
from epload.core.views import Shape, View
from epload.mapping.place import Place
from epload.model.targets import Targets

_FEW_PARTS = 16
"""Parts of a class that are all looked at for each box."""
NO_PART = -1
"""The class of a tensor of which a rank has nothing."""
LocalView = tuple[int, View]
"""A box of one of a tensor's local tensors, by number, with the region of the tensor that has the same elements."""
Parts = tuple[Shape, Sequence[LocalView], set[torch.dtype | None]]
"""Shape of a tensor, the views that a rank has of it, and the dtypes of its local tensors."""


class Share(NamedTuple):
    """Describes what a rank has of a tensor. Thousands of tensors are divided in the same way, so shares are listed by class."""

    shape: Shape
    """Shape of the tensor."""
    views: tuple[LocalView, ...]
    dtype: torch.dtype | None
    """Dtype of the local tensors; None if they have several."""


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
            at if dim < 0 else at + start[dim] - self.start[dim] for at, dim in zip(self.local_start, self.dims, strict=True)
        )
        return local_start, tuple(1 if dim < 0 else size[dim] for dim in self.dims)


def local_views(view: View, owned: Sequence[OwnedRegion], place: int = 0) -> list[LocalView]:
    """Returns what a rank has of a tensor if it owns some regions of the target of a view."""
    parts = owned_parts((view.start, view.size), owned)
    return [(place, view.crop(start, size)._replace(start=local)) for start, size, local in parts]


def parts_of_view(view: View, shape: Shape, place: int) -> Iterator[Part]:
    """Yields the boxes of a row-major tensor that make up a strided region of it. A dim of the region that runs along no dim of
    the tensor, or past the end of one, is divided."""
    if 0 in view.size:
        return
    rows, regions = row_major_strides(shape), [view]
    while regions:
        view = regions.pop()
        start = tuple(view.offset // row % length for row, length in zip(rows, shape, strict=True))
        extent, dims = [1] * len(shape), [-1] * len(view.size)
        for i, (count, stride) in enumerate(zip(view.size, view.strides, strict=True)):
            if count == 1:
                continue
            dim = next((d for d, row in enumerate(rows) if row == stride and shape[d] > 1), -1)
            room = 1 if dim < 0 else shape[dim] - start[dim]
            if room < count:
                regions += view.narrow(i, room, count - room), view.narrow(i, 0, room)
                break
            extent[dim], dims[i] = count, dim
        else:
            yield Part(start, tuple(extent), view.start, tuple(dims), place)


@dataclass(frozen=True, eq=False)
class Holdings:
    """Describes what one rank has of all tensors."""

    class_of: Tensor
    """int64 [t], the class of each tensor; ``NO_PART`` if the rank has nothing of it."""
    classes: tuple[Share, ...]
    targets: Sequence[tuple[int, ...]] = ()
    """Local tensors of each tensor. Empty for another rank's holdings where only the regions count."""

    @cached_property
    def parts(self) -> tuple[tuple[Part, ...], ...]:
        """The boxes of each class, with the local tensors."""
        return tuple(
            tuple(part for place, view in share.views for part in parts_of_view(view, share.shape, place))
            for share in self.classes
        )

    @cached_property
    def boxes(self) -> tuple[tuple[Box, ...], ...]:
        """The distinct boxes of each class."""
        return tuple(tuple(dict.fromkeys(part.box for part in parts)) for parts in self.parts)

    @cached_property
    def part_of_box(self) -> tuple[dict[Box, Part], ...]:
        """The first part of each class that is a box. There are thousands where a tensor's rows are strewn over local ones."""
        return tuple({part.box: part for part in reversed(parts)} for parts in self.parts)

    @cached_property
    def _along(self) -> dict[int, tuple[int, list[int], list[int], int]]:
        """The dim of each class of many parts along which most begin apart, where they begin there and their numbers, both in
        that order, and the size of the longest."""
        index = {}
        for number, parts in enumerate(self.parts):
            if len(parts) > _FEW_PARTS and parts[0].box[0]:
                starts = list(zip(*(part.box[0] for part in parts), strict=True))
                dim = max(range(len(starts)), key=lambda dim: len({*starts[dim]}))
                order = sorted(range(len(parts)), key=starts[dim].__getitem__)
                index[number] = dim, [starts[dim][i] for i in order], order, max(part.box[1][dim] for part in parts)
        return index

    def parts_near(self, number: int, box: Box) -> Iterable[Part]:
        """Returns the parts of a class that may have elements in a box, in their order: of thousands, as where rows are strewn,
        not all are looked at for each box."""
        parts = self.parts[number]
        if number not in self._along:
            return parts
        dim, starts, order, longest = self._along[number]
        begin, end = box[0][dim], box[0][dim] + box[1][dim]
        return [parts[i] for i in sorted(order[bisect_right(starts, begin - longest) : bisect_left(starts, end)])]

    @cached_property
    def dims(self) -> int:
        """The most dims of a local tensor, at least 1."""
        return max((len(view.size) for share in self.classes for _, view in share.views), default=1) or 1

    def elements_of_targets(self, count: int) -> Tensor:
        """Returns the number of elements that tensors have in each local tensor. An element that two tensors have counts twice.

        Args:
            count: local tensors.
        """
        of_class = [[(part.place, prod(part.size)) for part in parts] for parts in self.parts]
        elements = [0] * count
        for number, targets in zip(self.class_of.tolist(), self.targets, strict=True):
            for place, size in of_class[number] if number != NO_PART else ():
                elements[targets[place]] += size
        return column(elements)

    @cached_property
    def digest(self) -> str:
        """Digest that is equal for equal holdings only, whatever zlib a process has."""
        return digest_of("".join(map(digest_of, (*self._to_raw(), _to_json(self.targets)))).encode())

    def encode(self) -> tuple[bytes, bytes]:
        """Returns, compressed, :attr:`class_of`, which is equal on ranks with equal layouts, and :attr:`classes`."""
        columns, classes = self._to_raw()
        return zlib.compress(columns, 1), zlib.compress(classes, 1)

    def _to_raw(self) -> tuple[bytes, bytes]:
        shares = [(shape, views, dtype and dtype_names.name(dtype)) for shape, views, dtype in self.classes]
        return to_raw(self.class_of.to(torch.int32)), _to_json(shares)

    def encode_targets(self) -> bytes:
        """Returns, compressed, :attr:`targets`, which ranks that copy out of the local tensors need."""
        return zlib.compress(_to_json(self.targets), 1)

    @classmethod
    def decode(cls, columns: bytes, classes: bytes) -> Holdings:
        """The inverse of :meth:`encode`: holdings without targets."""
        class_of = torch.frombuffer(bytearray(zlib.decompress(columns)), dtype=torch.int32).to(torch.int64)
        shares = []
        for shape, views, dtype in json.loads(zlib.decompress(classes)):
            as_views = tuple((place, View(tuple(a), tuple(b), at, tuple(c))) for place, (a, b, at, c) in views)
            shares.append(Share(tuple(shape), as_views, dtype and dtype_names.from_name(dtype)))
        return cls(class_of, tuple(shares))

    def with_targets(self, targets: bytes) -> Holdings:
        """Returns the same with targets that :meth:`encode_targets` has encoded."""
        return replace(self, targets=[tuple(some) for some in json.loads(zlib.decompress(targets))])


def _to_json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def number_alike(manifest: Metadata, of_ranks: Iterable[Holdings]) -> Tensor:
    """Numbers tensors that all ranks divide alike: of one shape and dtype, and in one class of each rank. int64 [t]."""
    _, key = manifest.kinds
    for holdings in {id(holdings.class_of): holdings for holdings in of_ranks}.values():
        key = numbered(key * (len(holdings.classes) + 1) + holdings.class_of - NO_PART)
    return key


def digest_of(content: bytes) -> str:
    """Names a value by its content."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def holdings_of_targets(shapes: Sequence[Shape], targets: Targets, placed: Sequence[tuple[Place, ...]]) -> Holdings:
    """Returns what a rank has of some tensors in a model.

    Args:
        shapes: of the tensors.
        targets: of the model, as they are on this rank.
        placed: the places of each tensor, as from :func:`epload.mapping.place.place`.
    """
    owned = list(map(owned_regions, targets.layouts, targets.coordinates))
    index, layout_of, dtype_of = targets.index, targets.layout, targets.dtypes
    local = [tuple([index[name] for name, _ in places]) for places in placed]
    # Equal views of different tensors are mostly one object.
    keys = (
        (shape, *[(id(place[1]), layout_of[i], dtype_of[i]) for i, place in zip(own, places, strict=True)])
        for shape, own, places in zip(shapes, local, placed, strict=True)
    )

    def parts_of(tensor: int) -> Parts:
        views = [
            view
            for position, (i, (_, whole)) in enumerate(zip(local[tensor], placed[tensor], strict=True))
            for view in local_views(whole, owned[layout_of[i]], position)
        ]
        return shapes[tensor], views, {dtype_of[i] for i in local[tensor]}

    return classify(keys, parts_of, local)


def full_holdings(shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> Holdings:
    """Returns the holdings of a rank that wants all tensors in full; local tensor i is tensor i."""

    def parts_of(tensor: int) -> Parts:
        shape = shapes[tensor]
        return shape, [] if 0 in shape else [(0, View.whole(shape))], {dtypes[tensor]}

    return classify(zip(shapes, dtypes, strict=True), parts_of, [(i,) for i in range(len(shapes))])


def combine(first: Holdings, second: Holdings, count: int) -> Holdings:
    """Returns the holdings of a rank that has both of two holdings of the same tensors. ``count``: local tensors of the first,
    before those of the second."""
    keys = list(zip(first.class_of.tolist(), second.class_of.tolist(), map(len, first.targets), strict=True))

    def parts_of(tensor: int) -> Parts:
        a, b, places = keys[tensor]
        shares = [(0, first.classes[a])] if a != NO_PART else []
        shares += [(places, second.classes[b])] if b != NO_PART else []
        views = [(begin + place, view) for begin, share in shares for place, view in share.views]
        return shares[0][1].shape if shares else (), views, {share.dtype for _, share in shares}

    pairs = zip(first.targets, second.targets, strict=True)
    return classify(keys, parts_of, [(*before, *(count + number for number in after)) for before, after in pairs])


def classify(keys: Iterable[Hashable], parts_of: Callable[[int], Parts], targets: Sequence[tuple[int, ...]]) -> Holdings:
    """Returns holdings of tensors by their numbers; those with equal keys are one class. ``targets``: see :class:`Holdings`."""
    numbers: dict[Hashable, int] = {}
    class_of, classes = list[int](), list[Share]()
    for tensor, key in enumerate(keys):
        if (number := numbers.get(key)) is None:
            shape, views, dtypes = parts_of(tensor)
            number = numbers[key] = len(classes) if views else NO_PART
            if views:
                classes.append(Share(shape, tuple(views), dtypes.pop() if len(dtypes) == 1 else None))
        class_of.append(number)
    return Holdings(column(class_of), tuple(classes), targets)


def copies_of_range(holdings: Holdings, number: int, dtype: torch.dtype, begin: int, nbytes: int) -> list[Copy]:
    """Returns the copies between some bytes of a tensor, which lie at offset 0 of a bucket, and what a rank has of them.

    Args:
        number: of the tensor's class in the holdings.
        dtype: of the tensor.
        begin: where the bytes start in the tensor.
    """
    itemsize, dims = dtype.itemsize, holdings.dims
    views = holdings.classes[number].views if number != NO_PART else ()
    return [
        copy_row(dims, place, view.offset * itemsize - begin, dtype, view.start, view.size, view.strides)
        for place, whole in views
        for view in whole.within(begin // itemsize, (begin + nbytes) // itemsize)
    ]


def copies_of_box(
    box: Box,
    holdings: Holdings,
    number: int,
    dtype: torch.dtype,
    once: bool,
    strides: Shape | None = None,
    offset: int = 0,
) -> list[Copy]:
    """Returns the copies between a box of a tensor and what a rank has of the tensor.

    Args:
        box: start and size.
        number: of the tensor's class in the holdings.
        dtype: of the bucket's elements.
        once: True if one copy of each element is enough, as for a rank that packs them; else all parts have theirs.
        strides: of the box in the bucket, in elements, if it is not packed.
        offset: of the box in the bucket, in elements.
    """
    start, size = box
    strides = strides or row_major_strides(size)
    copies: list[Copy] = []
    if number == NO_PART:
        return copies
    exact = holdings.part_of_box[number].get(box) if once else None
    for part in [exact] if exact is not None else holdings.parts_near(number, box):
        if (shared := intersect(box, part.box)) is None:
            continue
        at = offset + sum((a - b) * stride for a, b, stride in zip(shared[0], start, strides, strict=True))
        local, local_strides = part.within(*shared), [0 if dim < 0 else strides[dim] for dim in part.dims]
        copies.append(copy_row(holdings.dims, part.place, at * dtype.itemsize, dtype, *local, local_strides))
        if once and shared == box:
            return copies[-1:]
    return copies


def expand_copies(
    holdings: Holdings, templates: Sequence[Sequence[Copy]], tensor: Tensor, template: Tensor
) -> tuple[CopyTable, Tensor]:
    """Returns the copies of rows, whose targets are the holdings' local tensors, and the row of each copy. Copies that are equal
    for thousands of tensors, but for their targets and offsets, are listed once.

    Args:
        templates: lists of copies, as from :func:`copies_of_box`, whose targets count in the tensor's local tensors.
        tensor: int64 [n], the tensor of each row.
        template: int64 [n], the template of each row.
    """
    entry, row = expand(column(list(map(len, templates))), template)
    table = column([value for copies in templates for copy in copies for value in copy])
    copies = CopyTable.of(table, holdings.dims).select(entry)
    first = column([0, *map(len, holdings.targets)]).cumsum(0)[tensor[row]]
    copies.target[:] = column(list(chain.from_iterable(holdings.targets)))[first + copies.target]
    return copies, row
