"""Reads a model's tensors, version after version: the whole model once, then only that it has not changed."""

from __future__ import annotations

from torch import nn

from epload.mapping.precision import set_dtypes
from epload.model.devices import Devices, devices_of
from epload.model.materialize import cpu_offloaded_ids
from epload.model.modules import Modules
from epload.model.snapshot import Snapshot
from epload.model.targets import Targets, collect


class ModelReader:
    def __init__(self, model: nn.Module, filled: bool) -> None:
        """``filled``: see :func:`epload.model.targets.collect`."""
        self.model = model
        self._filled = filled
        self._snapshot: Snapshot | None = None

    def read(self) -> Targets:
        """The model's targets. Reshards FSDP2 modules.

        Raises:
            ModelMismatch: see :func:`epload.model.targets.collect`.
            ValueError: a tensor is on meta, or tensors are on several accelerators.
        """
        unchanged = self._snapshot.read(self.model, ()) if self._snapshot is not None else None
        if unchanged is not None:
            return unchanged[0]
        modules = Modules(self.model)
        targets, devices = _collect(self.model, modules, self._filled)
        self._snapshot = Snapshot(self.model, modules, targets, devices, ())
        return targets


def read_once(model: nn.Module) -> Targets:
    """Reads a model that is not read again, as :meth:`ModelReader.read` does."""
    return _collect(model, Modules(model), filled=False)[0]


def _collect(model: nn.Module, modules: Modules, filled: bool) -> tuple[Targets, Devices]:
    targets = collect(model, modules=modules, filled=filled)
    set_dtypes(model, modules, targets, None)
    for name, tensor in zip(targets.names, targets.tensors, strict=True):
        if tensor.is_meta:
            raise ValueError(f"{name} is on meta; give the model storage first, for example by loading a checkpoint")
    return targets, devices_of(targets, cpu_offloaded_ids(modules.fsdp_groups), ())
