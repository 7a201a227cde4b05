"""Expert parallelism that a model does not describe itself: this rank's tensors are a shard of something larger, or it has
modules for its experts only. The caller describes both when loading, and what is loaded is saved and sent as it says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from epload.core.patterns import check_expressions
from epload.core.placement import Layout, Sharded
from epload.errors import ModelMismatch
from epload.model import dtensor
from epload.model.memory import storage_of
from epload.observe.render import list_first


@dataclass(frozen=True)
class OuterShard:
    """Tensors that are one rank's equal shard, along ``dim``, of a larger tensor, although their own layout does not say so.

    A parameter of shape [E / ep, ...], plain or sharded further on another mesh, is filled from a tensor of shape [E, ...].
    """

    pattern: str
    """Regular expression, searched for in the tensors' names."""
    mesh: DeviceMesh
    """A 1-d mesh: the ranks that the larger tensor is sharded over."""
    dim: int = 0

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError if the pattern is no regular expression."""
        check_expressions("the pattern of an OuterShard", [self.pattern])

    def enclosing_layout(self, name: str, layout: Layout, coordinate: tuple[int, ...]) -> tuple[Layout, tuple[int, ...]]:
        """Returns the layout of the larger tensor, which this mesh shards first, and this rank's coordinate in it. Raises
        ValueError if the mesh is not 1-d, lacks this rank, or is not in ascending order, or the tensor has no dim ``dim``."""
        mesh_coordinate = self.mesh.get_coordinate()
        if self.mesh.ndim != 1 or mesh_coordinate is None:
            raise ValueError(
                f"expected the mesh of {self} to be 1-d and to include this rank, got shape {tuple(self.mesh.shape)}; "
                "slice one axis of a larger mesh, e.g. mesh['ep']"
            )
        if dtensor.group_rank(self.mesh, 0) != mesh_coordinate[0]:
            raise ValueError(
                f"expected the mesh of {self} to list its ranks in ascending order, as its process group does, got "
                f"{self.mesh.mesh.tolist()}; it is undefined which shard a rank has on such a mesh"
            )
        ndim = len(layout.shape)
        if not -ndim <= self.dim < ndim:
            raise ValueError(f"{self} does not apply to {name}, which has shape {list(layout.shape)}")
        dim, size = self.dim % ndim, self.mesh.size()
        enclosing = Layout(
            (*layout.shape[:dim], layout.shape[dim] * size, *layout.shape[dim + 1 :]),
            (size, *layout.mesh_shape),
            (Sharded(dim), *layout.placements),
        )
        return enclosing, (mesh_coordinate[0], *coordinate)

    def __str__(self) -> str:
        return f"OuterShard({self.pattern!r}, dim={self.dim})"


@dataclass(frozen=True)
class LocalModules:
    """Modules that this rank has and other ranks may lack, such as a list of this rank's experts only.

    Their tensors are not part of what the ranks compare. Every checkpoint tensor that some rank has a module for is sent.
    """

    pattern: str
    """Regular expression, searched for in the tensors' names. Its first group, if any, is the module's local number."""
    first: int = 0
    """Added to the local number to give the number in the checkpoint: 0 if modules are numbered globally, otherwise the global
    number of this rank's first module."""

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError if the pattern is no regular expression."""
        check_expressions("the pattern of LocalModules", [self.pattern])

    def global_name(self, name: str) -> str | None:
        """Returns the name of a tensor in the checkpoint's numbering. None if the pattern does not match."""
        match = re.search(self.pattern, name)
        if match is None or not match.re.groups or match[1] is None or not self.first:
            return match and name
        return f"{name[: match.start(1)]}{int(match[1]) + self.first}{name[match.end(1) :]}"


Parts = Sequence[OuterShard | LocalModules]
"""All that a caller says of one model. For each tensor the first outer shard and the first local modules that match apply."""

_loaded = WeakKeyDictionary[nn.Module, dict[str, tuple[OuterShard | None, torch.Size]]]()
"""The outer shard that each tensor of a module is, as the caller of a load has said, and its shape then; None for one of modules
that a rank numbers itself. Tensors are replaced when a model is moved or sharded, and ``torch.utils.swap_tensors`` refuses those
that have weak references."""
_described = WeakKeyDictionary[nn.Module, dict[tuple[str, torch.Size], list[str]]]()
"""Names of the outer shards in each loaded model, by their last parts and shapes."""
_changes = 0
"""Number of times that a tensor was remembered as something else."""

Loaded = tuple[Mapping[object, OuterShard | None], Sequence[Mapping[tuple[str, torch.Size], Sequence[str]]]]
"""The outer shard that each tensor of a loaded model is, by where its elements are, so that tensors of the model's state dict are
found, too, None for one of modules that a rank numbers itself; and the names of outer shards, by which copies are found."""


