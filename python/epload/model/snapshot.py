"""Keeps the targets of a model, so that a reload only checks that the model still has the same tensors."""

from __future__ import annotations

import weakref
from dataclasses import replace

from torch import nn
from torch.utils.hooks import RemovableHandle

from epload.model import dtensor
from epload.model.devices import Devices
from epload.model.modules import Modules
from epload.model.state_dict import NamedTensor, custom_modules, own_tensors
from epload.model.targets import Targets


class Snapshot:
    """The targets of a model, and the tensors from which they were collected. Not thread-safe.

    Tensors are identified by name, id and metadata, since another tensor may get the id of one that was freed. They are not
    referred to: that would keep memory alive, and ``torch.utils.swap_tensors`` refuses tensors that have weak references."""

    def __init__(self, model: nn.Module, modules: Modules, targets: Targets, devices: Devices, options: object) -> None:
        """
        Args:
            modules: of the model, whose targets have been collected from them.
            targets: meta tensors among them have been replaced since, in the model and here; nothing else has changed.
            devices: of the targets.
            options: everything else that targets and devices depend on.
        """
        self._model, self._options = weakref.ref(model), options
        self._is_usable = False
        # Aliases depend on addresses of storages, and modules that customize their state dict may return anything.
        if targets.has_aliases or not targets.plain or any(tensor.is_meta for tensor in targets.tensors):
            return
        saved, unsaved = own_tensors(modules)
        if any(tensor.is_meta for _, tensor in unsaved):
            return
        self._is_usable = True
        self._next_hook_id, self._classes = RemovableHandle.next_id, set(modules.classes)
        self._tensors = _identity(saved, unsaved)
        position = {id(tensor): i for i, (_, tensor) in enumerate(saved)}
        self._positions = [position[id(tensor)] for tensor in targets.tensors]
        # Buffers that were on meta have storage now.
        self._targets = replace(targets, tensors=[], unsaved_meta={}, unsaved_buffers={name for name, _ in unsaved})
        self._devices = devices._replace(has_meta=False)

    def read(self, model: nn.Module, options: object) -> tuple[Targets, Devices] | None:
        """Returns the targets that collecting from the model would give, and their devices.

        Reshards FSDP2 modules, as collecting does. None if the targets must be collected: the model is another one or
        has changed, the options differ, or the model does not allow a snapshot.
        """
        if not self._is_usable or self._model() is not model or options != self._options:
            return None
        modules = Modules(model)
        modules.reshard()
        # Looking at all hooks takes as long as all else; a training step registers some.
        if self._next_hook_id != RemovableHandle.next_id or self._classes != set(modules.classes):
            if any(custom_modules(modules)):
                return None
            self._next_hook_id, self._classes = RemovableHandle.next_id, set(modules.classes)
        saved, unsaved = own_tensors(modules)
        if _identity(saved, unsaved) != self._tensors:
            return None
        return replace(self._targets, tensors=[saved[i][1] for i in self._positions]), self._devices


def _identity(saved: list[NamedTensor], unsaved: list[NamedTensor]) -> tuple[object, ...]:
    tensors = [tensor for _, tensor in saved]
    names = [name for name, _ in saved]
    return names, [*map(id, tensors)], dtensor.metadata(tensors), {name: tensor.is_meta for name, tensor in unsaved}
