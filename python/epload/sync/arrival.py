"""Tensors in which a version arrives next to those of a target, until it is committed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epload.core.copy_table import byte_view
from epload.core.placement import Box, box_slices
from epload.errors import LoadError, message_of
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
        boxes: dict[tuple[int, Box], None] = {}
        for tensor, number in enumerate(holdings.class_of.tolist()):
            for part in holdings.parts[number] if number != NO_PART else ():
                boxes[holdings.targets[tensor][part.place], part.within(*part.box)] = None
        self._filled = list(boxes)
        """The boxes that a version fills, each with the number of its local tensor."""
        filled = {number for number, _ in boxes}
        try:
            self.tensors = [
                torch.empty(shape if i in filled else (0,), dtype=dtype, device=device)
                for i, (shape, dtype, device) in enumerate(layouts)
            ]
        except torch.OutOfMemoryError as error:
            raise LoadError(
                "stage='device' needs as much memory next to the model as its tensors have; pass stage='host', or 'none' if the "
                f"model is not used meanwhile: {message_of(error)}"
            ) from error

    def copy_into(self, targets: Sequence[Tensor], verify: bool) -> None:
        """Copies what has arrived into the target's tensors, and nothing else. It is there when this returns.

        Args:
            verify: whether to compare them afterwards.

        Raises:
            LoadError: the tensors are others than when the version came, or differ from what has arrived.
        """
        if list(map(layout_of, targets)) != self._layouts:
            raise LoadError("the receiver's model has other tensors than when the version came; receive the next one")
        into, out_of = ([tensors[i].detach()[box_slices(*box)] for i, box in self._filled] for tensors in (targets, self.tensors))
        with torch.inference_mode(any(target.is_inference() for target in into)):
            if into:
                torch._foreach_copy_(into, out_of)
        for device in {device for *_, device in self._layouts if device.type != "cpu"}:
            # The memory of what has arrived is free afterwards, for streams that do not know of this one.
            torch.accelerator.current_stream(device).synchronize()
        for target, source in zip(into, out_of, strict=True) if verify else ():
            if not same_bits(target, source):
                raise LoadError(f"a tensor on {target.device} differs from what has arrived: its memory changes bits")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Returns True if two tensors of one shape and dtype are equal in each bit."""
    return torch.equal(byte_view(a), byte_view(b))
