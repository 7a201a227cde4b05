"""VeOmni's ``rank0_load_and_broadcast_weights``."""

from __future__ import annotations

import logging
import re
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from epload.loader import load
from epload.parts import OuterShard

_log = logging.getLogger(__name__)
_THEIRS = ("is_peft_model", "adapter_path", "fqn_to_index_mapping")
"""Keyword arguments of the original that are none of ``epload.load``."""


def rank0_load_and_broadcast_weights(
    model: nn.Module,
    weights_path: str,
    init_device: str = "cuda",
    dtensor_factory: Any = None,
    cpu_load_param_name: list[str] | None = None,
    max_load_broadcast_size: float = 20.0,
    **kwargs: Any,
) -> None:
    """As VeOmni's: rank 0 reads ``weights_path``, and every rank gets its part. Only rank 0 needs to have the files.

    Which tensors are one rank's experts is read from what VeOmni's parallel plan has left on the model. The model knows
    where its tensors lie and that it is PEFT's, no DTensor is made, no large tensor is treated apart, and what is for a later
    save is worked out there if need be: the arguments from ``init_device`` on, ``is_peft_model`` and ``fqn_to_index_mapping``
    are not looked at. Parameters that the checkpoint lacks are initialised, as there, by the model (``_init_weights``) or
    the LoRA layer; they and unexpected keys are logged.

    Args:
        kwargs: further, options of :func:`epload.load`: ``init_missing``, ``strict``, ``outer_shards`` in place of the
            plan's, and so on.

    Raises:
        ValueError: ``adapter_path`` is given: an adapter is loaded by itself, afterwards.
        ModelMismatch: a tensor of another shape, or one that is missing and that the model cannot initialise; on every
            rank, nothing has moved.
    """
    if kwargs.get("adapter_path") is not None:
        raise ValueError(
            f"expected adapter_path=None, got {kwargs['adapter_path']!r}: this loads base weights; load the adapter after them"
        )
    options = {name: value for name, value in kwargs.items() if name not in _THEIRS}
    options.setdefault("outer_shards", planned_shards(model))
    options.setdefault("strict", "shapes")
    report = load(model, weights_path, **{"readers": "one", "progress": False} | options)
    if not dist.is_initialized() or dist.get_rank() == 0:
        for what, names in (("missing, initialised", report.missing_keys), ("unexpected", report.unexpected_keys)):
            if names:
                _log.warning("%s: %d %s: %s", weights_path, len(names), what, ", ".join(names[:10]))


def planned_shards(model: nn.Module) -> list[OuterShard]:
    """One for each mesh and dim of the parameters that VeOmni's plan has cut before FSDP did.

    The plan leaves ``model._fqn2spec_info``: for each name a ``placement`` and, if it is a shard, the ``para_mesh`` it is on.
    """
    cut: dict[tuple[DeviceMesh, int], list[str]] = {}
    for name, spec in getattr(model, "_fqn2spec_info", {}).items():
        if (dim := getattr(spec.placement, "dim", None)) is not None and spec.para_mesh is not None:
            cut.setdefault((spec.para_mesh, dim), []).append(name)
    return [OuterShard(f"^({'|'.join(map(re.escape, names))})$", mesh, dim) for (mesh, dim), names in cut.items()]
