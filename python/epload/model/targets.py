"""What a model wants filled: names, layouts, and the local tensors behind them. Reads a model, changes nothing but FSDP's
unsharded state."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Placement as TorchPlacement

from epload.core import dtypes
from epload.core.placement import Layout, Placement, Replicated, Sharded
from epload.errors import ModelMismatch
from epload.model import dtensor, memory_pattern, overlap, state_entries
from epload.model.expert_parallel import OuterShard, Parts
from epload.model.state_entries import Staged

_MAX_SHOWN = 64
"""Ranks of a mesh that an error lists."""


@dataclass(frozen=True)
class Mesh:
    """A device mesh: who stands where."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """Global ranks in row-major order."""

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Mesh:
        return cls(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.ranks[:_MAX_SHOWN]))
        return f"[{shown}{', ...' if len(self.ranks) > _MAX_SHOWN else ''}] of shape {list(self.shape)}"


@dataclass
class Targets:
    """The parameters and persistent buffers of a model, each once. Column i of the lists is target i."""

    names: list[str] = field(default_factory=list)
    """The first name under which the model has it."""
    tensors: list[Tensor] = field(default_factory=list)
    """The model's own objects: DTensors or plain tensors, perhaps on meta."""
    layout: list[int] = field(default_factory=list)
    """Index into ``layouts`` and ``coordinates``."""
    dtypes: list[torch.dtype] = field(default_factory=list)
    """What the model keeps it in, after any dtype= of the load."""
    layouts: list[Layout] = field(default_factory=list)
    coordinates: list[tuple[int, ...]] = field(default_factory=list)
    """This rank's place in the mesh of each layout."""
    meshes: list[Mesh] = field(default_factory=list)
    meshes_of: list[tuple[int, ...]] = field(default_factory=list)
    """Of each layout, the meshes that it is cut along, as indices into ``meshes``."""
    index: dict[str, int] = field(default_factory=dict)
    """Every name, also those of tied tensors, to its target; as all ranks know it, where that differs from the model's."""
    own: set[int] = field(default_factory=set)
    """Targets that other ranks need not have (see ``LocalModules``)."""
    unsaved: set[str] = field(default_factory=set)
    """Non-persistent buffers that have storage. No checkpoint holds them; another rank may lack them."""
    lost: dict[str, Tensor] = field(default_factory=dict)
    """Tensors on meta that the model's state_dict does not have, so that no checkpoint fills them: non-persistent buffers, and
    parameters that a state-dict hook leaves out."""
    staged: tuple[Staged, ...] = ()
    """Modules that are filled through their own load_state_dict."""
    aliased: bool = False
    """Whether different objects of the model are the same memory, which makes them one target."""
    behind: dict[str, Tensor] = field(default_factory=dict)
    """Tensors on meta that only these can fill."""

    known_claims: list[list[tuple[str, Mesh]]] = field(default_factory=list, compare=False)
    """What :meth:`mesh_claims` gave when it was first asked. Shared by copies of these targets, as reloads make them."""

    def mesh_claims(self) -> list[tuple[str, Mesh]]:
        """Each mesh that shared targets are on, with a digest of the mesh and of their names. It is equal on all ranks of the
        mesh if these agree."""
        if not self.known_claims:
            names: dict[int, list[str]] = {}
            for i, (name, layout) in enumerate(zip(self.names, self.layout, strict=True)):
                if i not in self.own:
                    for number in self.meshes_of[layout]:
                        names.setdefault(number, []).append(name)
            claims = []
            for number, its in names.items():
                mesh = self.meshes[number]
                said = "\n".join((repr(mesh), *its)).encode(errors="backslashreplace")
                claims.append((hashlib.blake2b(said, digest_size=12).hexdigest(), mesh))
            self.known_claims.append(claims)
        return self.known_claims[0]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shape by name."""
        return {name: self.layouts[self.layout[i]].shape for name, i in self.index.items()}

    def local(self) -> list[Tensor]:
        """The local tensors, to be written in place. They alias the model's storage."""
        return dtensor.local_tensors(self.tensors)

    def same_as(self, other: Targets) -> bool:
        """Whether a plan made for ``other`` is one for these: all but the tensors themselves are equal."""
        columns = ("names", "layout", "dtypes", "layouts", "coordinates", "index", "own")
        pairs = [(getattr(self, column), getattr(other, column)) for column in columns]
        return all(ours is theirs or ours == theirs for ours, theirs in pairs)

    def describe(self) -> list[str]:
        """A line a target that ranks share, equal on all ranks that want the same."""
        described = [f"{list(x.shape)} on mesh {list(x.mesh_shape)} {_spell(x.placements)}" for x in self.layouts]
        kinds = {dtype: dtypes.name(dtype) for dtype in set(self.dtypes)}
        return [
            f"{name}: {kinds[dtype]} {described[layout]}"
            for i, (name, dtype, layout) in enumerate(zip(self.names, self.dtypes, self.layout, strict=True))
            if i not in self.own
        ]


