"""Says where the slots of a node's buckets lie, so that buckets of one plan can be made out of those of another. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from epload.core.placement import Box, row_major_strides
from epload.core.views import Shape, View
from epload.planning.holdings import Holdings, Parts, classify


@dataclass(frozen=True, eq=False)
class BucketLayout:
    """Entry i of each column (int64 [n]) is a box of a tensor that lies packed in a bucket."""

    slots: Sequence[tuple[Box, torch.dtype]]
    """The boxes of tensors that are divided in the same way, and the dtype in which they move."""
    tensor: Tensor
    slot: Tensor
    """Index into ``slots``."""
    bucket: Tensor
    offset: Tensor
    """Offset in the bucket, in bytes."""

    def holdings(self, shapes: Sequence[Shape]) -> Holdings:
        """Returns the holdings of a rank that has each entry as a local tensor. ``shapes``: of all tensors."""
        order = torch.argsort(self.tensor * len(self.slots) + self.slot)
        entries, slots = order.tolist(), [self.slots[slot] for slot in self.slot[order].tolist()]
        spans = list(pairwise([0, *torch.bincount(self.tensor, minlength=len(shapes)).cumsum(0).tolist()]))
        keys = [(shape, *slots[begin:end]) for shape, (begin, end) in zip(shapes, spans, strict=True)]

        def parts_of(tensor: int) -> Parts:
            shape, *own = keys[tensor]
            views = [View.of_box(start, size, shape) for (start, size), _ in own]
            return shape, list(enumerate(views)), {dtype for _, dtype in own}

        return classify(keys, parts_of, [tuple(entries[begin:end]) for begin, end in spans])

    def tensors(self, buckets: Sequence[Tensor]) -> list[Tensor]:
        """Returns the local tensors of these holdings: views of buckets (uint8)."""
        boxes = [(size, row_major_strides(size), dtype) for (_, size), dtype in self.slots]
        elements = cache(lambda number, dtype: _whole_elements(buckets[number], dtype))
        local = []
        for slot, bucket, offset in torch.stack([self.slot, self.bucket, self.offset], 1).tolist():
            size, strides, dtype = boxes[slot]
            whole = elements(bucket, dtype)
            local.append(whole.as_strided(size, strides, whole.storage_offset() + offset // dtype.itemsize))
        return local


def _whole_elements(bucket: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the elements of a dtype that a bucket has from its first byte on. Slots begin at multiples of their size."""
    return bucket[: bucket.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
