"""Plans which part of which tensor each rank writes to a file. Pure: every rank divides the tensors alike.

A tensor's elements are written once: ranks that have the same ones take parts of them, or turns from tensor to tensor. A rank
packs its parts into buckets in the order of the files, and writes each bucket's runs of bytes to where they belong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap
from math import prod
from operator import mul

import torch
from torch import Tensor

from epload.checkpoint.manifest import Manifest
from epload.core import dtypes as dtype_names
from epload.core.columns import column, expand
from epload.core.copy_table import ALIGNMENT, CopyTable
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
MIN_BYTES = 16 << 10
"""Minimum bytes of the parts into which ranks with the same elements divide them."""


@dataclass(frozen=True, eq=False)
class WriteBucket(BucketCopies):
    """A buffer that a rank packs and writes to files."""

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


Part = tuple[Tensor, Slot, Shape, torch.dtype, int]
"""A slot of some tensors of one shape and dtype, and their class in the rank's holdings."""


def plan_writes(
    manifest: Manifest, layout: FilesLayout, summaries: Mapping[int, HoldingsSummary], rank: int, holdings: Holdings
) -> WritePlan:
    """Plans what this rank writes.

    Args:
        manifest: the tensors as in the files but without padding.
        summaries: of every rank's holdings.
        holdings: this rank's.

    Raises:
        ModelMismatch: no rank has some elements of a tensor, or a tensor's dtype does not convert to that in the file.
    """
    kind_of = number_alike(manifest.kinds, summaries.values())
    parts: list[Part] = []
    for tensors in torch.split(kind_of.argsort(stable=True), torch.bincount(kind_of).tolist()):
        first = int(tensors[0])
        name, shape, dtype = manifest.names[first], manifest.shapes[first], manifest.dtypes[first]
        if 0 in shape:
            continue
        classes = {of: int(summary.class_of[first]) for of, summary in summaries.items()}
        boxes = [((of,), summaries[of].boxes[number]) for of, number in classes.items() if number != NO_PART]
        whole = ((0,) * len(shape), shape)
        slots, missing = make_slots(shape, dtype.itemsize, boxes, [((0,), [whole])], SLOT_BYTES, MIN_BYTES)
        if missing is not None:
            start, size = missing
            raise ModelMismatch(f"no rank has {name} from {list(start)} on, of size {list(size)}; nothing was saved")
        if (number := int(holdings.class_of[first])) == NO_PART:
            continue
        have = holdings.classes[number].dtype
        if not dtype_names.converts(have, dtype):
            raise ModelMismatch(
                f"{name} is {dtype_names.name(have)}, which cannot be saved as {dtype_names.name(dtype)}"
            )
        for slot in slots:
            if rank in slot.owners:
                own = tensors[tensors % len(slot.owners) == slot.owners.index(rank)]
                if len(own):
                    parts.append((own, slot, shape, dtype, number))
    return _expand(parts, holdings, layout) if parts else WritePlan((), 0)


def _expand(parts: Sequence[Part], holdings: Holdings, layout: FilesLayout) -> WritePlan:
    """Divides parts into buckets. Each part is a template for its tensors, as copies and runs of bytes of all are alike."""
    into_slots, into_tensors = CopyTemplates(holdings), CopyTemplates(holdings)
    for _, slot, shape, dtype, number in parts:
        box = slot.start, slot.size, holdings, number, dtype, True
        into_slots.add(copies_of_box(*box))
        into_tensors.add(copies_of_box(*box, whole=shape))
    runs_of = [_runs(slot, shape, dtype.itemsize) for _, slot, shape, dtype, _ in parts]
    tensor = torch.cat([tensors for tensors, *_ in parts])
    template = torch.repeat_interleave(column([len(tensors) for tensors, *_ in parts]))
    # In the order of the files, so that they are written from front to back.
    keys = torch.stack([layout.file[tensor], layout.offset[tensor], template], 1).tolist()
    order = column(sorted(range(len(keys)), key=keys.__getitem__))
    tensor, template = tensor[order], template[order]

    nbytes = column([prod(slot.size) * dtype.itemsize for _, slot, _, dtype, _ in parts])[template]
    aligned = -(-nbytes // ALIGNMENT) * ALIGNMENT
    begins = aligned.cumsum(0) - aligned
    run_counts = column(list(map(len, runs_of)))
    with_runs = aligned + run_counts[template] * RUN_BYTES  # many short runs take more room than their data
    _, sizes = torch.unique_consecutive((with_runs.cumsum(0) - with_runs) // BUCKET_BYTES, return_counts=True)
    ends = sizes.cumsum(0)
    offset = begins - torch.repeat_interleave(begins[ends - sizes], sizes)

    copies, of_copy = into_slots.expand(tensor, template)
    copies.offset.add_(offset[of_copy])
    in_files, _ = into_tensors.expand(tensor, template)
    origins = torch.stack([layout.file[tensor[of_copy]], layout.offset[tensor[of_copy]] + in_files.offset], 1)
    which, of_run = expand(run_counts, template)
    in_tensor, in_slot, length = torch.cat(runs_of)[which].T
    file, start = layout.file[tensor[of_run]], layout.offset[tensor[of_run]]
    runs = torch.stack([file, start + in_tensor, offset[of_run] + in_slot, length], 1)

    buckets = []
    rooms = (offset + aligned)[ends - 1].tolist()
    for room, rows, of_runs in zip(rooms, _slices(of_copy, ends), _slices(of_run, ends), strict=True):
        buckets.append(WriteBucket(room, copies.select(rows), runs[of_runs], in_files.select(rows), origins[rows]))
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
    offset = torch.tensor(sum(map(mul, slot.start, strides)))
    for dim in range(last):
        offset = offset[..., None] + torch.arange(slot.size[dim]) * strides[dim]
    offset = offset.flatten() * itemsize
    length = prod(slot.size[last:]) * itemsize
    return torch.stack([offset, torch.arange(len(offset)) * length, torch.full_like(offset, length)], 1)
