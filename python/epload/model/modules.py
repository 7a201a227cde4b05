"""All modules of a model, collected in one walk for everything that a load asks about them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from epload.model import dtensor

NamedModule = tuple[str, nn.Module]
"""A module and the prefix of its tensors' names: its path and a dot, or nothing for the model itself."""


_MAX_PATH = 10_000
"""Characters. Only the path of a module that contains itself is longer."""
_OWN_ATTRIBUTES = frozenset(vars(nn.Module())) | {"_flat_weights"}
"""Names of what every module has, tensors of its own included, and of the views that LSTM and the like set in each forward."""


class Modules:
    """The modules that a model has when this is made."""

    def __init__(self, model: nn.Module) -> None:
        self.named: list[NamedModule] = []
        """Each module under every name it has, parents before children: the order of ``state_dict()``."""
        pending: list[NamedModule] = [("", model)]
        while pending:
            prefix, module = entry = pending.pop()
            self.named.append(entry)
            if not module._modules:
                continue
            if len(prefix) > _MAX_PATH:
                raise ValueError(f"expected modules that do not contain themselves, got one at the path {prefix[:200]}...")
            children = reversed(module._modules.items())
            pending += [(f"{prefix}{name}.", child) for name, child in children if child is not None]

    def attributes_on_meta(self) -> list[str]:
        """Returns the paths of plain attributes, neither parameters nor buffers, that are or contain tensors on meta.

        Not those that each forward sets: by LSTM and the like, and by hooks such as that of ``torch.nn.utils.weight_norm``.
        """
        return [
            prefix + name
            for prefix, module in self.named
            for name, value in vars(module).items()
            if name not in _OWN_ATTRIBUTES and _is_on_meta(value) and not _set_by_hook(module, name)
        ]

    @cached_property
    def unique(self) -> list[nn.Module]:
        """Each module once."""
        return list({id(module): module for _, module in self.named}.values())

    @cached_property
    def classes(self) -> dict[type[nn.Module], str]:
        """The classes of the modules, each with the prefix of one module of it."""
        return {type(module): prefix for prefix, module in self.named}

    @cached_property
    def fsdp(self) -> list[FSDPModule]:
        """The modules that FSDP2 shards, and those around this model that gather parameters of its modules."""
        own = set(map(id, self.unique))
        others = [module for module in dtensor.fsdp_modules() if id(module) not in own]
        outer = [module for module in others if any(id(owner) in own for owner in dtensor.owners_of_parameters(module))]
        return [*outer, *(module for module in self.unique if isinstance(module, FSDPModule))]

    @cached_property
    def fsdp_groups(self) -> list[Any]:
        """FSDP's own objects for what it gathers at once (``FSDPParamGroup``)."""
        return [group for module in self.fsdp for group in dtensor.parameter_groups(module)]

    @cached_property
    def fsdp_parameters(self) -> list[Any]:
        """FSDP's own object for each parameter that it shards (``FSDPParam``)."""
        return [parameter for group in self.fsdp_groups for parameter in group.fsdp_params]

    @cached_property
    def offloaded(self) -> set[int]:
        """The ids of the parameters that FSDP keeps on the CPU."""
        offloading = [group for group in self.fsdp_groups if isinstance(group.offload_policy, CPUOffloadPolicy)]
        return {id(parameter.sharded_param) for group in offloading for parameter in group.fsdp_params}

    def reshard(self) -> None:
        """Reshards what FSDP2 shards: a forward pass leaves the root unsharded, and writes to it would be lost."""
        for module in self.fsdp:
            dtensor.reshard(module)


def _set_by_hook(module: nn.Module, name: str) -> bool:
    return any(getattr(hook, "name", None) == name for hook in module._forward_pre_hooks.values())


def _is_on_meta(value: Any) -> bool:
    """Returns True for a tensor on meta, and for a list, tuple or dict with one."""
    if isinstance(value, Tensor):
        return value.is_meta
    if not isinstance(value, dict | list | tuple):  # most of them
        return False
    parts = value.values() if isinstance(value, dict) else value
    return any(isinstance(part, Tensor) and part.is_meta for part in parts)