DTypes = torch.dtype | Mapping[str, torch.dtype] | None
"""A dtype for all floating-point parameters, or for those in whose names a regular expression is found; the first counts."""


def collect(model: nn.Module, dtype: DTypes = None, parts: Parts | None = None) -> Targets:
    """Reads the parameters and persistent buffers of a model, under the names of its state_dict.

    Every FSDP2 module is first put back into its sharded state: after a forward the root is not, and writes would be lost.
    ``dtype`` overrides the dtype of floating-point parameters that are still on meta; ``parts`` says what of the model is
    part of something larger.

    Raises:
        ModelMismatch: a placement that a load cannot fill (Partial); a tensor that is sparse, expanded or without a shape; a
            model that is flattened (FSDP1); a state-dict entry that is a copy of a DTensor.
        ValueError: ``dtype`` differs from that of a parameter that already has storage; a pattern of ``parts`` or ``dtype``
            is found in no name.
    """
    modules = walk(model)
    for _, module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()
    understated = dtensor.understated_axes(module for _, module in modules)
    targets = Targets()
    names, tensors, layouts, kinds = targets.names, targets.tensors, targets.layout, targets.dtypes
    by_object: dict[int, int] = {}
    by_memory: dict[overlap.Memory, int] = {}
    by_layout: dict[tuple[object, ...], int] = {}
    state, staged = _state(model, modules, targets)
    targets.staged = staged
    for name, tensor in state:
        known = by_object.get(id(tensor))
        if known is not None:
            targets.index[name] = known
            continue
        if isinstance(tensor, DTensor):
            axis = understated.get(id(tensor))
            key: tuple[object, ...] = (id(tensor.device_mesh), id(tensor.placements), tensor.shape, axis)
        else:
            _check_own_memory(name, tensor)
            if not tensor.is_meta and tensor.numel() and type(tensor) in (Tensor, nn.Parameter):
                known = by_memory.setdefault(overlap.memory_of(tensor), len(names))
                if known != len(names):  # the same memory under another object
                    targets.index[name] = known
                    targets.aliased = True
                    continue
            key = (tensor.shape,)
        outer, called = None, name
        if parts is not None:
            outer, local = parts.outer(name), parts.called(name)
            key = (*key, outer)
            if local is not None:
                called = local
                targets.own.add(len(names))
        layout = by_layout.get(key)
        if layout is None:
            layout = _intern(targets, by_layout, key, name, tensor, outer, understated.get(id(tensor)))
        by_object[id(tensor)] = targets.index[called] = len(names)
        names.append(name)
        tensors.append(tensor)
        layouts.append(layout)
        kinds.append(tensor.dtype if dtype is None else _override(name, tensor, dtype))
    if len({pointer for pointer, *_ in by_memory}) < len(by_memory):
        _check_apart(targets, set(by_memory.values()))
    if parts is not None:
        parts.check(names)
    if isinstance(dtype, Mapping):
        for pattern in dtype:
            if not any(re.search(pattern, name) for name in targets.index):
                raise ValueError(f"dtype: the pattern {pattern!r} matches no tensor of the model")
    return targets


