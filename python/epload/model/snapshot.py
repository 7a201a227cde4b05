"""Remembers the targets of a model, so that a reload only checks that the model is unchanged.

Why: collecting the targets of a model of 18,867 parameters and 25,000 modules takes 110 to 130 ms, and the reload
itself 80 ms. The check takes 5 ms with the native functions of ``_C``, which prefetch the small objects that they
visit, and 35 ms in plain Python.

When: at the end of the load that has collected the targets, when storage has taken the place of meta tensors.

How: the check visits no module. It compares the dicts in which modules keep their children, parameters and buffers: keys and
values, by address. An address identifies an object only while the object lives. So a snapshot
  - holds the dicts of parameters and buffers and all their keys, none of which refers to a module;
  - refers weakly to the modules (through FSDP's state each of them keeps the whole model alive) and to the local tensors of
    DTensors, and is invalid once one of them is freed;
  - releases what it holds when the model is freed.
load_state_dict hooks that are added later are detected as well: a module with one that may change values is refused.
A new parameter may have the address of an old one: tensors are taken from the dicts at every load, and their shapes,
dtypes, devices and layouts are compared (see ``MetadataRecord``). It would not do to refer weakly to the parameters
themselves: ``torch.utils.swap_tensors`` refuses tensors that have weak references.
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
from epload.model.modules import Containers, Modules
from epload.model.state_dict import describe_custom_loading
from epload.model.targets import Targets
from epload.native.extension import _C


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
        containers = modules.unique_containers
        if targets.has_aliases or not targets.plain or not _are_dicts(containers) or _have_meta_buffers(containers):
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
        """What collecting the targets of the model would give, and their devices.

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
    """The containers of a model's modules and what was in them, to check that they hold the same."""

    def __init__(self, model: nn.Module, modules: Modules, targets: Targets) -> None:
        """Raises KeyError if a target is not a tensor of one of the modules."""
        unique, containers = modules.unique, modules.unique_containers
        parents, with_buffers = _C.nonempty(containers.children), _C.nonempty(containers.buffers)
        self._freed: list[object] = []
        self._references = [weakref.ref(module, self._freed.append) for module in unique]
        self._parents = [weakref.ref(unique[i]) for i in parents]
        tensor_dicts: list[Any] = containers.parameters + containers.buffers
        self._tensor_dicts = [tensor_dicts[i] for i in _C.nonempty(tensor_dicts)]
        self._empty = _without(tensor_dicts, _C.nonempty(tensor_dicts)) + _without(containers.children, parents)
        self._empty += containers.state_dict_hooks
        self._non_persistent = [containers.non_persistent[i] for i in with_buffers]
        self._non_persistent_names = list(map(frozenset, self._non_persistent))
        self.model = weakref.ref(model, _clearing(self._tensor_dicts, self._empty))

        child_dicts = [containers.children[i] for i in parents]
        self._child_addresses = _C.dict_addresses(child_dicts)
        self._tensor_addresses, tensors = _C.dict_contents(self._tensor_dicts)
        self._keys = list(chain.from_iterable((*child_dicts, *self._tensor_dicts)))  # kept alive
        self._next_hook_id = RemovableHandle.next_id
        self._positions: list[int] | None = None
        """The position of each target among all tensors; None if the targets are all tensors, in this order."""
        ids = list(map(id, tensors))
        if ids != list(map(id, targets.tensors)):
            first = {number: i for i, number in reversed(list(enumerate(ids)))}
            self._positions = [first[id(tensor)] for tensor in targets.tensors]

    def unchanged_tensors(self) -> list[Tensor] | None:
        """The tensors of the targets as they are now, None if a module has changed."""
        if self._freed:
            return None
        child_addresses = _C.dict_addresses(_C.weakref_attributes(self._parents, "_modules"))
        tensor_addresses, tensors = _C.dict_contents(self._tensor_dicts)
        if not (
            child_addresses == self._child_addresses
            and tensor_addresses == self._tensor_addresses
            and not _C.nonempty(self._empty)
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


def _without(items: list[Any], places: list[int]) -> list[Any]:
    """The items that are not at these places, which are in ascending order."""
    rest = []
    for begin, end in zip([0, *(place + 1 for place in places)], [*places, len(items)], strict=True):
        rest += items[begin:end]
    return rest


def _are_dicts(containers: Containers) -> bool:
    """Whether all containers are dicts, unlike those of TorchScript."""
    kinds = {*map(type, containers.children), *map(type, containers.parameters), *map(type, containers.buffers)}
    return all(issubclass(kind, dict) for kind in kinds)


def _have_meta_buffers(containers: Containers) -> bool:
    """Whether a non-persistent buffer is on meta."""
    owners = [(containers.buffers[i], containers.non_persistent[i]) for i in _C.nonempty(containers.non_persistent)]
    found = [buffers.get(name) for buffers, names in owners for name in names]
    return any(buffer is not None and buffer.is_meta for buffer in found)


def _clearing(*lists: list[Any]) -> Callable[[object], None]:
    def clear(_: object) -> None:
        for each in lists:
            each.clear()

    return clear
