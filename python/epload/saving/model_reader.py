"""Reads the tensors of a model that is saved or synchronized."""

from __future__ import annotations

from torch import nn

from epload.mapping.precision import set_dtypes
from epload.mapping.wrappers import is_from_package, unwrap
from epload.model.devices import devices_of
from epload.model.expert_parallel import planned_shards, remembered
from epload.model.initialization import is_adapter
from epload.model.megatron import MegatronChunks
from epload.model.modules import Modules
from epload.model.snapshot import Snapshot
from epload.model.targets import Targets, collect


class ModelReader:
    """Reads one model, again and again: only what has changed since is collected anew."""

    def __init__(self, model: nn.Module, filled: bool = False, own_names: bool = False) -> None:
        """``filled``, ``own_names``: see :func:`epload.model.targets.collect`."""
        self.model = model
        self._filled, self._own_names = filled, own_names
        self._snapshot: Snapshot | None = None
        self.has_adapters = False
        """True if a module is of PEFT, or a layer of another library's adapters, once :meth:`read` was called."""

    def read(self) -> Targets:
        """Returns the model's targets. Reshards FSDP2 modules.

        Raises:
            ModelMismatch: see :func:`epload.model.targets.collect`; or Megatron has not gathered the parameters.
            ValueError: a tensor is on meta, or tensors are on several accelerators.
        """
        if isinstance(self.model, MegatronChunks):
            self.model.check_gathered(filled=False)
        inner = unwrap(self.model, ())[0]
        parts = planned_shards(self.model, inner)
        options = parts, remembered()
        state = self._snapshot.read(self.model, options) if self._snapshot is not None else None
        if state is not None:
            return state[0]
        modules = Modules(self.model)
        self.has_adapters = any(is_adapter(module) or is_from_package(module, "peft") for module in modules.unique)
        targets = collect(self.model, parts, modules, self._filled, self._own_names, loaded=True)
        set_dtypes(self.model, modules, targets, None)
        for name, tensor in zip(targets.names, targets.tensors, strict=True):
            if tensor.is_meta:
                raise ValueError(f"{name} is on meta; give the model storage first, for example by loading a checkpoint")
        devices = devices_of(targets, modules.offloaded, ())
        self._snapshot = Snapshot(self.model, modules, targets, devices, options)
        return targets
