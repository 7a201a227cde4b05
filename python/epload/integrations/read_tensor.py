"""Reads a checkpoint's tensor in full."""

from __future__ import annotations

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.core.pieces import Piece


def read_tensor(checkpoint: Checkpoint, number: int) -> Tensor:
    """Returns the tensor of this number in the manifest, on CPU."""
    manifest = checkpoint.manifest
    tensor = torch.empty(manifest.shapes[number], dtype=manifest.dtypes[number], device="cpu")
    if tensor.numel():
        checkpoint.fill(tensor.view(-1).view(torch.uint8), [Piece(number, 0, 0, tensor.nbytes)])
    return tensor
