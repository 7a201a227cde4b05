"""Keeps the targets of a model, so that a reload only checks that the model is unchanged.

Why: collecting the targets of a model of 18,867 parameters and 25,000 modules takes as long as the reload itself. The check takes
a tenth of that.

When: at the end of the load that has collected the targets, when storage has taken the place of meta tensors.

How: the check compares the dicts in which modules keep their children, parameters and buffers: keys, and ids of values.
An id identifies an object only while the object lives. So a snapshot
  - holds the dicts of parameters and buffers, none of which refers to a module;
  - refers weakly to the modules (through FSDP's state each of them keeps the whole model alive) and to the local tensors of
    DTensors, and is invalid once one of them is freed;
  - releases what it holds when the model is freed.
load_state_dict hooks that are added later are detected as well: a module with one that may change values is refused.
A new parameter may get the id of an old one: tensors are taken from the dicts at every load, and their shapes, dtypes, devices
and layouts are compared (see ``MetadataRecord``). The snapshot does not refer weakly to the parameters themselves, since
``torch.utils.swap_tensors`` refuses tensors that have weak references.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from epload.model.devices import Devices
from epload.model.dtensor import MetadataRecord
from epload.model.modules import Modules
from epload.model.state_dict import describe_custom_loading
from epload.model.targets import Targets


class Snapshot:
    """The targets of a model, and the state of the model's modules from which they were collected. Not thread-safe."""

    def __init__(self, model: nn.Module, modules: Modules, targets: Targets, devices: Devices, options: object) -> None:
        """
        Args:
            modules: of the model, whose targets have been collected from them.
            targets: meta tensors among them have been replaced since, in the model and here; nothing else has changed.
            devices: of the targets.
            options: everything else that targets and devices depend on.
        """
        self._modules: _ModuleRecord | None = None
        # Aliases depend on addresses of storages, and modules that customize their state dict may return anything.
        if targets.has_aliases or not targets.plain or not _are_dicts(modules) or _have_meta_buffers(modules):
            return
        self._modules = _ModuleRecord(model, modules, targets)
        self._options = options
        # Buffers that were on meta have storage now.
        names = targets.unsaved_buffers | targets.unsaved_meta.keys()
        self._targets = replace(targets, tensors=[], unsaved_meta={}, unsaved_buffers=names)
        self._devices = devices._replace(has_meta=False)
        self._metadata = MetadataRecord(targets.tensors)
        self._fsdp_modules: list[weakref.ref[Any]] = list(map(weakref.ref, modules.fsdp))

    def read(self, model: nn.Module, options: object) -> tuple[Targets, Devices] | None:
        """Returns the targets that collecting from the model would give, and their devices.

        Reshards FSDP2 modules, as collecting does. None if the targets must be collected: the model is another one or
        has changed, the options differ, or the model does not allow a snapshot.
        """
        if self._modules is None or self._modules.model() is not model or options != self._options:
            return None
        for reference in self._fsdp_modules:
            module = reference()
            if module is not None:
                module.reshard()
        tensors = self._modules.unchanged_tensors()
        if tensors is None or not self._metadata.matches(tensors):
            return None
        return replace(self._targets, tensors=tensors), self._devices


class _ModuleRecord:
    """The dicts of a model's modules and what was in them, to check that they hold the same."""

    def __init__(self, model: nn.Module, modules: Modules, targets: Targets) -> None:
        """Raises KeyError if a target is not a tensor of one of the modules."""
        unique = modules.unique
        self._freed: list[object] = []
        self._references = [weakref.ref(module, self._freed.append) for module in unique]
        self._parents = [weakref.ref(module) for module in unique if module._modules]
        self._tensor_dicts: list[Any] = [m._parameters for m in unique if m._parameters]
        self._tensor_dicts += [m._buffers for m in unique if m._buffers]
        self._empty: list[Any] = [m._modules for m in unique if not m._modules]
        self._empty += [m._parameters for m in unique if not m._parameters]
        self._empty += [m._buffers for m in unique if not m._buffers]
        self._empty += [m._state_dict_hooks for m in unique]
        self._non_persistent = [
            (m._non_persistent_buffers_set, {*m._non_persistent_buffers_set}) for m in unique if m._buffers
        ]
        self.model = weakref.ref(model, _clearing(self._tensor_dicts, self._empty))

        self._children = self._read_children()
        self._names, self._ids, _ = self._read_tensors()
        self._next_hook_id = RemovableHandle.next_id
        first = {number: i for i, number in reversed(list(enumerate(self._ids)))}
        self._positions = [first[id(tensor)] for tensor in targets.tensors]
        """The position of each target among all tensors."""

    def unchanged_tensors(self) -> list[Tensor] | None:
        """Returns the tensors of the targets as they are now, None if a module has changed."""
        if self._freed:
            return None
        names, ids, tensors = self._read_tensors()
        if not (
            ids == self._ids
            and names == self._names
            and self._read_children() == self._children
            and not any(self._empty)
            and all(now == then for now, then in self._non_persistent)
            and not self._has_custom_loading()
            and not self._freed
        ):
            return None
        return [tensors[i] for i in self._positions]

    def _read_children(self) -> tuple[list[str], list[int]]:
        """Returns the names and the ids of the children of all modules."""
        dicts = [module._modules for reference in self._parents if (module := reference()) is not None]
        return list(chain.from_iterable(dicts)), list(map(id, chain.from_iterable(map(dict.values, dicts))))

    def _read_tensors(self) -> tuple[list[str], list[int], list[Any]]:
        """Returns the names of all tensors in their dicts, their ids, and the tensors or None."""
        tensors = list(chain.from_iterable(map(dict.values, self._tensor_dicts)))
        return list(chain.from_iterable(self._tensor_dicts)), list(map(id, tensors)), tensors

    def _has_custom_loading(self) -> bool:
        """Returns True if a module has got a load_state_dict hook that might change values.

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


def _are_dicts(modules: Modules) -> bool:
    """Returns True if all modules keep their children and tensors in dicts, unlike those of TorchScript."""
    kinds = {kind for m in modules.unique for kind in (type(m._modules), type(m._parameters), type(m._buffers))}
    return all(issubclass(kind, dict) for kind in kinds)


def _have_meta_buffers(modules: Modules) -> bool:
    """Returns True if a non-persistent buffer is on meta."""
    return any(
        buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set
        for module in modules.unique
        for name, buffer in module._buffers.items()
    )


def _clearing(*lists: list[Any]) -> Callable[[object], None]:
    def clear(_: object) -> None:
        for each in lists:
            each.clear()

    return clear
