"""Tensors in which a version arrives next to those of a target, until it is committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from epload.core.copy_table import byte_view
from epload.core.placement import Box, box_slices
from epload.errors import LoadError, message_of
from epload.native import ops
from epload.planning.holdings import NO_PART, Holdings

TensorLayout = tuple[torch.Size, torch.dtype, torch.device]
"""Shape, dtype and device of a local tensor, which may be known before it exists."""


def layout_of(tensor: Tensor) -> TensorLayout:
    return tensor.shape, tensor.dtype, tensor.device


class Arrival:
    """One tensor for each local tensor of some holdings, on the same device. Those that no version fills have no memory."""

    def __init__(self, holdings: Holdings, layouts: Sequence[TensorLayout]) -> None:
        """
        Raises:
            LoadError: there is not enough memory.
        """
        self._layouts = list(layouts)
        boxes: dict[int, dict[Box, None]] = {}
        for tensor, number in enumerate(holdings.class_of.tolist()):
            for part in holdings.parts[number] if number != NO_PART else ():
                boxes.setdefault(holdings.targets[tensor][part.place], {})[part.within(*part.box)] = None
        self._boxes = boxes
        """The boxes that a version fills, by the number of their local tensor."""
        try:
            self.tensors = [
                torch.empty(shape if i in boxes else (0,), dtype=dtype, device=device)
                for i, (shape, dtype, device) in enumerate(layouts)
            ]
        except torch.OutOfMemoryError as error:
            raise LoadError(
                "stage='device' needs as much memory next to the model as its tensors have; pass stage='host', or 'none' if the "
                f"model is not used meanwhile: {message_of(error)}"
            ) from error

    def copy_into(self, targets: Mapping[int, Tensor], verify: bool) -> None:
        """Copies what has arrived into some of the target's tensors, by number, and nothing else. It is there when this returns.

        Args:
            verify: whether to compare them afterwards.

        Raises:
            LoadError: the tensors are others than when the version came, or differ from what has arrived.
            ValueError: the elements of one do not lie where its strides say; nothing has been copied.
        """
        if any(layout_of(tensor) != self._layouts[i] for i, tensor in targets.items()):
            raise LoadError("the receiver's model has other tensors than when the version came; receive the next one")
        boxes = [(i, box_slices(*box)) for i in targets for box in self._boxes.get(i, ())]
        into, out_of = ([tensors[i].detach()[box] for i, box in boxes] for tensors in (targets, self.tensors))
        nothing = torch.empty(0, 4, dtype=torch.int64, device="cpu")
        for device in {tensor.device for tensor in into}:  # copy_ may leave a tensor in a format of Ascend's own as it was
            there = [tensor for tensor in into if tensor.device == device]
            ops.unpack(torch.empty(0, dtype=torch.uint8, device=device), there, nothing)
        with torch.inference_mode(any(target.is_inference() for target in into)):
            for target, source in zip(into, out_of, strict=True):  # _foreach_copy_ changes bits of NaN on CUDA
                target.copy_(source)
        for device in {tensor.device for tensor in into if not tensor.is_cpu}:
            # The memory of what has arrived is free afterwards, for streams that do not know of this one.
            torch.accelerator.current_stream(device).synchronize()
        for target, source in zip(into, out_of, strict=True) if verify else ():
            if not same_bits(target, source):
                raise LoadError(f"a tensor on {target.device} differs from what has arrived: its memory changes bits")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Returns True if two tensors of one shape and dtype are equal in each bit."""
    return torch.equal(byte_view(a), byte_view(b))
