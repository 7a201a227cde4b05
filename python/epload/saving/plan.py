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

from epload.checkpoint.manifest import Manifest
from epload.core import dtypes as dtype_names
from epload.core.columns import column, expand
from epload.core.copy_table import ALIGNMENT, CopyTable
from epload.core.placement import row_major_strides
from epload.core.views import Shape
from epload.errors import ModelMismatch
from epload.planning.cells import Slot, make_slots
from epload.planning.shares import NO_PART, CopyTemplates, Outline, Share, copies_of_box, number_alike
from epload.saving.layout import FilesLayout

BUCKET_BYTES = 16 << 20
"""A bucket is full once it has so many, its runs included."""
RUN_BYTES = 4 * 8
SLOT_BYTES = 4 << 20
"""Maximum bytes of a slot, which is packed as a whole."""
MIN_BYTES = 16 << 10
"""Minimum bytes of the parts into which ranks with the same elements divide them."""


@dataclass(eq=False)
class WriteBucket:
    """A buffer that a rank packs and writes to files."""

    nbytes: int
    """Size of the buffer."""
    targets: list[int]
    """The rank's local tensors that are packed, by number."""
    copies: CopyTable
    """Targets count in :attr:`targets`."""
    runs: Tensor
    """int64 [n, 4]: number of the file, offset in the file, offset in the buffer, length; bytes."""
    in_files: CopyTable
    """The copies as they lie in their tensors in the files, for a rank that writes them without packing them first. Targets are
    numbers of local tensors."""
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
    manifest: Manifest, layout: FilesLayout, outlines: Mapping[int, Outline], rank: int, share: Share
) -> WritePlan:
    """
    Args:
        manifest: the tensors as in the files but without padding.
        outlines: of every rank's share.
        rank: this process's.
        share: this rank's.

    Raises:
        ModelMismatch: no rank has some elements of a tensor, or a tensor's dtype does not convert to that in the file.
    """
    kind_of = number_alike(manifest.kinds, outlines.values())
    parts = _Parts(share)
    for tensors in torch.split(kind_of.argsort(stable=True), torch.bincount(kind_of).tolist()):
        first = int(tensors[0])
        name, shape, dtype = manifest.names[first], manifest.shapes[first], manifest.dtypes[first]
        if 0 in shape:
            continue
        classes = {of: int(outline.class_of[first]) for of, outline in outlines.items()}
        boxes = [((of,), outlines[of].boxes[number]) for of, number in classes.items() if number != NO_PART]
        whole = ((0,) * len(shape), shape)
        slots, missing = make_slots(shape, dtype.itemsize, boxes, [((0,), [whole])], SLOT_BYTES, MIN_BYTES)
        if missing is not None:
            start, size = missing
            raise ModelMismatch(f"no rank has {name} from {list(start)} on, of size {list(size)}; nothing was saved")
        number = int(share.class_of[first])
        if number == NO_PART:
            continue
        if not dtype_names.converts(share.dtypes[number], dtype):
            raise ModelMismatch(
                f"{name} is {dtype_names.name(share.dtypes[number])}, which cannot be saved as {dtype_names.name(dtype)}"
            )
        for slot in slots:
            if rank in slot.owners:
                own = tensors[tensors % len(slot.owners) == slot.owners.index(rank)]
                if len(own):
                    parts.add(own, slot, shape, dtype, number)
    return parts.plan(layout)


class _Parts:
    """The slots that a rank writes. What is equal for all tensors of a kind is listed once, as a template."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._tensors: list[Tensor] = []
        self._nbytes: list[int] = []
        """Bytes of each template's slot."""
        self._copies, self._in_tensors = CopyTemplates(share), CopyTemplates(share)
        """The copies out of the local tensors into the packed slot, and into the whole tensor."""
        self._runs: list[Tensor] = []

    def add(self, tensors: Tensor, slot: Slot, shape: Shape, dtype: torch.dtype, number: int) -> None:
        """Adds a slot of some tensors of a kind, whose class in the share has this number."""
        box = slot.start, slot.size, self._share, number, dtype, True
        self._copies.add(copies_of_box(*box))
        self._in_tensors.add(copies_of_box(*box, whole=shape))
        self._tensors.append(tensors)
        self._nbytes.append(prod(slot.size) * dtype.itemsize)
        self._runs.append(_runs(slot, shape, dtype.itemsize))

    def plan(self, layout: FilesLayout) -> WritePlan:
        if not self._tensors:
            return WritePlan((), 0)
        counts, run_counts = column(list(map(len, self._tensors))), column(list(map(len, self._runs)))
        tensor, template = torch.cat(self._tensors), torch.repeat_interleave(torch.arange(len(counts)), counts)
        # In the order of the files, so that they are written from front to back.
        keys = torch.stack([layout.file[tensor], layout.offset[tensor], template], 1).tolist()
        order = column(sorted(range(len(keys)), key=keys.__getitem__))
        tensor, template = tensor[order], template[order]
        nbytes = column(self._nbytes)[template]
        aligned = -(-nbytes // ALIGNMENT) * ALIGNMENT
        begins = aligned.cumsum(0) - aligned
        with_runs = aligned + run_counts[template] * RUN_BYTES  # many short runs take more room than their data
        bucket = (with_runs.cumsum(0) - with_runs) // BUCKET_BYTES
        _, sizes = torch.unique_consecutive(bucket, return_counts=True)
        ends = sizes.cumsum(0)
        offset = begins - torch.repeat_interleave(begins[ends - sizes], sizes)

        copies, of_copy = self._copies.expand(tensor, template)
        copies.offset.add_(offset[of_copy])
        in_files, _ = self._in_tensors.expand(tensor, template)
        origins = torch.stack([layout.file[tensor[of_copy]], layout.offset[tensor[of_copy]] + in_files.offset], 1)
        which, of_run = expand(run_counts, template)
        in_tensor, in_slot, length = torch.cat(self._runs)[which].T
        file, start = layout.file[tensor[of_run]], layout.offset[tensor[of_run]]
        runs = torch.stack([file, start + in_tensor, offset[of_run] + in_slot, length], 1)

        buckets = []
        rooms = (offset + aligned)[ends - 1].tolist()
        for room, rows, of_runs in zip(rooms, _slices(of_copy, ends), _slices(of_run, ends), strict=True):
            packed = copies.select(rows).clone()
            targets = packed.renumber_targets()
            buckets.append(WriteBucket(room, targets, packed, runs[of_runs], in_files.select(rows), origins[rows]))
        return WritePlan(tuple(buckets), int(nbytes.sum()))


def _slices(of_row: Tensor, ends: Tensor) -> list[slice]:
    """Returns the rows of each bucket. ``of_row``: ascending, the number of the slot of each row."""
    return list(starmap(slice, pairwise([0, *torch.searchsorted(of_row, ends).tolist()])))


def _runs(slot: Slot, shape: Shape, itemsize: int) -> Tensor:
    """Returns the contiguous runs of a box in a row-major tensor, int64 [n, 3]: offset in the tensor and in the packed box, and
    length; bytes."""
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