def walk(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module under each of its names, a parent before its children, as state_dict goes through them."""
    found = []
    stack = [("", model)]
    while stack:
        item = stack.pop()
        found.append(item)
        if children := item[1]._modules:
            prefix = item[0]
            stack += [(f"{prefix}{name}.", child) for name, child in reversed(children.items()) if child is not None]
    return found


def stage(model: nn.Module, targets: Targets) -> None:
    """Gives the modules that are filled through their own load_state_dict staging tensors, with the values of today. Their
    tensors that no entry shows are marked, to see later that they were filled."""
    for module in targets.staged:
        for name in module.names:
            at = targets.index[name]
            targets.tensors[at] = targets.tensors[at].detach().clone()
    targets.behind = {name: owned(model, name) for name in targets.behind}
    for tensor in dtensor.local_tensors(list(targets.behind.values())):
        memory_pattern.mark(tensor)


def owned(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer at a path of modules, which is not always its name in the state dict."""
    path, _, leaf = name.rpartition(".")
    module = model
    for child in filter(None, path.split(".")):
        found = module._modules[child]
        assert found is not None
        module = found
    tensor: Tensor | None = module._parameters.get(leaf)
    if tensor is None:
        tensor = module._buffers[leaf]
    assert tensor is not None
    return tensor


def _state(
    model: nn.Module, modules: list[tuple[str, nn.Module]], targets: Targets
) -> tuple[list[tuple[str, Tensor]], tuple[Staged, ...]]:
    """What ``model.state_dict(keep_vars=True)`` gives, in half the time when no module has a say in it; and the modules with
    entries there that are not the model's own storage.

    Adds to ``targets`` the non-persistent buffers, those that have storage and those that are on meta.
    """
    plain: dict[type, bool] = {}
    found: list[tuple[str, Tensor]] = []
    asked = False
    loading: list[tuple[str, nn.Module]] = []
    for prefix, module in modules:
        kind = type(module)
        if kind not in plain:
            state_entries.refuse(prefix, kind)
            plain[kind] = not customizes_state(module)
        if module._state_dict_hooks or not plain[kind]:
            asked = True
        if state_entries.loads_itself("", module):
            loading.append((prefix, module))
            asked = True
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.append((prefix + name, parameter))
        if buffers := module._buffers:
            for name, buffer in buffers.items():
                if buffer is None:
                    continue
                if name not in module._non_persistent_buffers_set:
                    found.append((prefix + name, buffer))
                elif buffer.is_meta:
                    targets.lost[prefix + name] = buffer
                else:
                    targets.unsaved.add(prefix + name)
    if targets.lost:  # but for those that the state dict has under another name
        saved = {id(tensor) for _, tensor in found}
        targets.lost = {name: buffer for name, buffer in targets.lost.items() if id(buffer) not in saved}
    if not asked:
        return found, ()
    entries = state_entries.read(model)
    customized = [(prefix, module) for prefix, module in modules if customizes_state(module)]
    staged = state_entries.staged(model, customized, loading, entries)
    hidden = state_entries.hidden(found, entries)
    for name, tensor in hidden.items():
        behind = any(module.covers(name) for module in staged)
        (targets.behind if behind else targets.lost)[name] = tensor
    return entries, staged


def customizes_state(module: nn.Module) -> bool:
    """Whether a module has a say in the names and tensors of its state dict."""
    kind = type(module)
    return bool(module._state_dict_hooks) or not (
        kind.state_dict is nn.Module.state_dict
        and kind._save_to_state_dict is nn.Module._save_to_state_dict
        and kind.get_extra_state is nn.Module.get_extra_state
    )


def _check_own_memory(name: str, tensor: Tensor) -> None:
    """Refuses what has no elements of its own to write to; as Tensor.copy_ does, elements that share memory too."""
    if tensor.layout != torch.strided:
        raise ModelMismatch(
            f"{name} is {tensor.layout}, and only dense tensors can be filled; "
            "make it dense, or register it with persistent=False"
        )
    if tensor.is_contiguous():
        return
    if overlap.overlaps_itself(tensor):
        raise ModelMismatch(
            f"{name} is expanded, so that its elements share memory, and cannot be filled; clone() it first"
        )


def _check_apart(targets: Targets, plain: set[int]) -> None:
    """Raises ModelMismatch if some of these targets, by number, share part of their memory."""
    pair = overlap.overlapping([(targets.names[i], targets.tensors[i]) for i in sorted(plain)])
    if pair is not None:
        raise ModelMismatch(
            f"{pair[0]} and {pair[1]} share part of their memory, so that filling one would overwrite the other; "
            "clone() one of them, or keep it out of the state dict"
        )


def _override(name: str, tensor: Tensor, asked: torch.dtype | Mapping[str, torch.dtype]) -> torch.dtype:
    if isinstance(asked, torch.dtype):
        dtype = asked
    else:
        dtype = next((dtype for pattern, dtype in asked.items() if re.search(pattern, name)), tensor.dtype)
    if not tensor.is_floating_point() or tensor.dtype == dtype or not isinstance(tensor, nn.Parameter):
        return tensor.dtype
    if not tensor.is_meta:
        raise ValueError(
            f"dtype={dtype} applies to parameters on meta, but {name} already has storage of {tensor.dtype}; "
            "convert the model first"
        )
    return dtype


def _intern(
    targets: Targets,
    by_layout: dict[tuple[object, ...], int],
    key: tuple[object, ...],
    name: str,
    tensor: Tensor,
    outer: OuterShard | None = None,
    fsdp_axis: int | None = None,
) -> int:
    """The number of a layout not met under this key; placements are often equal but not one object."""
    layout, coordinate = layout_of(name, tensor, fsdp_axis)
    meshes = [Mesh.of(tensor.device_mesh)] if isinstance(tensor, DTensor) else []
    if outer is not None:
        layout, coordinate = outer.around(name, layout, coordinate)
        meshes.append(Mesh.of(outer.mesh))
    value_key = (layout, coordinate, *meshes)
    if value_key not in by_layout:
        for mesh_of_it in meshes:
            if mesh_of_it not in targets.meshes:
                targets.meshes.append(mesh_of_it)
        targets.meshes_of.append(tuple(map(targets.meshes.index, meshes)))
        by_layout[value_key] = len(targets.layouts)
        targets.layouts.append(layout)
        targets.coordinates.append(coordinate)
    by_layout[key] = by_layout[value_key]
    return by_layout[value_key]


def layout_of(name: str, tensor: Tensor, fsdp_axis: int | None = None) -> tuple[Layout, tuple[int, ...]]:
    """The layout of a DTensor or a plain tensor, and this rank's place in its mesh.

    Args:
        fsdp_axis: see ``dtensor.understated_axes``.

    Raises:
        ModelMismatch: a placement that a load cannot fill (Partial), or a mesh without this rank.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Layout(shape, (), ()), ()
    mesh = tensor.device_mesh
    coordinate = _coordinate(name, mesh)
    placements = [_placement(name, p, tensor) for p in tensor.placements]
    if fsdp_axis is not None:
        placements[fsdp_axis] = _over_others(placements, fsdp_axis, mesh)
    return Layout(shape, tuple(mesh.shape), tuple(placements)), coordinate


def _over_others(placements: list[Placement], axis: int, mesh: DeviceMesh) -> Placement:
    """What FSDP does along an axis: it shards the pieces that the axes to the right make of the same dim."""
    placement = placements[axis]
    if isinstance(placement, Replicated):
        return placement
    parts = 1
    for other in range(axis + 1, len(placements)):
        right = placements[other]
        if isinstance(right, Sharded) and right.dim == placement.dim:
            parts *= mesh.size(other)
    return Sharded(placement.dim, parts)


def _coordinate(name: str, mesh: DeviceMesh) -> tuple[int, ...]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ModelMismatch(f"{name} lies on a mesh that does not include this rank")
    return tuple(coordinate)


def _placement(name: str, placement: TorchPlacement, tensor: DTensor) -> Placement:
    if isinstance(placement, Replicate):
        return Replicated()
    # _StridedShard has been a subclass of Shard and is not one any more; both have dim, only it a split_factor.
    split_factor = getattr(placement, "split_factor", None)
    if isinstance(placement, Shard) or split_factor is not None:
        dim = int(placement.dim)  # type: ignore[attr-defined]
        return Sharded(dim % tensor.ndim if tensor.ndim else dim, int(split_factor or 1))
    raise ModelMismatch(
        f"{name} is placed as {placement}, which no load can fill; redistribute it to Shard or Replicate"
    )


def _spell(placements: tuple[Placement, ...]) -> str:
    return ", ".join(
        "Replicate" if isinstance(p, Replicated) else f"Shard({p.dim})" if p.split_factor == 1
        else f"_StridedShard({p.dim}, sf={p.split_factor})"
        for p in placements
    ) or "whole"  # fmt: skip
