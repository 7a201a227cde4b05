"""Reads many DTensors fast, from their private attributes on the torch minors this was tried with, else by the public API.

Both ways give equal answers (tested); the public one costs 5 us a tensor, which is 0.1 s for a model of 18,867.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_PRIVATE_TRIED = {(2, 13), (2, 14)}


def private_path_available() -> bool:
    """Whether this torch is one the private paths were tried with."""
    minor = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return minor in _PRIVATE_TRIED


def local_tensors(tensors: Sequence[Tensor], private: bool | None = None) -> list[Tensor]:
    """What ``to_local()`` gives without a gradient; plain tensors detached. They alias the model's storage."""
    private = private_path_available() if private is None else private
    with torch.no_grad():
        if private:
            return [t._local_tensor if type(t) is DTensor else _local(t) for t in tensors]
        return [_local(t) for t in tensors]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def specs(tensors: Sequence[Tensor], private: bool | None = None) -> list[object]:
    """For each tensor something that is the same object, or equal, as long as its shape, dtype and layout are unchanged."""
    private = private_path_available() if private is None else private
    if private:
        return [t._spec if type(t) is DTensor else (t.shape, t.dtype, t.device) for t in tensors]
    return [
        (t.shape, t.dtype, t.device, t.placements, t.device_mesh)
        if isinstance(t, DTensor)
        else (t.shape, t.dtype, t.device)
        for t in tensors
    ]
