"""Reads the tensors of a model that is saved or synchronized."""

from __future__ import annotations

from torch import nn

from epload.mapping.precision import set_dtypes
from epload.model.devices import devices_of
from epload.model.materialize import cpu_offloaded_ids
from epload.model.modules import Modules
from epload.model.targets import Targets, collect


def read_targets(model: nn.Module, filled: bool = False) -> Targets:
    """Returns the model's targets. Reshards FSDP2 modules.

    ``filled``: see :func:`epload.model.targets.collect`, which also says when this raises ModelMismatch. Raises ValueError if a
    tensor is on meta, or tensors are on several accelerators."""
    modules = Modules(model)
    targets = collect(model, modules=modules, filled=filled)
    set_dtypes(model, modules, targets, None)
    for name, tensor in zip(targets.names, targets.tensors, strict=True):
        if tensor.is_meta:
            raise ValueError(f"{name} is on meta; give the model storage first, for example by loading a checkpoint")
    devices_of(targets, cpu_offloaded_ids(modules.fsdp_groups), ())
    return targets
