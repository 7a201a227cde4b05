"""Gives the meta tensors of a model storage, fast.

The public API costs 100 us and more per parameter: nn.Module applies a function that goes through DTensor's dispatcher, and
nn.Parameter detaches. The private path builds DTensors directly. It is taken on the torch minors it was tested with, the public
path on others; both give equal models (tested).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
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
Destination = Callable[[Tensor], tuple[torch.dtype, torch.device]]
"""Returns the dtype and the device of the storage that a tensor on meta gets."""


@garbage_collection.paused()
def materialize(
    model: nn.Module,
    targets: Targets,
    device: torch.device,
    private: bool | None = None,
    modules: Modules | None = None,
) -> None:
    """Replaces meta tensors by uninitialized ones, and updates the targets accordingly.

    Keeps ties and the identity of DTensor parameters; plain tensors become new objects, as with ``to_empty``.
    Parameters that FSDP offloads and DTensors on a CPU mesh are allocated on the CPU, all others on ``device``.

    ``private`` forces or forbids the private path; None decides by the torch version."""
    if not targets.unsaved_meta and not any(tensor.is_meta for tensor in targets.tensors):
        return
    modules = modules or Modules(model)
    dtypes = {id(tensor): dtype for tensor, dtype in zip(targets.tensors, targets.dtypes, strict=True)}
    offloaded = cpu_offloaded_ids(modules.fsdp_groups)

    def destination(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
        on_cpu = id(tensor) in offloaded or (isinstance(tensor, DTensor) and tensor.device_mesh.device_type == "cpu")
        return dtypes.get(id(tensor), tensor.dtype), torch.device("cpu") if on_cpu else device

    if private is None:
        private = dtensor.private_path_available() and _can_be_built(targets.tensors)
    if private:
        _materialize_private(modules, destination)
    else:
        _materialize_public(model, modules, destination)
    # Plain parameters and buffers are new objects; look them up by name.
    if any(tensor.is_meta for tensor in targets.tensors):
        state = model.state_dict(keep_vars=True)
        targets.tensors[:] = [state[name] for name in targets.names]


def cpu_offloaded_ids(groups: Iterable[Any]) -> set[int]:
    """Returns the ids of the parameters that FSDP keeps on the CPU. ``groups``: :attr:`Modules.fsdp_groups`."""
    offloading = [group for group in groups if isinstance(group.offload_policy, CPUOffloadPolicy)]
    return {id(parameter.sharded_param) for group in offloading for parameter in group.fsdp_params}


def _materialize_public(model: nn.Module, modules: Modules, destination: Destination) -> None:
    materialized: dict[int, Tensor] = {}

    def empty_like(tensor: Tensor) -> Tensor:
        if tensor.is_meta and id(tensor) not in materialized:
            dtype, device = destination(tensor)
            materialized[id(tensor)] = torch.empty_like(tensor, dtype=dtype, device=device)
        return materialized.get(id(tensor), tensor)

    # nn.Module would give each owner of a tied plain parameter a parameter of its own.
    ties: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in modules.unique:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and not isinstance(parameter, DTensor):
                ties[id(parameter)].append((module, name))
    model._apply(empty_like)  # type: ignore[no-untyped-call]
    for (first_module, first_name), *others in ties.values():
        for module, name in others:
            module._parameters[name] = first_module._parameters[first_name]


# ---- the private path ----


def _can_be_built(tensors: list[Tensor]) -> bool:
    """Returns True if the private path can build such tensors: no subclass other than DTensor, nor a DTensor over one."""
    kinds = {type(tensor._local_tensor if type(tensor) is DTensor else tensor) for tensor in tensors}
    return kinds <= {Tensor, nn.Parameter}


def _materialize_private(modules: Modules, destination: Destination) -> None:
    """Gives parameters that are DTensors storage in place, all of one dtype and device by one native call; replaces others."""
    replaced: dict[int, tuple[Tensor, Tensor]] = {}  # keeps the old tensors alive, so that ids stay unique
    in_place: dict[int, Any] = {}
    for module in modules.unique:
        tensor_dicts: list[dict[str, Any]] = [module._parameters, module._buffers]
        for owned in tensor_dicts:
            for name, tensor in owned.items():
                if tensor is None or id(tensor) in in_place or not tensor.is_meta:
                    continue
                if type(tensor) is DTensor and owned is module._parameters:
                    in_place[id(tensor)] = tensor
                    continue
                if id(tensor) not in replaced:
                    replaced[id(tensor)] = tensor, _empty_like(tensor, *destination(tensor))
                owned[name] = replaced[id(tensor)][1]
    groups: dict[tuple[torch.dtype, torch.device], list[Any]] = defaultdict(list)
    for parameter in in_place.values():
        groups[destination(parameter)].append(parameter)
    for (dtype, device), parameters in groups.items():
        local_tensors = ops.allocate_like([p._local_tensor for p in parameters], dtype, device, _THREADS)
        for parameter, local in zip(parameters, local_tensors, strict=True):
            _set_storage(parameter, local, _with_dtype(parameter._spec, dtype))
    for fsdp_parameter in modules.fsdp_parameters:  # FSDP takes note of the storage; it may pad or pin it
        fsdp_parameter.reset_sharded_param()


def _set_storage(parameter: Any, local: Tensor, spec: Any) -> None:
    new: Any = DTensor.__new__(DTensor, local, spec, requires_grad=parameter.requires_grad)
    if parameter._use_count() > 1:
        new._is_param = True  # an autograd graph has it, and torch knows whether that is in order
        torch.utils.swap_tensors(parameter, new)  # type: ignore[no-untyped-call]
    else:
        torch._C._swap_tensor_impl(parameter, new)
        parameter._local_tensor, parameter._spec = local, spec


def _empty_like(meta: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    local = meta._local_tensor if isinstance(meta, DTensor) else meta
    empty = torch.empty_strided(local.shape, local.stride(), dtype=dtype, device=device)
    if isinstance(meta, DTensor):
        return DTensor(empty, _with_dtype(meta._spec, dtype), requires_grad=False)  # type: ignore[no-untyped-call]
    return nn.Parameter(empty, meta.requires_grad) if isinstance(meta, nn.Parameter) else empty


def _with_dtype(spec: Any, dtype: torch.dtype) -> Any:
    """``spec``: a DTensorSpec."""
    if dtype == spec.tensor_meta.dtype:
        return spec
    return replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))
