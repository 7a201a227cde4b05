"""Reads many DTensors fast, from their private attributes on the torch minors this was tried with, else by the public API.

Both ways give equal answers (tested); the public one costs 5 us a tensor, which is 0.1 s for a model of 18,867.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from epload import _C

_PRIVATE_TRIED = {(2, 13), (2, 14)}


def private_path_available() -> bool:
    """Whether this torch is one the private paths were tried with."""
    minor = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return minor in _PRIVATE_TRIED


def local_tensors(tensors: list[Tensor], private: bool | None = None) -> list[Tensor]:
    """What ``to_local()`` gives without a gradient; plain tensors detached. They alias the model's storage."""
    private = private_path_available() if private is None else private
    with torch.no_grad():
        if not private:
            return [_local(t) for t in tensors]
        found, others = _C.values(tensors, DTensor._local_tensor)
        for i in others:
            found[i] = _local(tensors[i])
        return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def seen(tensors: list[Tensor], private: bool | None = None) -> object:
    """Something that is equal for the same tensors as long as shapes, dtypes, layouts and devices are unchanged, and none of
    what :func:`holds` gives has died."""
    private = private_path_available() if private is None else private
    if not private:
        return [_facts(t) for t in tensors]
    layouts, others = _C.held(tensors, DTensor._spec)
    shards, _ = _C.held(tensors, DTensor._local_tensor)
    return layouts, shards, [_facts(tensors[i]) for i in others]


def holds(tensors: Sequence[Tensor], private: bool | None = None) -> tuple[list[object], list[Tensor]]:
    """What DTensors hold that :func:`seen` knows by its address: layouts, of which none refers to a tensor, and local tensors."""
    private = private_path_available() if private is None else private
    made = [t for t in tensors if type(t) is DTensor] if private else []
    return [t._spec for t in made], [t._local_tensor for t in made]


def _facts(t: Tensor) -> tuple[object, ...]:
    if isinstance(t, DTensor):
        return t.shape, t.dtype, t.device, t.placements, t.device_mesh
    return t.shape, t.dtype, t.device
