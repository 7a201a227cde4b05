"""Plans which part of which tensor each rank writes to a file. Pure: every rank divides the tensors in the same way.

A tensor's elements are written once: ranks that have the same ones take parts of them, or turns from tensor to tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from epload.checkpoint.manifest import Manifest
from epload.core import dtypes as dtype_names
from epload.core.columns import first_of_each
from epload.core.copy_table import Copy, CopyTable
from epload.core.placement import Box
from epload.core.views import View
from epload.errors import ModelMismatch
from epload.planning.cells import Slot, expand_slots, make_slots
from epload.planning.holdings import NO_PART, Holdings, copies_of_box, expand_copies, number_alike
from epload.saving.layout import FilesLayout

SLOT_BYTES = 4 << 20
"""Maximum bytes of a region."""
MIN_BYTES = 16 << 10
"""Minimum bytes of the parts into which ranks with the same elements divide them."""


WritePlan = tuple[CopyTable, Tensor]
"""The regions that one rank writes, in the order of the files, as they lie in the tensors of the files (targets are numbers of
the rank's local tensors); and int64 [n, 2], the file of each, and where in it it starts (bytes)."""


def plan_writes(
    manifest: Manifest, layout: FilesLayout, of_ranks: Mapping[int, Holdings], rank: int, holdings: Holdings
) -> WritePlan:
    """Plans what this rank writes.

    Args:
        manifest: the tensors as in the files but without padding.
        of_ranks: every rank's holdings, of which the regions count.
        holdings: this rank's, with targets.

    Raises:
        ModelMismatch: no rank has some elements of a tensor, or a tensor's dtype does not convert to that in the file.
    """
    kind_of = number_alike(manifest, of_ranks.values())
    firsts = first_of_each(kind_of)
    classes = {id(other.class_of): other.class_of[firsts].tolist() for other in of_ranks.values()}
    slots: list[list[Slot]] = []
    """The slots of each kind of tensors that this rank may write."""
    templates: list[list[Copy]] = []
    for kind, first in enumerate(firsts.tolist()):
        numbers = {of_rank: classes[id(other.class_of)][kind] for of_rank, other in of_ranks.items()}
        boxes = [((of_rank,), of_ranks[of_rank].boxes[number]) for of_rank, number in numbers.items() if number != NO_PART]
        slots.append([slot for slot in _slots_of(manifest, first, boxes) if rank in slot.owners])
        number, shape, dtype = int(holdings.class_of[first]), manifest.shapes[first], manifest.dtypes[first]
        have = holdings.classes[number].dtype if number != NO_PART else None
        if have is not None and not dtype_names.converts(have, dtype):
            raise ModelMismatch(
                f"{manifest.names[first]} is {dtype_names.name(have)}, which cannot be saved as {dtype_names.name(dtype)}"
            )
        for slot in slots[-1]:
            view = View.whole(shape).crop(*slot.box)
            templates.append(copies_of_box(slot.box, holdings, number, dtype, True, view.strides, view.offset))
    slot_of, tensor, owner = expand_slots(slots, kind_of)
    rows = (owner == rank).nonzero().flatten()
    position = layout.file * (int(layout.offset.max()) + 1) + layout.offset
    rows = rows[position[tensor[rows]].argsort(stable=True)]
    tensor = tensor[rows]
    table, row = expand_copies(holdings, templates, tensor, slot_of[rows])
    return table, torch.stack([layout.file[tensor[row]], layout.offset[tensor[row]] + table.offset], 1)


def _slots_of(manifest: Manifest, tensor: int, boxes: Sequence[tuple[Sequence[int], Sequence[Box]]]) -> list[Slot]:
    """``boxes``: those that ranks have."""
    name, shape, dtype = manifest.names[tensor], manifest.shapes[tensor], manifest.dtypes[tensor]
    if 0 in shape:
        return []
    whole = ((0,) * len(shape), shape)
    slots, missing = make_slots(shape, dtype.itemsize, boxes, [((0,), [whole])], SLOT_BYTES, MIN_BYTES)
    if missing is not None:
        start, size = missing
        raise ModelMismatch(f"no rank has {name} from {list(start)} on, of size {list(size)}; nothing was saved")
    return slots
