"""Gives the meta tensors of a model storage, fast.

The public API costs 100 us and more per parameter: nn.Module applies a function that goes through DTensor's dispatcher, and
nn.Parameter detaches. The private path builds DTensors directly. It is taken on the torch minors it was tested with, the public
path on others; both give equal models (tested).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from epload.core import garbage_collection
from epload.model import dtensor
from epload.model.modules import Modules
from epload.model.targets import Targets
from epload.native import ops

_THREADS = 4
"""Touch the memory of a model on CPU for the first time."""


@garbage_collection.paused()
def materialize(
    model: nn.Module,
    targets: Targets,
    device: torch.device,
    private: bool | None = None,
    modules: Modules | None = None,
) -> None:
    """Replaces meta tensors by uninitialized ones, and leaves other tensors alone.

    Keeps ties and the identity of DTensor parameters; plain tensors become new objects, as with ``to_empty``.
    Parameters that FSDP offloads and DTensors on a CPU mesh are allocated on the CPU, all others on ``device``.

    Args:
        targets: of this model; gives the dtypes. Updated where an object had to be replaced.
        private: forces (True) or forbids (False) the private path; None decides by the torch version.
        modules: of the model, if they are the same as when the targets were collected.
    """
    if not targets.unsaved_meta and not any(tensor.is_meta for tensor in targets.tensors):
        return
    modules = modules or Modules(model)
    dtypes = {id(tensor): dtype for tensor, dtype in zip(targets.tensors, targets.dtypes, strict=True)}
    if private is None:
        private = dtensor.private_path_available() and _can_be_built(targets.tensors)
    offloaded = cpu_offloaded_ids(modules.fsdp_groups)
    if private:
        _Materialization(dtypes, offloaded, device).run(modules)
    else:
        _materialize_public(model, dtypes, lambda tensor: device_of(tensor, offloaded, device))
    # Plain parameters and buffers are new objects; look them up by name.
    if any(targets.tensors[i].is_meta for i in dtensor.kinds(targets.tensors)[1]):
        state = model.state_dict(keep_vars=True)
        targets.tensors[:] = [state[name] for name in targets.names]


def device_of(tensor: Tensor, offloaded: Collection[int], device: torch.device) -> torch.device:
    """Returns the device on which a tensor on meta gets storage.

    Args:
        offloaded: see :func:`cpu_offloaded_ids`.
        device: of tensors that do not say where they belong.
    """
    on_cpu = id(tensor) in offloaded or (isinstance(tensor, DTensor) and tensor.device_mesh.device_type == "cpu")
    return torch.device("cpu") if on_cpu else device


def cpu_offloaded_ids(groups: Iterable[Any]) -> set[int]:
    """The ids of the parameters that FSDP keeps on the CPU (CPUOffloadPolicy). ``groups``: :attr:`Modules.fsdp_groups`."""
    offloading = [group for group in groups if isinstance(group.offload_policy, CPUOffloadPolicy)]
    return {id(parameter.sharded_param) for group in offloading for parameter in group.fsdp_params}


def _materialize_public(
    model: nn.Module, dtypes: dict[int, torch.dtype], device_of: Callable[[Tensor], torch.device]
) -> None:
    materialized: dict[int, Tensor] = {}

    def empty_like(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in materialized:
            dtype = dtypes.get(id(tensor), tensor.dtype)
            materialized[id(tensor)] = torch.empty_like(tensor, device=device_of(tensor), dtype=dtype)
        return materialized[id(tensor)]

    ties = _plain_meta_ties(model)
    model._apply(empty_like)  # type: ignore[no-untyped-call]
    for owners in ties:
        first_module, first_name = owners[0]
        for module, name in owners[1:]:
            module._parameters[name] = first_module._parameters[first_name]


def _plain_meta_ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The owners of each plain meta parameter that has several; nn.Module would give each owner a parameter of its own."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and not isinstance(parameter, DTensor):
                owners.setdefault(id(parameter), []).append((module, name))
    return [found for found in owners.values() if len(found) > 1]


# ---- the private path ----


def _can_be_built(tensors: list[Tensor]) -> bool:
    """Returns True if the private path can build such tensors: no subclass other than DTensor, nor a DTensor over one."""
    kinds = {type(tensor._local_tensor if type(tensor) is DTensor else tensor) for tensor in tensors}
    return kinds <= {Tensor, nn.Parameter}


class _Materialization:
    """Gives meta tensors storage. Parameters that are DTensors get it in place: all at once, by one native call."""

    def __init__(self, dtypes: dict[int, torch.dtype], offloaded: set[int], device: torch.device) -> None:
        """
        Args:
            dtypes: by the ids of tensors; others keep theirs.
            offloaded, device: see :func:`device_of`.
        """
        self._dtypes = dtypes
        self._offloaded = offloaded
        self._device = device

    def run(self, modules: Modules) -> None:
        others: list[dict[str, Any]] = [module._buffers for module in modules.unique if module._buffers]
        owners: list[dict[str, Any]] = [module._parameters for module in modules.unique if module._parameters]
        parameters = [parameter for owned in owners for parameter in owned.values()]
        tensors = [tensor for tensor in parameters if type(tensor) is DTensor]
        kinds, firsts = dtensor.kinds(tensors)
        on_meta = [tensors[i].is_meta for i in firsts]
        dtensors = {id(tensor): tensor for tensor, kind in zip(tensors, kinds, strict=True) if on_meta[kind]}
        if {*map(type, parameters)} - {DTensor, type(None)}:
            others += owners
        for (dtype, device), alike in self._by_dtype_and_device(dtensors).items():
            self._give_storage(alike, dtype, device)
        self._replace(others, dtensors)
        even = all(_is_even(tensors[i]._spec) for i in firsts)
        for group in modules.fsdp_groups:
            _reset(group, even)

    def _replace(self, owners: list[dict[str, Any]], dtensors: Collection[int]) -> None:
        """Replaces what is on meta, except for the parameters with the ids ``dtensors``."""
        made: dict[int, Tensor] = {}
        replaced: list[Tensor] = []  # kept alive, so that ids stay unique
        for owned in owners:
            for name, tensor in owned.items():
                if tensor is None or id(tensor) in dtensors or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    dtype = self._dtypes.get(id(tensor), tensor.dtype)
                    made[id(tensor)] = _empty_like(tensor, dtype, self._device_of(tensor))
                replaced.append(tensor)
                owned[name] = made[id(tensor)]

    def _by_dtype_and_device(
        self, dtensors: dict[int, DTensor]
    ) -> dict[tuple[torch.dtype, torch.device], list[DTensor]]:
        """``dtensors``: by id."""
        groups: dict[tuple[torch.dtype, torch.device], list[DTensor]] = {}
        # By mesh, whose tensors have one device unless some are offloaded.
        known: dict[tuple[torch.dtype, int], list[DTensor]] = {}
        for number, tensor in dtensors.items():
            dtype = self._dtypes.get(number) or tensor.dtype
            key = dtype, id(tensor._spec.mesh)
            if self._offloaded or key not in known:
                known[key] = groups.setdefault((dtype, self._device_of(tensor)), [])
            known[key].append(tensor)
        return groups

    def _device_of(self, tensor: Tensor) -> torch.device:
        return device_of(tensor, self._offloaded, self._device)

    def _give_storage(self, parameters: list[DTensor], dtype: torch.dtype, device: torch.device) -> None:
        on_meta = [parameter._local_tensor for parameter in parameters]
        local_tensors = ops.allocate_like(on_meta, dtype, device, _THREADS)
        specs = [parameter._spec for parameter in parameters]
        alike = {id(spec): _with_dtype(spec, dtype) for spec in {id(spec): spec for spec in specs}.values()}
        make, swap = DTensor.__new__, torch._C._swap_tensor_impl
        for parameter, local, old in zip(parameters, local_tensors, specs, strict=True):
            spec = alike[id(old)]
            new = make(DTensor, local, spec, requires_grad=parameter.requires_grad)
            if parameter._use_count() > 1:  # type: ignore[attr-defined]
                new._is_param = True  # an autograd graph has it, and torch knows whether that is in order
                torch.utils.swap_tensors(parameter, new)  # type: ignore[no-untyped-call]
            else:
                swap(parameter, new)
                parameter._local_tensor, parameter._spec = local, spec


def _is_even(spec: Any) -> bool:
    """Returns True if all shards have one size, so that FSDP pads none. ``spec``: a DTensorSpec."""
    shards = [1] * len(spec.shape)
    for size, placement in zip(spec.mesh.shape, spec.placements, strict=True):
        if (dim := getattr(placement, "dim", None)) is not None:
            shards[dim] *= size
    return not any(map(int.__mod__, spec.shape, shards))


def _reset(group: Any, even: bool) -> None:
    """Has FSDP take note of the storage of its parameters, where that cannot wait for its lazy init.

    There it does so itself, in 5 us for each, unless it did before. But to pad or pin a shard it makes another tensor, and
    what refers to the one that was loaded, such as a state dict, would no longer be the model's.

    Args:
        group: an ``FSDPParamGroup`` whose parameters have storage.
        even: whether no shard of the model is padded. Then the first parameter of a group that is not pinned stands for all.
    """
    parameters = list(group.fsdp_params)
    if not getattr(group, "_reset_sharded_params", True):
        if (
            even
            and not getattr(group.offload_policy, "pin_memory", False)
            and parameters[0]._sharded_param_data.is_meta
        ):
            return
        # FSDP's own tensor, on meta since the model is, has the size of a padded shard.
        parameters = [
            parameter
            for parameter in parameters
            if parameter.pin_memory
            or not (data := parameter._sharded_param_data).is_meta
            or data.numel() != parameter.sharded_param._local_tensor.numel()
        ]
    for parameter in parameters:
        parameter.reset_sharded_param()


def _empty_like(meta: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    is_parameter = isinstance(meta, nn.Parameter)
    local = meta._local_tensor if isinstance(meta, DTensor) else meta
    empty = torch.empty_strided(local.shape, local.stride(), dtype=dtype, device=device)
    if isinstance(meta, DTensor):
        return DTensor(empty, _with_dtype(meta._spec, dtype), requires_grad=False)  # type: ignore[no-untyped-call]
    return nn.Parameter(empty, meta.requires_grad) if is_parameter else empty


def _with_dtype(spec: Any, dtype: torch.dtype) -> Any:
    """``spec``: a DTensorSpec."""
    if dtype == spec.tensor_meta.dtype:
        return spec
    return replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))
