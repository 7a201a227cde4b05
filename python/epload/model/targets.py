"""The parameters and buffers of a model that a load fills: names, layouts and local tensors.

Collecting them changes nothing in the model, except that FSDP2 modules are put back into their sharded state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from epload.core import dtypes
from epload.core.placement import Layout, Placement
from epload.errors import ModelMismatch
from epload.model import dtensor, memory
from epload.model.dtensor import Mesh, mesh_of
from epload.model.expert_parallel import (
    Loaded,
    OuterShard,
    Parts,
    check_patterns,
    global_name,
    loaded_as,
    loaded_shards,
    outer_shard,
)
from epload.model.flat_state import FlatState
from epload.model.megatron import MegatronChunks
from epload.model.memory import storage_of
from epload.model.modules import Modules
from epload.model.state_dict import read_state
from epload.native import ops
from epload.observe.render import list_first


@dataclass
class Targets:
    """The parameters and persistent buffers of a model, each once. Entry i of its first four columns is target i."""

    names: list[str] = field(default_factory=list)
    """The first name under which the model has it."""
    tensors: list[Tensor] = field(default_factory=list)
    """The model's own objects: DTensors or plain tensors, perhaps on meta."""
    layout: list[int] = field(default_factory=list)
    """Index into ``layouts``, ``coordinates`` and ``layout_meshes``."""
    dtypes: list[torch.dtype] = field(default_factory=list)
    """The model's; for tensors on meta those that the load gives them."""
    layouts: list[Layout] = field(default_factory=list)
    coordinates: list[tuple[int, ...]] = field(default_factory=list)
    """This rank's coordinate in the mesh of each layout."""
    layout_meshes: list[tuple[int, ...]] = field(default_factory=list)
    """The meshes that each layout is sharded over, as indices into ``meshes``."""
    meshes: list[Mesh] = field(default_factory=list)
    index: dict[str, int] = field(default_factory=dict)
    """The target of every name, including those of tied tensors; in local modules, of the global name (``LocalModules``)."""
    local_only: set[int] = field(default_factory=set)
    """Targets that other ranks may lack: those in ``LocalModules``."""
    kept_in_fp32: list[str] = field(default_factory=list)
    """Names of the tensors that are float32 because ``from_pretrained`` keeps them so."""
    below_fp32: list[str] = field(default_factory=list)
    """Names of the tensors that it keeps in float32 too, but that have storage in another dtype."""
    has_aliases: bool = False
    """True if different objects of the model are the same memory, and therefore one target."""
    has_meta: bool = False
    """True if any target is on meta."""
    plain: bool = True
    """True if no module has custom loading or customizes its state dict."""
    unsaved_buffers: set[str] = field(default_factory=set)
    """Names of non-persistent buffers with storage. No checkpoint has them, and other ranks may lack them."""
    unsaved_meta: dict[str, Tensor] = field(default_factory=dict)
    """Meta tensors that are not in the model's state dict, so that no checkpoint fills them: non-persistent buffers,
    and parameters that a state-dict hook leaves out."""
    refusal: ModelMismatch | None = None
    """Why a load cannot fill all of the model, as a module customizes its state dict or its loading; None if it can."""

    @cached_property
    def mesh_digests(self) -> list[tuple[str, Mesh]]:
        """A digest of each mesh and of the names of the targets on it, except those that other ranks may lack.

        All ranks of a mesh have the same digest if and only if they agree about it.
        """
        lines = [[repr(mesh)] for mesh in self.meshes]
        for i, (name, layout) in enumerate(zip(self.names, self.layout, strict=True)):
            for number in self.layout_meshes[layout] if i not in self.local_only else ():
                lines[number].append(name)
        texts = ["\n".join(on_mesh).encode(errors="backslashreplace") for on_mesh in lines]
        digests = [hashlib.blake2b(text, digest_size=12).hexdigest() for text in texts]
        return [(digests[i], self.meshes[i]) for i, on_mesh in enumerate(lines) if len(on_mesh) > 1]

    def shape(self, number: int) -> tuple[int, ...]:
        """Global shape of a target."""
        return self.layouts[self.layout[number]].shape

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shape by name."""
        return {name: self.shape(i) for name, i in self.index.items()}

    def missing(self, only: Collection[tuple[str, str]], filled: Set[int]) -> list[str]:
        """Returns the names of the targets that nothing fills, except those of empty tensors, which need nothing.

        Args:
            only: as in :class:`epload.Mapping`.

        Raises ModelMismatch if that names a tensor that the model lacks.
        """
        if unknown := [name for _, name in only if name not in self.index]:
            raise ModelMismatch(f"only= of the mapping names tensors that the model lacks: {list_first(unknown)}")
        expected = {self.index[name] for _, name in only} or range(len(self.names))
        return [self.names[i] for i in sorted({*expected} - filled) if 0 not in self.shape(i)]

    def check_filled(self, mapping: object, only: Collection[object]) -> None:
        """Raises ModelMismatch if a load cannot fill all of the model, unless it is for the tensors of an adapter ``only``, as
        the library's rules say (``mapping="auto"``), which fill no others."""
        if self.refusal is not None and not (mapping == "auto" and only):
            raise self.refusal

    def local(self) -> list[Tensor]:
        """The local tensors, to be written in place. They alias the model's storage."""
        return dtensor.local_tensors(self.tensors)

    def matches(self, other: Targets) -> bool:
        """Returns True if a plan made for ``other`` is valid for these: everything but the tensors themselves is equal."""
        columns = ("names", "layout", "dtypes", "layouts", "coordinates", "index", "local_only")
        return all(getattr(self, column) == getattr(other, column) for column in columns)

    def add_layout(
        self, name: str, tensor: Tensor, layout: Layout, coordinate: tuple[int, ...], outer: OuterShard | None
    ) -> None:
        """Adds a tensor's own layout, or that of the larger tensor of which it is a shard."""
        meshes = [mesh_of(tensor.device_mesh)] if isinstance(tensor, DTensor) else []
        if outer is not None:
            layout, coordinate = outer.enclosing_layout(name, layout, coordinate)
            meshes.append(mesh_of(outer.mesh))
        self.meshes += [mesh for mesh in dict.fromkeys(meshes) if mesh not in self.meshes]
        self.layouts.append(layout)
        self.coordinates.append(coordinate)
        self.layout_meshes.append(tuple(map(self.meshes.index, meshes)))

    def with_extra(self, names: list[str], shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> Targets:
        """Returns these targets followed by plain ones that other ranks may lack, without their tensors."""
        numbers = range(len(self.names), len(self.names) + len(names))
        number_of = {shape: i for i, shape in enumerate(dict.fromkeys(shapes), len(self.layouts))}
        return replace(
            self,
            names=self.names + names,
            layout=self.layout + [number_of[shape] for shape in shapes],
            dtypes=self.dtypes + dtypes,
            layouts=self.layouts + [Layout(shape, (), ()) for shape in number_of],
            coordinates=self.coordinates + [()] * len(number_of),
            index=self.index | dict(zip(names, numbers, strict=True)),
            local_only=self.local_only | {*numbers},
        )

    def describe(self) -> dict[str, str]:
        """Returns the dtype and the layout of each target that all ranks share, by name; equal on ranks that load the same."""
        placements = [", ".join(map(_describe_placement, layout.placements)) or "whole" for layout in self.layouts]
        layouts = [
            f"{list(layout.shape)} on mesh {list(layout.mesh_shape)} {text}"
            for layout, text in zip(self.layouts, placements, strict=True)
        ]
        dtype_names = {dtype: dtypes.name(dtype) for dtype in set(self.dtypes)}
        return {
            name: f"{dtype_names[dtype]} {layouts[layout]}"
            for i, (name, dtype, layout) in enumerate(zip(self.names, self.dtypes, self.layout, strict=True))
            if i not in self.local_only
        }


def _describe_placement(placement: Placement) -> str:
    if placement is None:
        return "Replicate"
    dim, split_factor = placement.dim, placement.split_factor
    return f"Shard({dim})" if split_factor == 1 else f"_StridedShard({dim}, sf={split_factor})"


def collect(
    model: nn.Module,
    expert_parallel: Parts = (),
    modules: Modules | None = None,
    filled: bool = True,
    own_names: bool = False,
    loaded: bool = False,
) -> Targets:
    """Collects the parameters and persistent buffers of a model, under their names in its state dict, to be filled or only read.

    With ``own_names``, modules whose hooks show other tensors than they have are collected by the names of their own. With
    ``loaded``, tensors are outer shards as a load was told.

    First reshards every FSDP2 module: a forward pass leaves the root unsharded, and writes to it would be lost.

    Raises:
        ModelMismatch: a placement that cannot be loaded into (Partial); a tensor that is sparse, expanded, without a shape, or
            partitioned by ZeRO-3; two that overlap in memory; a model that is flattened (FSDP1), or offloaded by accelerate; if
            ``filled``, a tensor whose class hands out copies, or parameters that Megatron is gathering.
        ValueError: a pattern of ``expert_parallel`` matches no name.
    """
    if filled and isinstance(model, MegatronChunks):
        model.check_gathered(filled)
    modules = modules or Modules(model)
    modules.reshard()
    entries, unsaved_buffers, unsaved_meta, plain, refusal = read_state(model, modules, filled, own_names)
    targets = Targets(plain=plain, unsaved_buffers=unsaved_buffers, unsaved_meta=unsaved_meta, refusal=refusal)
    fsdp_axes, in_module = dtensor.fsdp_shard_axes(modules.fsdp), not isinstance(model, FlatState)
    by_id: dict[int, int] = {}
    by_memory: dict[tuple[object, ...], int] = {}
    """Targets with storage, by where they have it, and how they are sharded; filled only if some may share it."""
    with_memory = {id(tensor): dtensor.with_memory(tensor) for _, tensor in entries}
    overlap = _may_overlap(with_memory.values())
    shards = loaded_shards() if loaded else ({}, ())
    divided = {} if filled or isinstance(model, MegatronChunks) else _divided(modules, expert_parallel, shards)
    layouts: dict[tuple[object, ...], int] = {}
    """Layout numbers, by what layouts depend on."""
    for name, tensor in entries:
        number = len(targets.names)
        owner = by_id.setdefault(id(tensor), number)
        local = with_memory[id(tensor)]
        sharding = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        if owner == number:
            _check_loadable(name, local, filled)
            if (memory := _memory_of(local, tensor, overlap)) is not None:
                owner = by_memory.setdefault((memory, sharding), number)
                targets.has_aliases |= owner != number
        if owner != number:
            targets.index[global_name(expert_parallel, name) or name] = by_id[id(tensor)] = owner
            continue
        fsdp_axis, outer = fsdp_axes.get(id(tensor)), outer_shard(expert_parallel, name) or loaded_as(name, tensor, shards)
        if not filled and outer is None and not isinstance(model, MegatronChunks):
            _check_whole(name, local, divided.get(id(tensor), ""))
        key = (tensor.shape, local.shape, sharding, fsdp_axis, outer)
        if key not in layouts:
            layouts[key] = len(targets.layouts)
            layout, coordinate = dtensor.layout_of(name, tensor, fsdp_axis, in_module)
            targets.add_layout(name, tensor, layout, coordinate, outer)
        if (shared_name := global_name(expert_parallel, name)) is not None:
            targets.local_only.add(number)
        targets.index[shared_name or name] = number
        targets.names.append(name)
        targets.tensors.append(tensor)
        targets.layout.append(layouts[key])
        targets.dtypes.append(tensor.dtype)
        targets.has_meta |= tensor.is_meta
    if isinstance(model, MegatronChunks):
        targets.index |= {alias: targets.index[name] for alias, name in model.tied_names().items()}
    _check_overlap([(targets.names[i], with_memory[id(targets.tensors[i])]) for i in by_memory.values()])
    if filled:
        _check_keeps_writes(targets)
    check_patterns(expert_parallel, targets.names)
    return targets


_PART = (
    "one rank's part of a larger tensor, and would be taken for a replica: save it with the library that divides it, or describe "
    "it when loading (LoadOptions.outer_shards)"
)


def _check_keeps_writes(targets: Targets) -> None:
    for name, local in zip(targets.names, targets.local(), strict=True):
        if not memory.keeps_writes(local):
            raise ModelMismatch(
                f"{name} is a {type(local).__name__}, which hands out copies of its elements, so that it cannot be filled in "
                "place; load the weights before they are wrapped or quantized"
            )


def _is_dense(tensor: Tensor) -> bool:
    """Returns True for a tensor with memory of its own and strides that is not on meta."""
    return not memory.wraps_tensors(type(tensor)) and tensor.layout == torch.strided and not tensor.is_meta


def _may_overlap(tensors: Iterable[Tensor]) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return memory.may_overlap(ops.describe_memory([tensor for tensor in tensors if _is_dense(tensor)]))


def _check_overlap(tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Raises ModelMismatch if some tensors overlap in memory."""
    pair = memory.find_overlap(tensors)
    if pair is not None:
        raise ModelMismatch(
            f"{pair[0]} and {pair[1]} share part of their memory, so that filling one would overwrite the other; "
            "clone() one of them, or keep it out of the state dict"
        )


def _memory_of(local: Tensor, tensor: Tensor, overlap: bool) -> object:
    """Returns what tensors with the same elements in memory have in common; None for one that shares none, or was freed, as by
    FSDP.

    ``overlap``: whether any may share some."""
    if not _is_dense(local):
        return None
    if not local.numel():  # a shard without elements, whose address says nothing, nor a storage that is more than the tensor
        own = tensor.numel() > 0 and local.untyped_storage().nbytes() <= tensor.numel() * tensor.itemsize
        return (storage_of(local), tensor.shape, local.shape, local.dtype) if own else None
    return (local.data_ptr(), local.shape, local.stride(), local.dtype) if overlap and local.data_ptr() else None


def _check_whole(name: str, tensor: Tensor, layer: str) -> None:
    """Raises ModelMismatch for a tensor that DeepSpeed's AutoTP or MoE, megablocks or nanotron marks as one rank's part of a
    larger one, which its shape does not say. TransformerEngine's mark alone, which Megatron-Core has, is on whole ones, too.

    ``layer``: the description of a divided layer that it is in, if any."""
    if layer:
        raise ModelMismatch(f"{name} is {layer}: {_PART}")
    group = str(getattr(tensor, "group_name", ""))
    divided = getattr(tensor, "tensor_model_parallel", False) and getattr(tensor, "ds_is_replaced_module", False)
    divided |= getattr(tensor, "expert_model_parallel", False) is True
    if getattr(tensor, "is_sharded", False) is True and hasattr(tensor, "get_sharded_info"):
        divided |= tuple(tensor.get_sharded_info().unsharded_shape) != tuple(tensor.shape)
    if divided or (group.startswith("ep_size_") and group != "ep_size_1"):
        raise ModelMismatch(f"{name} is marked as {_PART}")


def _divided(modules: Modules, parts: Parts, shards: Loaded) -> dict[int, str]:
    """Returns descriptions of layers that say how many ranks divide their plain tensors, as those of TransformerEngine and of
    inference engines do, by the ids of these; of none that has an outer shard, whose other tensors are whole."""
    divided = dict[int, str]()
    for prefix, module in modules.named:
        sizes = [size for name in ("tp_size", "ep_size") if type(size := vars(module).get(name)) is int]
        if (ranks := max(sizes, default=1)) > 1:
            own = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
            if not any(outer_shard(parts, prefix + name) or loaded_as(prefix + name, t, shards) for name, t in own.items()):
                plain = [tensor for tensor in own.values() if not isinstance(tensor, DTensor)]
                divided |= {id(tensor): f"in a {type(module).__name__} of {ranks} ranks" for tensor in plain}
    return divided


def _check_loadable(name: str, tensor: Tensor, filled: bool) -> None:
    """Raises ModelMismatch for a local tensor whose elements cannot be written one by one (read, if not ``filled``)."""
    if (shape := getattr(tensor, "ds_shape", None)) is not None and (filled or tensor.shape != shape):
        way = "load before deepspeed.initialize() and outside zero.Init(), or with its load_checkpoint()"
        if not filled:
            way = "save or send it under deepspeed.zero.GatheredParameters(model.parameters()), or use its save_checkpoint()"
        raise ModelMismatch(f"{name}, of shape {list(shape)}, is partitioned by DeepSpeed's ZeRO-3: {way}")
    if name.endswith("_flat_param"):
        raise ModelMismatch(f"{name} is a flat parameter of FSDP1, which has no tensors by name; use torch's own functions")
    if tensor.layout != torch.strided:
        raise ModelMismatch(
            f"{name} is {tensor.layout}, and only dense tensors can be loaded into; "
            "make it dense, or register it with persistent=False"
        )
    if not filled and _is_dense(tensor) and tensor.numel() and not tensor.untyped_storage().nbytes():
        raise ModelMismatch(
            f"{name} has no memory: its storage was freed, as by a trainer that has offloaded it; bring it back first"
        )
    if filled and not tensor.is_contiguous() and memory.has_internal_overlap(tensor):
        raise ModelMismatch(f"{name} is expanded: its elements share memory and cannot be loaded into; clone() it first")
