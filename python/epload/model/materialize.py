"""Gives the meta tensors of a model storage, fast.

The public API costs 100 us and more per parameter: nn.Module applies a function that goes through DTensor's dispatcher, and
nn.Parameter detaches. The private path builds DTensors directly. The public path is for subclasses of DTensor, and of the tensors
in them. Both give equal models, with every supported torch (tested).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from epload.core import garbage_collection
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
    """Replaces meta tensors by uninitialized ones and buffers whose targets have another dtype by converted ones, and updates
    the targets accordingly.

    Keeps ties and the identity of DTensor parameters; plain tensors become new objects, as with ``to_empty``.
    Parameters that FSDP offloads and DTensors on a CPU mesh are allocated on the CPU, all others on ``device``.

    ``private`` forces or forbids the private path; None decides by the classes of the tensors."""
    if not targets.unsaved_meta and not targets.has_meta:
        return
    modules = modules or Modules(model)
    dtypes = {id(tensor): dtype for tensor, dtype in zip(targets.tensors, targets.dtypes, strict=True)}
    offloaded = modules.offloaded

    def destination(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
        on_cpu = id(tensor) in offloaded or (isinstance(tensor, DTensor) and tensor.device_mesh.device_type == "cpu")
        return dtypes.get(id(tensor), tensor.dtype), torch.device("cpu") if on_cpu else device

    found = list(_replaced_tensors(modules, dtypes))  # modules may share a dict
    distinct: dict[int, Any] = {id(tensor): tensor for *_, tensor in found}
    # FSDP and optimizers refer to DTensors: they keep their identity.
    parameters = {i: t for i, t in distinct.items() if isinstance(t, DTensor) and isinstance(t, nn.Parameter)}
    plain = {i: t for i, t in distinct.items() if i not in parameters}
    replaced = _empty_like([tensor for tensor in plain.values() if tensor.is_meta], destination)
    replaced |= {number: tensor.to(dtypes[number]) for number, tensor in plain.items() if not tensor.is_meta}
    for owned, name, tensor in found:
        owned[name] = replaced.get(id(tensor), tensor)
    targets.tensors[:] = [replaced.get(id(tensor), tensor) for tensor in targets.tensors]  # also if what follows fails
    if private is None:
        private = all(type(tensor) is DTensor and type(tensor._local_tensor) is Tensor for tensor in parameters.values())
    if private:
        _fill_in_place(parameters.values(), destination)
        for fsdp_parameter in modules.fsdp_parameters:  # FSDP takes note of the storage; it may pad or pin it
            fsdp_parameter.reset_sharded_param()
    elif parameters:
        empty = _empty_like(parameters.values(), destination)
        model._apply(lambda tensor: empty.get(id(tensor), tensor))  # type: ignore[no-untyped-call]
    if any(tensor.is_meta for tensor in targets.tensors):  # views, which hooks make
        state = model.state_dict(keep_vars=True)
        targets.tensors[:] = [state.get(name, tensor) for name, tensor in zip(targets.names, targets.tensors, strict=True)]
    targets.has_meta = False


def _replaced_tensors(modules: Modules, dtypes: Mapping[int, torch.dtype]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yields each tensor that is on meta, or gets another dtype, with the dict of a module that holds it and its name there."""
    for module in modules.unique:
        tensor_dicts: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for owned in tensor_dicts:
            for name, tensor in owned.items():
                if tensor is not None and (tensor.is_meta or dtypes.get(id(tensor), tensor.dtype) != tensor.dtype):
                    yield owned, name, tensor


def _by_destination(tensors: Iterable[Any], destination: Destination) -> Iterable[tuple[Any, list[Any]]]:
    groups: dict[tuple[torch.dtype, torch.device], list[Any]] = defaultdict(list)
    for tensor in tensors:
        groups[destination(tensor)].append(tensor)
    return groups.items()


def _empty_like(tensors: Iterable[Tensor], destination: Destination) -> dict[int, Tensor]:
    """Returns tensors with storage, by the ids of those on meta. Plain ones of one dtype and device are made by one native call:
    of a tensor on meta ``torch.empty_like`` is written in Python, and takes 70 us."""
    empty: dict[int, Tensor] = {}
    for (dtype, device), members in _by_destination(tensors, destination):
        plain = [tensor for tensor in members if type(tensor) in (Tensor, nn.Parameter) and tensor.is_contiguous()]
        with torch.no_grad():  # autograd would take what is made for a function of all parameters
            made = dict(zip(map(id, plain), ops.allocate_like(plain, dtype, device, _THREADS), strict=True))
        for tensor in members:
            new = made.get(id(tensor))
            if new is None:
                new = torch.empty_like(tensor, dtype=dtype, device=device, requires_grad=False)
            empty[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    return empty


def _fill_in_place(parameters: Iterable[Any], destination: Destination) -> None:
    """Gives parameters storage by private paths: all of one dtype and device by one native call."""
    for (dtype, device), members in _by_destination(parameters, destination):
        with torch.no_grad():
            local_tensors = ops.allocate_like([p._local_tensor for p in members], dtype, device, _THREADS)
        for parameter, local in zip(members, local_tensors, strict=True):
            meta = parameter._spec.tensor_meta
            spec = parameter._spec if dtype == meta.dtype else replace(parameter._spec, tensor_meta=meta._replace(dtype=dtype))
            _set_storage(parameter, local, spec)


def _set_storage(parameter: Any, local: Tensor, spec: Any) -> None:
    new: Any = DTensor.__new__(DTensor, local, spec, requires_grad=parameter.requires_grad)
    if parameter._use_count() > 1:
        new._is_param = True  # an autograd graph has it, and torch knows whether that is in order
        torch.utils.swap_tensors(parameter, new)  # type: ignore[no-untyped-call]
    else:
        torch._C._swap_tensor_impl(parameter, new)
        parameter._local_tensor, parameter._spec = local, spec
