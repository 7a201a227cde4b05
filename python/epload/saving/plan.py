"""Which rank writes which part of which tensor to which bytes of a file. Pure: every rank divides the tensors alike.

A tensor's elements are written once: ranks that have the same ones take parts of them, or turns from tensor to tensor. A rank
packs its parts into buckets in the order of the files, and writes each bucket's runs of bytes to where they belong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, starmap
from math import prod

import torch
from torch import Tensor

from epload.core import dtypes as dtype_names
from epload.core.copy_table import ALIGNMENT, CopyTable
from epload.core.placement import row_major_strides
from epload.core.views import Shape
from epload.errors import ModelMismatch
from epload.planning.cells import Slot, make_slots
from epload.planning.shares import NO_PART, Outline, Share, copies_of_box
from epload.saving.layout import FilesLayout

BUCKET_BYTES = 16 << 20
"""After as many, its runs included, a bucket is full."""
RUN_BYTES = 4 * 8
SLOT_BYTES = 4 << 20
"""Of what is packed as a whole, at most."""
LEAST_BYTES = 16 << 10
"""Of the parts that ranks with the same elements write of them."""


@dataclass(eq=False)
class WriteBucket:
    """What a rank packs into a buffer, and writes out of it."""

    nbytes: int
    """Size of the buffer."""
    rows: CopyTable
    """Targets are numbers of the rank's local tensors."""
    runs: Tensor
    """int64 [n, 4]: number of the file, offset in the file, offset in the buffer, length; bytes."""
    in_files: CopyTable
    """``rows`` as they lie in their tensors in the files, for a rank that writes them without packing them first."""
    origins: Tensor
    """int64 [n, 2]: the file of each of these rows, and where in it it starts (bytes)."""

    @cached_property
    def targets(self) -> list[int]:
        """The local tensors that are packed."""
        return self._renumbered[0]

    @cached_property
    def copies(self) -> CopyTable:
        """``rows`` with targets that count in :attr:`targets`."""
        return self._renumbered[1]

    @cached_property
    def _renumbered(self) -> tuple[list[int], CopyTable]:
        table = self.rows.clone()
        return table.renumber_targets(), table


@dataclass(frozen=True, eq=False)
class WritePlan:
    """One rank's part of a save."""

    buckets: tuple[WriteBucket, ...]
    nbytes: int
    """That this rank writes."""

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)

    def describe(self, numbers: Sequence[int]) -> str:
        """For error messages."""
        return f"bucket {', '.join(map(str, numbers))} of the save"


def plan_writes(
    names: Sequence[str],
    shapes: Sequence[Shape],
    dtypes: Sequence[torch.dtype],
    layout: FilesLayout,
    outlines: Mapping[int, Outline],
    rank: int,
    share: Share,
) -> WritePlan:
    """
    Args:
        names, shapes, dtypes: of the tensors, as in the files but without padding.
        outlines: of every rank's share.
        rank: this process's.
        share: this rank's.

    Raises:
        ModelMismatch: no rank has some elements of a tensor, or a tensor's dtype does not convert to that in the file.
    """
    kinds = _kinds(shapes, dtypes, outlines)
    dims = max((len(part.local_start) for parts in share.classes for part in parts), default=1) or 1
    rows = _Rows(dims)
    for tensors in kinds:
        first = tensors[0]
        number = int(share.class_of[first])
        held = [
            ((of,), outline.boxes[int(outline.class_of[first])])
            for of, outline in outlines.items()
            if int(outline.class_of[first]) != NO_PART
        ]
        shape, dtype = shapes[first], dtypes[first]
        if 0 in shape:
            continue
        whole = ((0,) * len(shape), shape)
        slots, lacking = make_slots(shape, dtype.itemsize, held, [((0,), [whole])], SLOT_BYTES, LEAST_BYTES)
        if lacking is not None:
            start, size = lacking
            raise ModelMismatch(
                f"no rank has {names[first]} from {list(start)} on, of size {list(size)}; nothing was saved"
            )
        if number == NO_PART:
            continue
        if not dtype_names.converts(share.dtypes[number], dtype):
            raise ModelMismatch(
                f"{names[first]} is {dtype_names.name(share.dtypes[number])}, which cannot be saved as {dtype_names.name(dtype)}"
            )
        ids = torch.tensor(tensors, dtype=torch.int64)
        for slot in slots:
            if rank in slot.owners:
                turn = slot.owners.index(rank)
                mine = ids[ids % len(slot.owners) == turn]
                if len(mine):
                    rows.add(mine, slot, shape, dtype, share, number)
    return rows.plan(layout, share)


