"""Plans which part of which tensor each rank writes to a file. Pure: every rank divides the tensors alike.

A tensor's elements are written once: ranks that have the same ones take parts of them, or turns from tensor to tensor. A rank
packs its parts into buckets in the order of the files, and writes each bucket's runs of bytes to where they belong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap
from math import prod

import torch
from torch import Tensor

from epload.core import dtypes as dtype_names
from epload.core.columns import column, expand
from epload.core.copy_table import ALIGNMENT, CopyTable
from epload.core.pieces import Kinds
from epload.core.placement import row_major_strides
from epload.core.views import Shape
from epload.errors import ModelMismatch
from epload.planning.buckets import BucketCopies
from epload.planning.cells import Slot, make_slots
from epload.planning.holdings import NO_PART, CopyTemplates, Holdings, HoldingsSummary, copies_of_box, number_alike
from epload.saving.layout import FilesLayout

BUCKET_BYTES = 16 << 20
"""A bucket is full once it has so many, its runs included."""
RUN_BYTES = 4 * 8
SLOT_BYTES = 4 << 20
"""Maximum bytes of a slot, which is packed as a whole."""
LEAST_BYTES = 16 << 10
"""Minimum bytes of the parts into which ranks with the same elements divide them."""


@dataclass(frozen=True, eq=False)
class WriteBucket(BucketCopies):
    """A buffer that a rank packs and writes to files."""

    runs: Tensor
    """int64 [n, 4]: number of the file, offset in the file, offset in the buffer, length; bytes."""
    in_files: CopyTable
    """``rows`` as they lie in their tensors in the files, for a rank that writes them without packing them first."""
    origins: Tensor
    """int64 [n, 2]: the file of each of these rows, and where in it it starts (bytes)."""


@dataclass(frozen=True, eq=False)
class WritePlan:
    """One rank's part of a save."""

    buckets: tuple[WriteBucket, ...]
    nbytes: int
    """Bytes that this rank writes."""

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)

    def describe(self, numbers: Sequence[int]) -> str:
        """Names some buckets in error messages."""
        return f"bucket {', '.join(map(str, numbers))} of the save"


def plan_writes(
    names: Sequence[str],
    shapes: Sequence[Shape],
    dtypes: Sequence[torch.dtype],
    layout: FilesLayout,
    summaries: Mapping[int, HoldingsSummary],
    rank: int,
    holdings: Holdings,
) -> WritePlan:
    """
    Args:
        names, shapes, dtypes: of the tensors, as in the files but without padding.
        summaries: of every rank's holdings.
        rank: this process's.
        holdings: this rank's.

    Raises:
        ModelMismatch: no rank has some elements of a tensor, or a tensor's dtype does not convert to that in the file.
    """
    kind_of = number_alike(Kinds.of(shapes, dtypes), summaries.values())
    rows = _Rows(holdings)
    for tensors in torch.split(kind_of.argsort(stable=True), torch.bincount(kind_of).tolist()):
        first = int(tensors[0])
        number = int(holdings.class_of[first])
        held = [
            ((of,), summary.boxes[int(summary.class_of[first])])
            for of, summary in summaries.items()
            if int(summary.class_of[first]) != NO_PART
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
        if not dtype_names.converts(holdings.dtypes[number], dtype):
            raise ModelMismatch(
                f"{names[first]} is {dtype_names.name(holdings.dtypes[number])}, which cannot be saved as "
                f"{dtype_names.name(dtype)}"
            )
        for slot in slots:
            if rank in slot.owners:
                turn = slot.owners.index(rank)
                mine = tensors[tensors % len(slot.owners) == turn]
                if len(mine):
                    rows.add(mine, slot, shape, dtype, number)
    return rows.plan(layout)


class _Rows:
    """The slots that a rank writes. What is equal for all tensors of a kind is listed once, as a template."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._tensors: list[Tensor] = []
        self._nbytes: list[int] = []
        """Bytes of each template's slot."""
        self._copies = CopyTemplates(holdings)
        self._in_tensors = CopyTemplates(holdings)
        """The same as they lie in the whole tensor."""
        self._runs: list[Tensor] = []

    def add(self, tensors: Tensor, slot: Slot, shape: Shape, dtype: torch.dtype, number: int) -> None:
        """Adds a slot of some tensors of a kind, whose class in the holdings has this number."""
        box = slot.start, slot.size, self._holdings, number, dtype, True
        self._copies.add(copies_of_box(*box))
        self._in_tensors.add(copies_of_box(*box, whole=shape))
        self._tensors.append(tensors)
        self._nbytes.append(prod(slot.size) * dtype.itemsize)
        self._runs.append(_runs(slot, shape, dtype.itemsize))

    def plan(self, layout: FilesLayout) -> WritePlan:
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
        copies, of_copy = self._copies.expand(tensor, template)
        copies.offset.add_(offset[of_copy])
        in_files, _ = self._in_tensors.expand(tensor, template)
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

    def _expand_runs(
        self, tensor: Tensor, template: Tensor, offset: Tensor, layout: FilesLayout
    ) -> tuple[Tensor, Tensor]:
        """The runs of all rows, and for each its row."""
        which, row = expand(column(list(map(len, self._runs))), template)
        runs = torch.cat(self._runs)[which]
        file = layout.file[tensor[row]]
        return torch.stack(
            [file, runs[:, 0] + layout.offset[tensor[row]], runs[:, 1] + offset[row], runs[:, 2]], 1
        ), row


def _slices(ends: list[int]) -> list[slice]:
    """Returns the slice between each end and the next."""
    return list(starmap(slice, pairwise(ends)))


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
