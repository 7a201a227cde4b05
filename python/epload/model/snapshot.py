"""Remembers the targets of a model, so that a reload only checks that the model is unchanged.

Why: collecting the targets of a model of 18,867 parameters and 25,000 modules takes 110 to 130 ms, and the reload
itself 80 ms. The check takes 5 ms with the native functions of ``_C``, which prefetch the small objects that they
visit, and 35 ms in plain Python.

How: the check visits no module. It compares the dicts in which modules keep their children, parameters and buffers: keys and
values, by address. An address identifies an object only while the object lives. So a snapshot
  - holds the dicts of parameters and buffers and all their keys, none of which refers to a module;
  - refers weakly to the modules (through FSDP's state each of them keeps the whole model alive) and to the local tensors of
    DTensors, and is invalid once one of them is freed;
  - releases what it holds when the model is freed.
load_state_dict hooks that are added later are detected as well: such a module has to be loaded through them.
A new parameter may have the address of an old one: tensors are taken from the dicts at every load, and their shapes,
dtypes, devices and layouts are compared (see ``MetadataRecord``). It would not do to refer weakly to the parameters
themselves: ``torch.utils.swap_tensors`` refuses tensors that have weak references.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sized
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from epload.model.devices import Devices
from epload.model.dtensor import MetadataRecord
from epload.model.state_dict import customizes_state, describe_custom_loading, walk_modules
from epload.model.targets import Targets
from epload.native.extension import _C


class Snapshot:
    """The targets of a model, and the state of the model's modules from which they were collected. Not thread-safe."""

    def __init__(self, model: nn.Module, targets: Targets, devices: Devices, options: object) -> None:
        """
        Args:
            targets: just collected from the model.
            devices: of the targets.
            options: everything else that targets and devices depend on.
        """
        modules = [module for _, module in walk_modules(model)]
        self._modules: _ModuleRecord | None = None
        # A module may materialize what is on meta outside its state dict, and aliases depend on addresses of storages.
        if targets.unsaved_meta or targets.has_aliases or not _determine_targets(modules):
            return
        self._modules = _ModuleRecord(model, modules, targets)
        self._options = options
        self._targets = replace(targets, tensors=[])
        self._devices = devices
        self._metadata = MetadataRecord(targets.tensors)
        self._fsdp_modules = [weakref.ref(module) for module in modules if isinstance(module, FSDPModule)]

    def read(self, model: nn.Module, options: object) -> tuple[Targets, Devices] | None:
        """What collecting the targets of the model would give, and their devices.

        Reshards FSDP2 modules, as collecting does. None if the targets must be collected: the model is another one or
        has changed, the options differ, or the model does not allow a snapshot.
        """
        if self._modules is None or self._modules.model() is not model or options != self._options:
            return None
        for reference in self._fsdp_modules:
            module = reference()
            if isinstance(module, FSDPModule):
                module.reshard()
        tensors = self._modules.unchanged_tensors()
        if tensors is None or not self._metadata.matches(tensors):
            return None
        return replace(self._targets, tensors=tensors), self._devices


class _ModuleRecord:
    """The containers of a model's modules and what was in them, to check that they hold the same."""

    def __init__(self, model: nn.Module, modules: list[nn.Module], targets: Targets) -> None:
        self._freed: list[object] = []
        self._references = [weakref.ref(module, self._freed.append) for module in modules]
        self._parents = [weakref.ref(module) for module in modules if module._modules]
        tensor_dicts: list[dict[str, Any]] = [module._parameters for module in modules]
        tensor_dicts += [module._buffers for module in modules]
        self._tensor_dicts = [each for each in tensor_dicts if each]
        self._empty: list[Sized] = [each for each in tensor_dicts if not each]
        self._empty += [module._modules for module in modules if not module._modules]
        self._empty += [module._state_dict_hooks for module in modules]
        self._non_persistent = [module._non_persistent_buffers_set for module in modules if module._buffers]
        self._non_persistent_names = list(map(frozenset, self._non_persistent))
        self.model = weakref.ref(model, _clearing(self._tensor_dicts, self._empty))

        child_dicts = [module._modules for module in modules if module._modules]
        self._child_addresses = _C.addresses(child_dicts)
        self._tensor_addresses, tensors = _C.contents(self._tensor_dicts)
        self._keys = list(chain.from_iterable((*child_dicts, *self._tensor_dicts)))  # kept alive
        self._next_hook_id = RemovableHandle.next_id
        first = {id(tensor): i for i, tensor in reversed(list(enumerate(tensors)))}
        positions = [first[id(tensor)] for tensor in targets.tensors]
        self._positions = None if positions == list(range(len(tensors))) else positions
        """The position of each target among all tensors; None if the targets are all tensors, in this order."""

    def unchanged_tensors(self) -> list[Tensor] | None:
        """The tensors of the targets as they are now, None if a module has changed."""
        if self._freed:
            return None
        child_addresses = _C.addresses(_C.attributes(self._parents, "_modules"))
        tensor_addresses, tensors = _C.contents(self._tensor_dicts)
        if not (
            child_addresses == self._child_addresses
            and tensor_addresses == self._tensor_addresses
            and _C.all_empty(self._empty)
            and self._non_persistent == self._non_persistent_names
            and not self._has_custom_loading()
            and not self._freed
        ):
            return None
        return tensors if self._positions is None else list(map(tensors.__getitem__, self._positions))

    def _has_custom_loading(self) -> bool:
        """Whether a module has got a load_state_dict hook that might change values.

        Takes 31 ms, so it looks only if a hook of any kind was registered in this process since it last looked, as in a
        training step.
        """
        next_hook_id = RemovableHandle.next_id
        if next_hook_id != self._next_hook_id:
            modules = (reference() for reference in self._references)
            if any(describe_custom_loading("", module) for module in modules if module is not None):
                return True
            self._next_hook_id = next_hook_id
        return False


def _determine_targets(modules: list[nn.Module]) -> bool:
    """Whether the containers of the modules determine the targets: no module customizes its state dict or its loading, and all
    containers are dicts, unlike those of TorchScript."""
    return not any(
        customizes_state(module)
        or describe_custom_loading("", module)
        or not all(isinstance(each, dict) for each in (module._modules, module._parameters, module._buffers))
        for module in modules
    )


def _clearing(*lists: list[Any]) -> Callable[[object], None]:
    def clear(_: object) -> None:
        for each in lists:
            each.clear()

    return clear
