"""Gives the meta tensors of a model storage, fast.

The public API costs 100 us and more per parameter: nn.Module applies a function that goes through DTensor's dispatcher, and
nn.Parameter detaches. The private path builds DTensors directly. It is taken on the torch minors it was tested with, the public
path on others; both give equal models (tested).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from epload.core import collector
from epload.model import dtensor
from epload.model.state_dict import walk_modules
from epload.model.targets import Targets

DeviceOf = Callable[[Tensor], torch.device]
"""The device on which a meta tensor gets storage."""


@collector.paused()
def materialize(model: nn.Module, targets: Targets, device: torch.device, private: bool | None = None) -> None:
    """Replaces meta tensors by uninitialized ones, and leaves other tensors alone.

    Keeps ties and the identity of DTensor parameters; plain tensors become new objects, as with ``to_empty``.
    Parameters that FSDP offloads and DTensors on a CPU mesh are allocated on the CPU, all others on ``device``.

    Args:
        targets: of this model; gives the dtypes. Updated where an object had to be replaced.
        private: forces (True) or forbids (False) the private path; None decides by the torch version.
    """
    if not targets.unsaved_meta and not any(tensor.is_meta for tensor in targets.tensors):
        return
    dtypes = {id(tensor): dtype for tensor, dtype in zip(targets.tensors, targets.dtypes, strict=True)}
    if private is None:
        private = dtensor.private_path_available() and all(map(_can_be_built, targets.tensors))
    fsdp_managed = fsdp_parameters(model)
    offloaded = cpu_offloaded_ids(fsdp_managed)

    def device_of(tensor: Tensor) -> torch.device:
        on_cpu = id(tensor) in offloaded or (isinstance(tensor, DTensor) and tensor.device_mesh.device_type == "cpu")
        return torch.device("cpu") if on_cpu else device

    if private:
        _materialize_private(model, dtypes, device_of)
        for parameter in fsdp_managed:
            parameter.reset_sharded_param()
    else:
        _materialize_public(model, dtypes, device_of)
    # Plain parameters and buffers are new objects; look them up by name.
    if any(t.is_meta for t in targets.tensors):
        state = model.state_dict(keep_vars=True)
        targets.tensors[:] = [state[name] for name in targets.names]


def cpu_offloaded_ids(fsdp_managed: Iterable[Any]) -> set[int]:
    """The ids of those :func:`fsdp_parameters` that FSDP keeps on the CPU (CPUOffloadPolicy)."""
    return {id(parameter.sharded_param) for parameter in fsdp_managed if parameter.offload_to_cpu}


def fsdp_parameters(model: nn.Module) -> list[Any]:
    """FSDP's own object for each parameter that it shards (``FSDPParam``)."""
    modules = {id(module): module for _, module in walk_modules(model)}
    return [
        parameter
        for module in modules.values()
        if isinstance(module, FSDPModule)
        for group in dtensor.parameter_groups(module)
        for parameter in group.fsdp_params
    ]


def _materialize_public(model: nn.Module, dtypes: dict[int, torch.dtype], device_of: DeviceOf) -> None:
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


def _can_be_built(tensor: Tensor) -> bool:
    """Whether the private path can build such a tensor: not a subclass other than DTensor, nor a DTensor over one."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return type(local) in (Tensor, nn.Parameter) and type(tensor) in (Tensor, nn.Parameter, DTensor)


def _materialize_private(model: nn.Module, dtypes: dict[int, torch.dtype], device_of: DeviceOf) -> None:
    parameters: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    replaced: list[Tensor] = []  # kept alive, so that ids stay unique
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) in parameters:
                module._parameters[name] = parameters[id(parameter)]
            elif parameter.is_meta:
                dtype, device = dtypes.get(id(parameter), parameter.dtype), device_of(parameter)
                if isinstance(parameter, DTensor):
                    torch.utils.swap_tensors(parameter, _empty_dtensor_parameter(parameter, dtype, device))  # type: ignore[no-untyped-call]
                else:
                    new = nn.Parameter(_empty(parameter, dtype, device), parameter.requires_grad)
                    parameters[id(parameter)] = parameters[id(new)] = module._parameters[name] = new
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                if id(buffer) not in buffers:
                    buffers[id(buffer)] = _empty_buffer(buffer, device_of(buffer))
                replaced.append(buffer)
                module._buffers[name] = buffers[id(buffer)]


def _empty(like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=device)


def _empty_buffer(meta: Tensor, device: torch.device) -> Tensor:
    if isinstance(meta, DTensor):
        return _empty_dtensor(meta, meta.dtype, device, requires_grad=False)
    return _empty(meta, meta.dtype, device)


def _empty_dtensor(meta: DTensor, dtype: torch.dtype, device: torch.device, requires_grad: bool) -> DTensor:
    spec = meta._spec
    if dtype != meta.dtype:
        assert spec.tensor_meta is not None
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))
    return DTensor(_empty(meta._local_tensor, dtype, device), spec, requires_grad=requires_grad)  # type: ignore[no-untyped-call]


def _empty_dtensor_parameter(meta: DTensor, dtype: torch.dtype, device: torch.device) -> DTensor:
    parameter = _empty_dtensor(meta, dtype, device, meta.requires_grad)
    parameter._is_param = True  # what nn.Parameter does for a tensor subclass, without its detach
    return parameter
