"""Plans what ranks copy straight out of the memory of senders on their own machine. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import prod

import torch
from torch import Tensor

from epload.core.columns import column
from epload.core.copy_table import Copy, CopyTable
from epload.core.placement import Box, intersect
from epload.core.views import Shape
from epload.errors import LoadError
from epload.planning.cells import Slot, expand_slots
from epload.planning.holdings import NO_PART, Holdings, Part, copies_of_box, expand_copies

Reach = Mapping[int, Sequence[int]]
"""The senders whose memory all ranks of a receiving node can open, by the number of the node."""


Strided = tuple[torch.dtype, Shape, Shape]
"""Dtype, shape and strides (elements) of a local tensor."""


@dataclass(frozen=True, eq=False)
class Pulls:
    """The boxes of tensors that one rank pulls; an entry of each column is one."""

    boxes: Sequence[Box]
    owner: Tensor
    """int64 [n], the sender."""
    tensor: Tensor
    """int64 [n]."""
    box: Tensor
    """int64 [n], an index into ``boxes``."""
    holdings: Holdings
    """This rank's."""

    @property
    def owners(self) -> list[int]:
        """The senders that the rank pulls from."""
        return [int(owner) for owner in torch.unique(self.owner).tolist()]

    def copies(self, owner: int, sender: Holdings, layout: Tensor, layouts: Sequence[Strided]) -> tuple[CopyTable, Tensor]:
        """Plans the copies out of one sender's local tensors.

        Args:
            sender: the sender's holdings.
            layout: int64 [m], the layout of each local tensor of the sender, an index into ``layouts``.

        Returns:
            Rows whose bucket is the memory of a local tensor of the sender, and whose targets are this rank's local tensors;
            int64: for each row the sender's tensor.

        Raises:
            LoadError: a tensor of the sender is smaller than its holdings say.
        """
        pulled = (self.owner == owner).nonzero().flatten()
        tensor, layout_of = self.tensor[pulled], layout.tolist()
        templates: list[list[Copy]] = []

        @cache
        def part_of(number: int, box: Box) -> Part:
            return next(part for part in sender.parts[number] if intersect(box, part.box) == box)

        @cache
        def template_of(number: int, box: Box, part: Part, layout: int) -> int:
            templates.append(self._copies_of_box(number, box, part, layouts[layout]))
            return len(templates) - 1

        classes = self.holdings.class_of[tensor].tolist(), sender.class_of[tensor].tolist()
        local, template = [], []
        for t, at, own, of_sender in zip(tensor.tolist(), self.box[pulled].tolist(), *classes, strict=True):
            box = self.boxes[at]
            part = part_of(of_sender, box)
            local.append(sender.targets[t][part.place])
            template.append(template_of(own, box, part, layout_of[local[-1]]))
        copies, row = expand_copies(self.holdings, templates, tensor, column(template))
        return copies, column(local)[row]

    def _copies_of_box(self, number: int, box: Box, part: Part, layout: Strided) -> list[Copy]:
        """``number``: the class of the tensor in this rank's holdings."""
        local, extent = part.within(*box)
        dtype, shape, strides_of_local = layout
        if any(begin + n > length for begin, n, length in zip(local, extent, shape, strict=True)):
            raise LoadError(
                f"a sender's local tensor has shape {list(shape)}, but its DTensor {list(extent)} from {list(local)} on"
            )
        stride_of = dict(zip(part.dims, strides_of_local, strict=True))
        strides = tuple(stride_of.get(dim, 0) for dim in range(len(box[0])))
        first = sum(map(int.__mul__, local, strides_of_local))
        return copies_of_box(box, self.holdings, number, dtype, once=False, strides=strides, offset=first)


def divide(
    slots: Sequence[Sequence[Slot]], reach: Reach, fits: Sequence[Sequence[int]]
) -> tuple[list[list[Slot]], dict[int, list[list[Slot]]]]:
    """Divides the slots of each kind of tensors among those that move and those that nodes pull.

    Args:
        slots: of each kind.
        reach: what nodes can open.
        fits: of each kind, the senders whose local tensors have the dtype that the tensors are said to have.

    Returns:
        The slots that move, of each kind; those that each node pulls, of each kind, with the owners within its reach.
    """
    moved: list[list[Slot]] = [[] for _ in slots]
    pulled: dict[int, list[list[Slot]]] = {node: [[] for _ in slots] for node in reach}
    for kind, of_kind in enumerate(slots):
        for slot in of_kind:
            rest = []
            for node in slot.nodes:
                owners = [rank for rank in slot.owners if rank in reach.get(node, ()) and rank in fits[kind]]
                if owners:
                    pulled[node][kind].append(Slot(slot.box, tuple(owners), (node,)))
                else:
                    rest.append(node)
            if rest:
                moved[kind].append(slot._replace(nodes=tuple(rest)))
    return moved, pulled


def plan_pulls(pulled: Sequence[Sequence[Slot]], kind_of: Tensor, holdings: Holdings) -> Pulls:
    """Plans what one rank of a node pulls, out of what the node does.

    Args:
        pulled: slots of each kind.
        kind_of: int64 [t], of each tensor.
        holdings: the rank's.
    """
    box, tensor, owner = expand_slots(pulled, kind_of)
    needed = holdings.class_of[tensor] != NO_PART
    boxes = [slot.box for slot in chain.from_iterable(pulled)]
    return Pulls(boxes, owner[needed], tensor[needed], box[needed], holdings)


def lent_bytes(rank: int, pulled: Iterable[Sequence[Sequence[Slot]]], kind_of: Tensor, itemsizes: Sequence[int]) -> int:
    """Returns the bytes that nodes pull from one sender.

    Args:
        pulled: slots of each kind, by each node.
        kind_of: as for :func:`plan_pulls`.
        itemsizes: of each kind.
    """
    total = 0
    for of_kinds in pulled:
        slot, _, owner = expand_slots(of_kinds, kind_of)
        pairs = zip(of_kinds, itemsizes, strict=True)
        nbytes = column([prod(slot.box[1]) * itemsize for of_kind, itemsize in pairs for slot in of_kind])
        total += int(nbytes[slot[owner == rank]].sum())
    return total
