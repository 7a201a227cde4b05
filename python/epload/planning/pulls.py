"""Plans what ranks copy straight out of the memory of senders on their own machine. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from epload.core.columns import column, expand
from epload.core.copy_table import CopyTable
from epload.core.placement import Box, intersect
from epload.core.views import Shape
from epload.errors import LoadError
from epload.planning.cells import Slot
from epload.planning.shares import NO_PART, CopyTemplates, Outline, Share, copies_of_box

Reach = Mapping[int, Sequence[int]]
"""The senders whose memory all ranks of a receiving node can open, by the number of the node."""


class PulledBox(NamedTuple):
    """A box of every tensor of a kind that one node pulls."""

    kind: int
    box: Box
    owners: tuple[int, ...]
    """Senders that have it within reach; they take turns from tensor to tensor."""


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
    share: Share
    """This rank's."""

    @property
    def owners(self) -> list[int]:
        """The senders that the rank pulls from."""
        return [int(owner) for owner in torch.unique(self.owner).tolist()]

    def copies(self, owner: int, shared: Share, layout: Tensor, layouts: Sequence[Strided]) -> tuple[CopyTable, Tensor]:
        """Copies out of one sender's local tensors.

        Args:
            shared: the sender's share.
            layout: int64 [m], the layout of each local tensor of the sender, an index into ``layouts``.

        Returns:
            Rows whose bucket is the memory of a local tensor of the sender, and whose targets are this rank's local tensors;
            int64: for each row the sender's tensor.

        Raises:
            LoadError: a tensor of the sender is smaller than its share says.
        """
        mine = (self.owner == owner).nonzero().flatten()
        tensor, box = self.tensor[mine], self.box[mine]
        classes = shared.class_of[tensor].tolist()
        parts = [self._part(shared, number, self.boxes[at]) for number, at in zip(classes, box.tolist(), strict=True)]
        targets = zip(tensor.tolist(), parts, strict=True)
        local = column([shared.targets[t][shared.classes[number][part].place] for (t, (number, part)) in targets])
        keys = list(zip(box.tolist(), parts, layout[local].tolist(), strict=True))
        templates = CopyTemplates(self.share)
        numbers: dict[tuple[int, tuple[int, int], int], int] = {}
        for t, key in zip(tensor.tolist(), keys, strict=True):
            if key not in numbers:
                numbers[key] = templates.add(self._copies_of_box(t, key, shared, layouts[key[2]]))
        copies, row = templates.expand(tensor, column([numbers[key] for key in keys]))
        return copies, local[row]

    @staticmethod
    def _part(shared: Share, number: int, box: Box) -> tuple[int, int]:
        """The class, and the first of its parts that has the box."""
        return number, next(i for i, part in enumerate(shared.classes[number]) if intersect(box, part.box) == box)

    def _copies_of_box(
        self, tensor: int, key: tuple[int, tuple[int, int], int], shared: Share, layout: Strided
    ) -> list[tuple[list[int], int]]:
        (start, size), (number, at), _ = self.boxes[key[0]], key[1], key[2]
        part = shared.classes[number][at]
        local, extent = part.within(start, size)
        if any(begin + n > length for begin, n, length in zip(local, extent, layout.shape, strict=True)):
            raise LoadError(
                f"a sender's local tensor has shape {list(layout.shape)}, but its DTensor {list(extent)} from {list(local)} on"
            )
        strides = [0] * len(start)
        for dim, stride in zip(part.dims, layout.strides, strict=True):
            if dim >= 0:
                strides[dim] = stride
        begin = sum(map(int.__mul__, local, layout.strides)) * layout.dtype.itemsize
        found = copies_of_box(
            start,
            size,
            self.share,
            int(self.share.class_of[tensor]),
            layout.dtype,
            once=False,
            strides=tuple(strides),
        )
        for row, _ in found:
            row[1] += begin
        return found