def _kinds(shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], outlines: Mapping[int, Outline]) -> list[list[int]]:
    """The tensors that are divided alike: of one shape and dtype, and in one class of each rank's share."""
    forms: dict[object, int] = {}
    pairs = zip(shapes, dtypes, strict=True)
    key = torch.tensor([forms.setdefault(pair, len(forms)) for pair in pairs], dtype=torch.int64)
    for outline in {id(each.class_of): each for each in outlines.values()}.values():
        _, key = torch.unique(key * (len(outline.boxes) + 1) + outline.class_of - NO_PART, return_inverse=True)
    found: dict[int, list[int]] = {}
    for tensor, kind in enumerate(key.tolist()):
        found.setdefault(kind, []).append(tensor)
    return list(found.values())


class _Rows:
    """The slots that a rank writes. What is equal for all tensors of a kind is listed once, as a template."""

    def __init__(self, dims: int) -> None:
        self._dims = dims
        self._tensors: list[Tensor] = []
        self._nbytes: list[int] = []
        """Of each template's slot."""
        self._copies: list[list[int]] = []
        self._in_tensors: list[list[int]] = []
        """The same as they lie in the whole tensor."""
        self._places: list[int] = []
        self._copy_counts: list[int] = []
        self._runs: list[Tensor] = []

    def add(self, tensors: Tensor, slot: Slot, shape: Shape, dtype: torch.dtype, share: Share, number: int) -> None:
        """Adds a slot of some tensors of a kind, whose class in the share has this number."""
        found = copies_of_box(slot.start, slot.size, share, number, dtype, self._dims, once=True)
        self._tensors.append(tensors)
        self._nbytes.append(prod(slot.size) * dtype.itemsize)
        self._copies += [row for row, _ in found]
        whole = copies_of_box(slot.start, slot.size, share, number, dtype, self._dims, once=True, whole=shape)
        self._in_tensors += [row for row, _ in whole]
        self._places += [place for _, place in found]
        self._copy_counts.append(len(found))
        self._runs.append(_runs(slot, shape, dtype.itemsize))

    def plan(self, layout: FilesLayout, share: Share) -> WritePlan:
        if not self._tensors:
            return WritePlan((), 0)
        tensor = torch.cat(self._tensors)
        template = torch.repeat_interleave(
            torch.arange(len(self._tensors)), torch.tensor(list(map(len, self._tensors)))
        )
        # In the order of the files, so that they are written from front to back.
        at = torch.stack([layout.file[tensor], layout.offset[tensor], template], 1)
        order = torch.tensor(sorted(range(len(at)), key=at.tolist().__getitem__), dtype=torch.int64)
        tensor, template = tensor[order], template[order]
        nbytes = torch.tensor(self._nbytes, dtype=torch.int64)[template]
        aligned = -(-nbytes // ALIGNMENT) * ALIGNMENT
        begins = aligned.cumsum(0) - aligned
        run_bytes = torch.tensor(list(map(len, self._runs)), dtype=torch.int64)[template] * RUN_BYTES
        with_runs = aligned + run_bytes  # many short runs take more room than their data
        bucket = (with_runs.cumsum(0) - with_runs) // BUCKET_BYTES
        _, sizes = torch.unique_consecutive(bucket, return_counts=True)
        ends = sizes.cumsum(0)
        first = ends - sizes
        offset = begins - torch.repeat_interleave(begins[first], sizes)
        copies, in_files, of_copy = self._expand_copies(tensor, template, offset, share)
        origins = torch.stack([layout.file[tensor[of_copy]], layout.offset[tensor[of_copy]] + in_files.offset], 1)
        runs, of_run = self._expand_runs(tensor, template, offset, layout)
        copy_ends = [0, *torch.searchsorted(of_copy, ends).tolist()]
        run_ends = [0, *torch.searchsorted(of_run, ends).tolist()]
        last = (offset + aligned)[ends - 1].tolist()
        buckets = tuple(
            WriteBucket(room, copies.select(rows), runs[of_runs], in_files.select(rows), origins[rows])
            for room, rows, of_runs in zip(last, _slices(copy_ends), _slices(run_ends), strict=True)
        )
        return WritePlan(buckets, int(nbytes.sum()))

    def _expand_copies(
        self, tensor: Tensor, template: Tensor, offset: Tensor, share: Share
    ) -> tuple[CopyTable, CopyTable, Tensor]:
        """The copies of all rows, packed and in whole tensors, and for each its row."""
        which, row = _expand(torch.tensor(self._copy_counts, dtype=torch.int64), template)
        table, whole = (
            CopyTable(torch.tensor(rows, dtype=torch.int64).reshape(-1, CopyTable.columns(self._dims))[which])
            for rows in (self._copies, self._in_tensors)
        )
        table.offset.add_(offset[row])
        width = max(map(len, share.targets))
        targets = torch.tensor([(*of, *(-1,) * (width - len(of))) for of in share.targets], dtype=torch.int64)
        table.target[:] = targets[tensor[row], torch.tensor(self._places, dtype=torch.int64)[which]]
        whole.target[:] = table.target
        return table, whole, row

    def _expand_runs(
        self, tensor: Tensor, template: Tensor, offset: Tensor, layout: FilesLayout
    ) -> tuple[Tensor, Tensor]:
        """The runs of all rows, and for each its row."""
        which, row = _expand(torch.tensor(list(map(len, self._runs)), dtype=torch.int64), template)
        runs = torch.cat(self._runs)[which]
        file = layout.file[tensor[row]]
        return torch.stack(
            [file, runs[:, 0] + layout.offset[tensor[row]], runs[:, 1] + offset[row], runs[:, 2]], 1
        ), row


def _slices(ends: list[int]) -> list[slice]:
    """Returns the slice between each end and the next."""
    return list(starmap(slice, pairwise(ends)))


def _expand(counts: Tensor, template: Tensor) -> tuple[Tensor, Tensor]:
    """For rows that each have the entries of a template, of which ``counts`` has the lengths: all their entries, and for each
    its row."""
    first = counts.cumsum(0) - counts
    each = counts[template]
    row = torch.repeat_interleave(torch.arange(len(template)), each)
    within = torch.arange(len(row)) - (each.cumsum(0) - each)[row]
    return first[template[row]] + within, row


def _runs(slot: Slot, shape: Shape, itemsize: int) -> Tensor:
    """The contiguous runs of a box in a row-major tensor, int64 [n, 3]: offset in the tensor and in the packed box, and length;
    bytes."""
    # Dims after `last` are whole, so that a run is a range of indices of that dim.
    last = max((dim for dim in range(len(shape)) if slot.size[dim] != shape[dim]), default=0)
    strides = row_major_strides(shape)
    offset = torch.zeros((), dtype=torch.int64)
    for dim in range(last):
        offset = offset[..., None] + (slot.start[dim] + torch.arange(slot.size[dim])) * strides[dim]
    begin = slot.start[last] * strides[last] if shape else 0
    offset = (offset.flatten() + begin) * itemsize
    length = prod(slot.size[last:]) * itemsize
    return torch.stack([offset, torch.arange(len(offset)) * length, torch.full_like(offset, length)], 1)
