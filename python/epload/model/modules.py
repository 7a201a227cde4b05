"""All modules of a model, found in one walk for everything that a load asks about them.

There may be 25,000, which lie all over memory: one pass over them in Python takes 5 to 10 ms, in which it waits for memory.
The native functions of ``_C`` prefetch, and read all attributes of a module while it is in the cache.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from epload.model import dtensor
from epload.native.extension import _C

NamedModule = tuple[str, nn.Module]
"""A module and the prefix of its tensors' names: its path and a dot, or nothing for the model itself."""


class Containers(NamedTuple):
    """What modules keep, one entry for each module in each column."""

    children: list[dict[str, nn.Module | None]]
    parameters: list[dict[str, nn.Parameter | None]]
    buffers: list[dict[str, Tensor | None]]
    non_persistent: list[set[str]]
    """Names of buffers that are not in the state dict."""
    state_dict_hooks: list[dict[int, Any]]
    load_pre_hooks: list[dict[int, Any]]
    load_post_hooks: list[dict[int, Any]]

    @staticmethod
    def of(modules: list[nn.Module]) -> Containers:
        return Containers(*_C.attributes(modules, _ATTRIBUTES))


_ATTRIBUTES = [
    "_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "_state_dict_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
]  # fmt: skip
"""Of the columns, in their order."""


class Modules:
    """The modules of a model when it was made."""

    def __init__(self, model: nn.Module) -> None:
        self.prefixes, self.all = _C.find_modules(model)
        """Each module under every name it has, parents before children: the order of ``state_dict()``."""

    @property
    def named(self) -> list[NamedModule]:
        return list(zip(self.prefixes, self.all, strict=True))

    @cached_property
    def unique(self) -> list[nn.Module]:
        """Each module once."""
        if len(set(self.all)) == len(self.all):
            return self.all
        return list({id(module): module for module in self.all}.values())

    @cached_property
    def containers(self) -> Containers:
        """Of :attr:`all`."""
        return Containers.of(self.all)

    @cached_property
    def unique_containers(self) -> Containers:
        """Of :attr:`unique`."""
        return self.containers if self.unique is self.all else Containers.of(self.unique)

    @cached_property
    def classes(self) -> dict[type[nn.Module], str]:
        """The classes of the modules, each with the prefix of one module of it."""
        return dict(zip(map(type, self.all), self.prefixes, strict=True))

    @cached_property
    def fsdp(self) -> list[FSDPModule]:
        """Those that FSDP2 shards."""
        sharded = {cls for cls in self.classes if issubclass(cls, FSDPModule)}
        return [module for module in self.unique if type(module) in sharded]  # type: ignore[misc]

    @cached_property
    def fsdp_groups(self) -> list[Any]:
        """FSDP's own objects for what it gathers at once (``FSDPParamGroup``)."""
        return [group for module in self.fsdp for group in dtensor.parameter_groups(module)]

    @cached_property
    def fsdp_parameters(self) -> list[Any]:
        """FSDP's own object for each parameter that it shards (``FSDPParam``)."""
        return [parameter for group in self.fsdp_groups for parameter in group.fsdp_params]