def divide(
    slots: Sequence[Sequence[Slot]],
    reach: Reach,
    fits: Sequence[Sequence[int]],
) -> tuple[list[list[Slot]], dict[int, list[PulledBox]]]:
    """Divides the slots of each kind of tensors among what moves and what nodes pull.

    Args:
        slots: of each kind.
        reach: what nodes can open.
        fits: of each kind, the senders whose local tensors have the dtype that the tensors are said to have.

    Returns:
        Slots that move, of each kind; what each node pulls.
    """
    moved: list[list[Slot]] = []
    pulled: dict[int, list[PulledBox]] = {node: [] for node in reach}
    for kind, some in enumerate(slots):
        left = []
        for slot in some:
            nodes = []
            for node in slot.nodes:
                near = [owner for owner in slot.owners if owner in reach.get(node, ()) and owner in fits[kind]]
                if near:
                    pulled[node].append(PulledBox(kind, (slot.start, slot.size), tuple(near)))
                else:
                    nodes.append(node)
            if nodes:
                left.append(slot._replace(nodes=tuple(nodes)))
        moved.append(left)
    return moved, pulled


def plan_pulls(pulled: Sequence[PulledBox], kind_of: Tensor, kinds: int, share: Share) -> Pulls:
    """Plans what one rank of a node pulls, out of what the node does.

    Args:
        pulled: by the node.
        kind_of: int64 [t], of each tensor.
        kinds: how many there are.
        share: the rank's.
    """
    owner, tensor, box = _expand(pulled, kind_of, kinds)
    wanted = share.class_of[tensor] != NO_PART
    return Pulls([each.box for each in pulled], owner[wanted], tensor[wanted], box[wanted], share)


def slots_of(pulled: Sequence[PulledBox], kinds: int, node: int) -> list[list[Slot]]:
    """The slots of each kind that are the boxes that a node pulls."""
    slots: list[list[Slot]] = [[] for _ in range(kinds)]
    for each in pulled:
        slots[each.kind].append(Slot(*each.box, each.owners, (node,)))
    return slots


def lent_bytes(rank: int, pulled: Iterable[Sequence[PulledBox]], kind_of: Tensor, itemsizes: Sequence[int]) -> int:
    """Bytes that nodes pull from one sender.

    Args:
        pulled: by each node.
        kind_of: as for :func:`plan_pulls`.
        itemsizes: of each kind.
    """
    total = 0
    for boxes in pulled:
        owner, _, box = _expand(boxes, kind_of, len(itemsizes))
        nbytes = column([torch.Size(each.box[1]).numel() * itemsizes[each.kind] for each in boxes])
        total += int(nbytes[box[owner == rank]].sum())
    return total


def _expand(pulled: Sequence[PulledBox], kind_of: Tensor, kinds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Owner, tensor and index of the box, for each box of each tensor."""
    of_kind: list[list[int]] = [[] for _ in range(kinds)]
    for i, box_of_kind in enumerate(pulled):
        of_kind[box_of_kind.kind].append(i)
    flat = column(list(chain.from_iterable(of_kind)))
    which, tensor = expand(column([len(some) for some in of_kind]), kind_of)
    box = flat[which]
    owner_lists = [box_of_kind.owners for box_of_kind in pulled]
    first = column([0, *map(len, owner_lists)]).cumsum(0)
    owners = column(list(chain.from_iterable(owner_lists)))
    return owners[first[box] + tensor % first.diff()[box]], tensor, box


def fitting_senders(
    senders: Sequence[int], outlines: Mapping[int, Outline], firsts: Sequence[int], wanted: Sequence[torch.dtype]
) -> list[list[int]]:
    """Senders whose local tensors of each kind have the dtype of the tensors: those of others are converted twice.

    Args:
        firsts: the first tensor of each kind.
        wanted: the dtype of each kind.
    """
    found = []
    for first, dtype in zip(firsts, wanted, strict=True):
        numbers = [(rank, int(outlines[rank].class_of[first])) for rank in senders]
        held = [(rank, number, outlines[rank]) for rank, number in numbers if number != NO_PART]
        found.append([rank for rank, number, of in held if of.dtypes[number] == dtype and not of.mixed[number]])
    return found
