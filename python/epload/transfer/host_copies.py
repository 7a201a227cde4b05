"""Copies tensors into host memory, from where they are sent or written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from epload.native import ops

_ALIGNMENT = 64


def host_memory_for(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns uninitialized tensors of the same shapes and dtypes in host memory. Those for tensors on a device lie in one pinned
    block."""
    begins, sizes = list[int](), Counter[torch.device]()
    for tensor in tensors:
        begins.append(sizes[tensor.device])
        sizes[tensor.device] += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    blocks = {device: ops.pinned_memory(max(nbytes, 1), device) for device, nbytes in sizes.items() if device.type != "cpu"}
    return [
        torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if tensor.is_cpu
        else blocks[tensor.device][begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for begin, tensor in zip(begins, tensors, strict=True)
    ]


def copy_to_host(tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    """Copies tensors into such memory. Returns when all is there."""
    for tensor, copy in zip(tensors, copies, strict=True):
        copy.copy_(tensor.detach(), non_blocking=True)
    for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
        torch.accelerator.current_stream(device).synchronize()
