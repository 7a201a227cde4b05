"""Remembers how a model was read. Reading it again is then a check that nothing has changed, a twentieth of the work.

The check runs no Python code for each of 25,000 modules. It looks at the containers in which modules keep what they own, so these
are held; what would keep the model alive (modules, and through FSDP's state any of them keeps all) is held weakly, and everything
is let go of when the model is. Things are compared by address, which is sound as long as none of those compared has died:
whatever is held weakly says so when it does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sized
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from epload.model import dtensor
from epload.model.devices import Devices
from epload.model.state_entries import loads_itself
from epload.model.targets import Targets, customizes_state, walk
from epload.native.extension import _C


class Snapshot:
    """The targets found in a model, and what has to be unchanged for them to be found again."""

    def __init__(self, model: nn.Module, targets: Targets, devices: Devices, asked: object) -> None:
        """``devices``: those of the targets. ``asked``: whatever else the targets depend on, compared at every reading."""
        self.devices = devices
        """As long as the targets are the same."""
        modules = [module for _, module in walk(model)]
        self._usable = not targets.lost and not targets.aliased and not any(map(_has_a_say, modules))
        if not self._usable:
            return
        self._asked = asked
        self._targets = replace(targets, tensors=[])
        self._sharded = [weakref.ref(module) for module in modules if isinstance(module, FSDPModule)]
        self._parents = [weakref.ref(module) for module in modules if module._modules]
        # Parameters and buffers refer to no module, so that holding these keeps none alive; nor do empty places.
        places: list[dict[str, Any]] = [module._parameters for module in modules]
        places += [module._buffers for module in modules]
        self._owning = [place for place in places if place]
        self._empty: list[Sized] = [place for place in places if not place]
        self._empty += [module._modules for module in modules if not module._modules]
        self._empty += [module._state_dict_hooks for module in modules]
        self._not_saved = [module._non_persistent_buffers_set for module in modules if module._buffers]
        self._not_saved_names = list(map(frozenset, self._not_saved))

        children = [module._modules for module in modules if module._modules]
        self._children = _C.addresses(children)
        # A new parameter at the address of an old one does no harm: tensors are taken from their places at every load, and
        # their layouts and devices compared.
        self._owned, owned = _C.contents(self._owning)
        first = {id(tensor): at for at, tensor in reversed(list(enumerate(owned)))}
        positions = [first[id(tensor)] for tensor in targets.tensors]
        self._positions = None if positions == list(range(len(owned))) else positions
        """Of the targets among what is owned; None if all of it is, in this order."""
        self._seen = dtensor.seen(targets.tensors)
        self._layouts, shards = dtensor.holds(targets.tensors)
        # Held, so that no other name takes the address of one.
        self._names = list(chain.from_iterable((*children, *self._owning)))
        self._ended: list[object] = []
        self._weak = [weakref.ref(it, self._ended.append) for it in chain(modules, shards)]
        self._model = weakref.ref(model, _emptying(self._owning, self._empty))

    def read(self, model: nn.Module, asked: object) -> Targets | None:
        """What collecting the model's targets would give; None if that has to be done."""
        if not self._usable or self._model() is not model or asked != self._asked:
            return None
        for ref in self._sharded:
            module = ref()
            if isinstance(module, FSDPModule):
                module.reshard()
        if self._ended:
            return None
        children = _C.addresses(_C.attributes(self._parents, "_modules"))
        found, owned = _C.contents(self._owning)
        if not (
            children == self._children
            and found == self._owned
            and _C.all_empty(self._empty)
            and self._not_saved == self._not_saved_names
        ):
            return None
        tensors: list[Tensor] = owned if self._positions is None else list(map(owned.__getitem__, self._positions))
        return replace(self._targets, tensors=tensors) if dtensor.seen(tensors) == self._seen else None


def _has_a_say(module: nn.Module) -> bool:
    """Whether what a module owns cannot be told from dicts: it says itself what its state is, or is scripted."""
    owns = (module._modules, module._parameters, module._buffers)
    return (
        customizes_state(module) or bool(loads_itself("", module)) or not all(isinstance(place, dict) for place in owns)
    )


def _emptying(*held: list[Any]) -> Callable[[object], None]:
    def empty(_: object) -> None:
        for each in held:
            each.clear()

    return empty
