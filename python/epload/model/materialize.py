"""Gives the meta tensors of a model storage, fast.

With ``dtensor.py`` the one place that touches private torch API: the public way costs 100 us and more a parameter, as nn.Module
applies a function that goes through DTensor's dispatcher, and nn.Parameter detaches. The private path is taken for the torch
minors it was tried with, the public one for others. Both give equal models (tested).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from epload.core import collector
from epload.model import dtensor
from epload.model.targets import Targets, walk

Home = Callable[[Tensor], torch.device]
"""Where a meta tensor gets its storage."""


@dataclass(frozen=True)
class Unfilled:
    """Tensors of one module that no checkpoint tensor fills: missing keys, and non-persistent buffers that were on meta."""

    module: nn.Module
    path: str
    names: tuple[str, ...]
    """Names within the module."""


@collector.paused()
def materialize(model: nn.Module, targets: Targets, device: torch.device, private: bool | None = None) -> None:
    """Replaces meta tensors by uninitialized ones; leaves others alone. Ties are kept, and the identity of DTensor
    parameters; plain tensors become new objects, as with ``to_empty``.

    All are made on ``device``, but for parameters that FSDP keeps on CPU and DTensors on a mesh of CPUs.

    Args:
        targets: of this model; their dtypes are what is allocated. Refreshed where an object had to be replaced.
        private: forces (True) or forbids (False) the private path; None decides by the torch version.
    """
    if not targets.lost and not any(tensor.is_meta for tensor in targets.tensors):
        return
    dtype_of = {id(tensor): dtype for tensor, dtype in zip(targets.tensors, targets.dtypes, strict=True)}
    if private is None:
        private = dtensor.private_path_available() and all(map(_is_simple, targets.tensors))
    apart = offloaded(model)

    def home(tensor: Tensor) -> torch.device:
        on_cpu = id(tensor) in apart or (isinstance(tensor, DTensor) and tensor.device_mesh.device_type == "cpu")
        return torch.device("cpu") if on_cpu else device

    (_materialize_private if private else _materialize_public)(model, dtype_of, home)
    # Plain parameters and buffers are replaced, not refilled: find the new objects under the names of the old.
    if any(t.is_meta for t in targets.tensors):
        state = model.state_dict(keep_vars=True)
        targets.tensors[:] = [state[name] for name in targets.names]


def offloaded(model: nn.Module) -> set[int]:
    """The ids of parameters that FSDP keeps on CPU (CPUOffloadPolicy)."""
    return {id(sharded.sharded_param) for sharded in fsdp_parameters(model) if sharded.offload_to_cpu}


def fsdp_parameters(model: nn.Module) -> list[Any]:
    """What FSDP keeps for each parameter that it shards."""
    return [
        sharded
        for _, module in walk(model)
        if isinstance(module, FSDPModule)
        for group in dtensor.parameter_groups(module)
        for sharded in group.fsdp_params
    ]


def _is_simple(tensor: Tensor) -> bool:
    """Whether a plain tensor can stand in for it: not a subclass, nor a DTensor over one."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return type(local) in (Tensor, nn.Parameter) and type(tensor) in (Tensor, nn.Parameter, DTensor)


def _materialize_public(model: nn.Module, dtype_of: dict[int, torch.dtype], home: Home) -> None:
    made: dict[int, Tensor] = {}

    def fill(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty_like(
                tensor, device=home(tensor), dtype=dtype_of.get(id(tensor), tensor.dtype)
            )
        return made[id(tensor)]

    ties = _tied_places(model)
    model._apply(fill)  # type: ignore[no-untyped-call]
    for places in ties:
        first_module, first_name = places[0]
        for module, name in places[1:]:
            module._parameters[name] = first_module._parameters[first_name]


def _tied_places(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Where one meta parameter that is no DTensor stands more than once; nn.Module would give each place its own."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and not isinstance(parameter, DTensor):
                places.setdefault(id(parameter), []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def _materialize_private(model: nn.Module, dtype_of: dict[int, torch.dtype], home: Home) -> None:
    plain: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    kept: list[Tensor] = []  # so that no id is given to another buffer
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) in plain:
                module._parameters[name] = plain[id(parameter)]
            elif parameter.is_meta:
                dtype, device = dtype_of.get(id(parameter), parameter.dtype), home(parameter)
                if isinstance(parameter, DTensor):
                    torch.utils.swap_tensors(parameter, _like_parameter(parameter, dtype, device))  # type: ignore[no-untyped-call]
                else:
                    made = nn.Parameter(_empty(parameter, dtype, device), parameter.requires_grad)
                    plain[id(parameter)] = plain[id(made)] = module._parameters[name] = made
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                if id(buffer) not in buffers:
                    device = home(buffer)
                    if isinstance(buffer, DTensor):
                        buffers[id(buffer)] = _like(buffer, buffer.dtype, device, False)
                    else:
                        buffers[id(buffer)] = _empty(buffer, buffer.dtype, device)
                kept.append(buffer)
                module._buffers[name] = buffers[id(buffer)]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in dtensor.parameter_groups(module):
                for sharded in group.fsdp_params:
                    sharded.reset_sharded_param()


def _empty(like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=device)


def _like(meta: DTensor, dtype: torch.dtype, device: torch.device, requires_grad: bool) -> DTensor:
    spec = meta._spec
    if dtype != meta.dtype:
        assert spec.tensor_meta is not None
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))
    return DTensor(_empty(meta._local_tensor, dtype, device), spec, requires_grad=requires_grad)  # type: ignore[no-untyped-call]


def _like_parameter(meta: DTensor, dtype: torch.dtype, device: torch.device) -> DTensor:
    made = _like(meta, dtype, device, meta.requires_grad)
    made._is_param = True  # what nn.Parameter does for a tensor subclass, without its detach
    return made


def unfilled(model: nn.Module, names: set[str]) -> list[Unfilled]:
    """Groups names of the model by the module that owns them."""
    by_module: dict[str, list[str]] = {}
    for name in sorted(names):
        path, _, leaf = name.rpartition(".")
        by_module.setdefault(path, []).append(leaf)
    found = []
    for path, leaves in by_module.items():
        try:
            found.append(Unfilled(model.get_submodule(path), path, tuple(leaves)))
        except AttributeError:  # a wrapper leaves itself out of the names of its state_dict
            found.append(Unfilled(model, "", tuple(f"{path}.{leaf}" for leaf in leaves)))
    return found
