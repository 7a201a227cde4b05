"""Copies tensors into host memory, from where they are sent or written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epload.native import ops

_ALIGNMENT = 64
_BLOCK_BYTES = 1 << 30
"""Maximum bytes of a block with several tensors: where torch allocates it, it may take twice as many."""


@torch.inference_mode(False)  # threads write to it, which are in no such mode
def host_memory_for(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns uninitialized tensors of the same shapes and dtypes in host memory. Those for tensors on a device are pinned, and
    share blocks."""
    places, sizes = list[tuple[int, int]](), [0]
    for tensor in tensors:
        nbytes = 0 if tensor.is_cpu else -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if sizes[-1] and sizes[-1] + nbytes > _BLOCK_BYTES:
            sizes.append(0)
        places.append((len(sizes) - 1, sizes[-1]))
        sizes[-1] += nbytes
    device = next((tensor.device for tensor in tensors if not tensor.is_cpu), None)
    blocks = [ops.pinned_memory(max(nbytes, 1), device) for nbytes in sizes] if device is not None else []
    return [
        torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if tensor.is_cpu
        else blocks[block][begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for (block, begin), tensor in zip(places, tensors, strict=True)
    ]


def copy_to_host(tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    """Copies tensors into such memory. Returns when all is there."""
    try:
        for tensor, copy in zip(tensors, copies, strict=True):
            copy.copy_(tensor.detach(), non_blocking=True)
    finally:  # after an error, too: the memory may be freed then
        for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
            torch.accelerator.current_stream(device).synchronize()