def planned_shards(*models: nn.Module) -> Parts:
    """Returns the shards that VeOmni's parallel plan made before FSDP did, one for each mesh and dim, by the first of these
    models that has it.

    The plan sets ``model._fqn2spec_info``, which has each name's ``placement`` and, for a shard, its ``para_mesh``.
    """
    plan: dict[str, Any] = next(filter(None, (getattr(model, "_fqn2spec_info", None) for model in models)), {})
    sharded: dict[tuple[DeviceMesh, int], list[str]] = {}
    for name, spec in plan.items():
        if (dim := getattr(spec.placement, "dim", None)) is not None and spec.para_mesh is not None:
            sharded.setdefault((spec.para_mesh, dim), []).append(name)
    patterns = {key: rf"(^|\.)({'|'.join(map(re.escape, names))})$" for key, names in sharded.items()}
    return tuple(OuterShard(pattern, *key) for key, pattern in patterns.items())


def remember(parts: Parts, model: nn.Module, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Remembers what a load was told of a model's tensors, for saves and senders, which refuse copies of them."""
    global _changes
    name_of = dict(zip(map(id, tensors), names, strict=True))
    for module in model.modules() if parts else ():
        for leaf, tensor in _tensors_of(module).items():
            if tensor is None or (name := name_of.get(id(tensor))) is None:
                continue
            renumbered = any(isinstance(part, LocalModules) and part.first and part.global_name(name) for part in parts)
            loaded = outer_shard(parts, name), tensor.shape
            if (loaded[0] is not None or renumbered) and _loaded.get(module, {}).get(leaf) != loaded:
                _loaded.setdefault(module, {})[leaf] = loaded
                if loaded[0] is not None and loaded[0].mesh.size() > 1:  # its shape tells it from the whole tensor
                    _described.setdefault(model, {}).setdefault((leaf, tensor.shape), []).append(name)
                _changes += 1


def _tensors_of(module: nn.Module) -> dict[str, Tensor | None]:
    return module._parameters | module._buffers


def remembered() -> int:
    """Returns a number that grows when something is remembered."""
    return _changes


def loaded_shards() -> Loaded:
    """Returns what loads and VeOmni's plans say of the tensors in this process. Reshards FSDP2 modules."""
    shards = dict[object, OuterShard | None]()
    for gathers in dtensor.fsdp_modules():
        model: Any = gathers
        plan = planned_shards(model)
        if plan or (_loaded and any(owner in _loaded for owner in dtensor.owners_of_parameters(gathers))):
            dtensor.reshard(gathers)
        for name, parameter in model.named_parameters() if plan else ():
            if (outer := outer_shard(plan, name)) is not None:
                shards[_place_of(parameter)] = outer
    for module, leaves in _loaded.items():
        for leaf, (loaded, shape) in leaves.items():
            if (tensor := _tensors_of(module).get(leaf)) is not None and tensor.shape == shape:
                shards[_place_of(tensor)] = loaded
    return shards, list(_described.values())


def _place_of(tensor: Tensor) -> object:
    local = dtensor.with_memory(tensor)
    return storage_of(local), local.storage_offset(), local.shape, local.stride()


def loaded_as(name: str, tensor: Tensor, loaded: Loaded) -> OuterShard | None:
    """Returns the outer shard that a tensor was loaded as. Raises ModelMismatch for one of modules that each rank numbers itself,
    of which other ranks have others under the same name, and for a copy of such a part."""
    shards, models = loaded
    if not (shards or models) or tensor.layout != torch.strided:
        return None
    if (place := _place_of(tensor)) not in shards:
        key = name.rpartition(".")[2], tensor.shape
        for other in (other for names in models for other in names.get(key, ())):
            if f".{name}".endswith(f".{other}") or f".{other}".endswith(f".{name}"):
                raise ModelMismatch(
                    f"{name} seems to be a copy of a tensor that was loaded as an outer shard ({other}), and would be taken for "
                    "a replica; save or send the model that was loaded, or load the copy with the same LoadOptions"
                )
        return None
    if (outer := shards[place]) is None:
        raise ModelMismatch(
            f"{name} was loaded with LocalModules(first=...): other ranks have other tensors under this name, and would be taken "
            "for replicas; number the modules as in the checkpoint, or stack them in tensors that an OuterShard describes"
        )
    return outer


def outer_shard(parts: Parts, name: str) -> OuterShard | None:
    """Returns the outer shard that a tensor is."""
    return next((part for part in parts if not isinstance(part, LocalModules) and re.search(part.pattern, name)), None)


def global_name(parts: Parts, name: str) -> str | None:
    """See :meth:`LocalModules.global_name`. None for a tensor that is not in local modules."""
    return next(filter(None, (part.global_name(name) for part in parts if isinstance(part, LocalModules))), None)


def check_patterns(parts: Parts, names: Sequence[str]) -> None:
    """Raises ValueError if the pattern of an outer shard matches none of the model's names.

    A pattern for local modules may match nothing: with more ranks than experts, some ranks have none."""
    for part in parts:
        if not isinstance(part, LocalModules) and not any(re.search(part.pattern, name) for name in names):
            raise ValueError(f"{part} matches no tensor of the model, which has {list_first(names)}")
