"""Plans what ranks copy straight out of the memory of senders on their own machine. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from epload.core.columns import column
from epload.core.copy_table import CopyTable
from epload.core.placement import Box, intersect
from epload.core.views import Shape
from epload.errors import LoadError
from epload.planning.cells import Slot, expand_slots
from epload.planning.holdings import NO_PART, Copy, CopyTemplates, Holdings, HoldingsSummary, Part, copies_of_box

Reach = Mapping[int, Sequence[int]]
"""The senders whose memory all ranks of a receiving node can open, by the number of the node."""


class Strided(NamedTuple):
    """The way in which a local tensor lies in memory."""

    dtype: torch.dtype
    shape: Shape
    strides: Shape
    """Elements."""


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

    def copies(
        self, owner: int, sender: Holdings, layout: Tensor, layouts: Sequence[Strided]
    ) -> tuple[CopyTable, Tensor]:
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
        tensor, box = self.tensor[pulled], self.box[pulled]
        part_of: dict[tuple[int, int], Part] = {}
        local, template, numbers = [], [], dict[tuple[int, int, int, int], int]()
        templates = CopyTemplates(self.holdings)
        for t, at, number in zip(tensor.tolist(), box.tolist(), sender.class_of[tensor].tolist(), strict=True):
            part = part_of.get((number, at))
            if part is None:
                part = part_of[number, at] = next(
                    part for part in sender.parts[number] if intersect(self.boxes[at], part.box) == self.boxes[at]
                )
            local.append(sender.targets[t][part.place])
            key = int(self.holdings.class_of[t]), number, at, int(layout[local[-1]])
            if key not in numbers:
                numbers[key] = templates.add(self._copies_of_box(key[0], self.boxes[at], part, layouts[key[3]]))
            template.append(numbers[key])
        copies, row = templates.expand(tensor, column(template))
        return copies, column(local)[row]

    def _copies_of_box(self, number: int, box: Box, part: Part, layout: Strided) -> list[Copy]:
        """``number``: the class of the tensor in this rank's holdings."""
        local, extent = part.within(*box)
        if any(begin + n > length for begin, n, length in zip(local, extent, layout.shape, strict=True)):
            raise LoadError(
                f"a sender's local tensor has shape {list(layout.shape)}, but its DTensor {list(extent)} from {list(local)} on"
            )
        strides = [0] * len(box[0])
        for dim, stride in zip(part.dims, layout.strides, strict=True):
            if dim >= 0:
                strides[dim] = stride
        begin = sum(map(int.__mul__, local, layout.strides)) * layout.dtype.itemsize
        rows = copies_of_box(*box, self.holdings, number, layout.dtype, once=False, strides=tuple(strides))
        return [([row[0], row[1] + begin, *row[2:]], place) for row, place in rows]


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
    moved: list[list[Slot]] = []
    pulled: dict[int, list[list[Slot]]] = {node: [[] for _ in slots] for node in reach}
    for kind, some in enumerate(slots):
        moved.append([])
        for slot in some:
            local = {
                node: tuple(owner for owner in slot.owners if owner in reach.get(node, ()) and owner in fits[kind])
                for node in slot.nodes
            }
            for node, owners in local.items():
                if owners:
                    pulled[node][kind].append(slot._replace(owners=owners, nodes=(node,)))
            if rest := tuple(node for node in slot.nodes if not local[node]):
                moved[-1].append(slot._replace(nodes=rest))
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
    boxes = [(slot.start, slot.size) for slot in chain.from_iterable(pulled)]
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
        own = [[slot for slot in some if rank in slot.owners] for some in of_kinds]
        number, _, owner = expand_slots(own, kind_of)
        nbytes = [prod(slot.size) * size for some, size in zip(own, itemsizes, strict=True) for slot in some]
        total += int(column(nbytes)[number[owner == rank]].sum())
    return total


def fitting_senders(
    senders: Sequence[int],
    summaries: Mapping[int, HoldingsSummary],
    firsts: Sequence[int],
    dtypes: Sequence[torch.dtype],
) -> list[list[int]]:
    """Returns the senders whose local tensors of each kind have its dtype: those of others are converted twice.

    Args:
        firsts: the first tensor of each kind.
        dtypes: of each kind.
    """

    def fits(holdings: HoldingsSummary, tensor: int, dtype: torch.dtype) -> bool:
        number = int(holdings.class_of[tensor])
        return number != NO_PART and holdings.dtypes[number] == dtype and not holdings.mixed[number]

    return [
        [rank for rank in senders if fits(summaries[rank], first, dtype)]
        for first, dtype in zip(firsts, dtypes, strict=True)
    ]
