"""VeOmni's ``rank0_load_and_broadcast_weights``."""

from __future__ import annotations

from typing import Any

from torch import nn

from epload.loader import load


def rank0_load_and_broadcast_weights(
    model: nn.Module, weights_path: str, init_device: str = "cuda", dtensor_factory: Any = None, **kwargs: Any
) -> None:
    """As VeOmni's: rank 0 reads ``weights_path``, and every rank gets its part. Only rank 0 needs to have the files.

    The model knows where its tensors lie, so ``init_device`` is not looked at, and no DTensor is made, so neither is
    ``dtensor_factory``. ``kwargs`` are those of :func:`epload.load`: ``outer_shards`` for experts whose shape is already
    that of one rank's, ``strict`` and ``init_missing`` for tensors that the checkpoint does not hold, which are an error
    here and initialised there.
    """
    load(model, weights_path, progress=False, **kwargs)
