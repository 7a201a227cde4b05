"""Reads DTensors and FSDP2's state: layouts, local tensors, parameter groups.

torch's public API costs 5 us and more for each of thousands of DTensors. Private attributes are read instead, which give the same
with every supported torch (tested).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Placement as TorchPlacement

from epload.core.placement import Layout, Placement, Sharded, owned_shape
from epload.errors import ModelMismatch
from epload.native import ops

_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
_FSDP_COUNTS_STRIDED_SHARDS = (2, 13)
"""The first torch minor known to do so."""
_MAX_RANKS_SHOWN = 64


def parameter_groups(module: FSDPModule) -> list[Any]:
    """Returns the parameter groups of one FSDP module. torch 2.11 has at most one; later versions have a list."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def fsdp_modules() -> list[FSDPModule]:
    """Returns all modules in this process that FSDP2 shards."""
    return [module for module in _module_state_mapping if isinstance(module, FSDPModule)]


def owners_of_parameters(module: FSDPModule) -> Iterator[nn.Module]:
    """Yields the modules that have the parameters which an FSDP module gathers."""
    for info in (parameter._module_info for group in parameter_groups(module) for parameter in group.fsdp_params):
        yield from (info.module, *info.shared_modules)


def reshard(module: FSDPModule) -> None:
    """Puts one FSDP module back into its sharded state: writes to unsharded parameters would be lost.

    ``FSDPModule.reshard`` does nothing if a forward pass has failed, or has run only a part of what is gathered together, and the
    module stays unsharded after it. And the next pass would still use what was gathered ahead.
    """
    module.reshard()
    for group in parameter_groups(module):
        group.wait_for_unshard()
        group._to_sharded()


def fsdp_shard_axes(modules: Iterable[FSDPModule]) -> dict[int, int]:
    """Returns the mesh axis along which FSDP shards each parameter, by the parameter's id; only for parameters whose placements
    or coordinates do not describe their shards.

    FSDP assigns shards by rank in its process group, which has its ranks in ascending order whatever their order in the mesh. It
    shards what tensor parallelism left to a rank, which makes a _StridedShard whose split factor is the number of shards of that
    dim on other axes. torch 2.11 does not count axes that are themselves a _StridedShard, and reports a Shard; :func:`layout_of`
    corrects that."""
    groups = [group for module in modules for group in parameter_groups(module)]
    return {
        id(fsdp_param.sharded_param): _axis_of_group(fsdp_param.sharded_param, group.mesh_info)
        for group in groups
        if _is_undescribed(group.mesh_info)
        for fsdp_param in group.fsdp_params
    }


def _is_undescribed(mesh_info: Any) -> bool:
    """Returns True if FSDP shards, and placements or coordinates may say otherwise."""
    axis = getattr(mesh_info, "shard_mesh_dim", None)
    if axis is None or _TORCH < _FSDP_COUNTS_STRIDED_SHARDS:
        return axis is not None
    return bool(mesh_info.shard_mesh_rank != mesh_info.mesh.get_coordinate()[axis])


def _axis_of_group(parameter: DTensor, mesh_info: Any) -> int:
    """Returns the axis of the parameter's own mesh, which may have axes for tensor parallelism too, that FSDP's group spans."""
    # By ranks: torch may replace the mesh of a parameter by an equal one, which has groups of its own.
    mesh, ranks = parameter.device_mesh, get_process_group_ranks(mesh_info.shard_process_group)
    return next(axis for axis in range(mesh.ndim) if get_process_group_ranks(mesh.get_group(axis)) == ranks)


Mesh = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape of a device mesh, and its global ranks in row-major order."""


def mesh_of(mesh: DeviceMesh) -> Mesh:
    return tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist())


def describe_mesh(mesh: Mesh) -> str:
    shape, ranks = mesh
    shown = ", ".join(map(str, ranks[:_MAX_RANKS_SHOWN]))
    return f"[{shown}{', ...' if len(ranks) > _MAX_RANKS_SHOWN else ''}] of shape {list(shape)}"


def layout_of(name: str, tensor: Tensor, fsdp_axis: int | None = None, in_module: bool = True) -> tuple[Layout, tuple[int, ...]]:
    """Returns the layout of a DTensor or a plain tensor, and this rank's coordinate in its mesh, by the order of the mesh's
    process groups along each axis that shards the tensor.

    Args:
        fsdp_axis: see :func:`fsdp_shard_axes`.
        in_module: False for an entry of a state dict, which is what its ``full_tensor()`` returns, by the order of the groups.

    Raises ModelMismatch: a placement that cannot be loaded into (Partial), a mesh without this rank, or a mesh whose groups
    have another order than its coordinates, along an axis that shards the tensor other than by FSDP; a local tensor of another
    shape than the placements give."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Layout(shape, (), ()), ()
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ModelMismatch(f"{name} is on a mesh that does not include this rank")
    placements = [_placement(name, p, tensor) for p in tensor.placements]
    if fsdp_axis is not None:
        placements[fsdp_axis] = _with_split_factor(placements, fsdp_axis, mesh)
    layout = Layout(shape, tuple(mesh.shape), tuple(placements))
    by_group = tuple(
        group_rank(mesh, axis) if isinstance(placement, Sharded) else coordinate[axis]
        for axis, placement in enumerate(placements)
    )
    reordered = [axis for axis, index in enumerate(by_group) if index != coordinate[axis]]
    local, owned = tuple(with_memory(tensor).shape), owned_shape(layout, by_group)
    is_undefined = local != owned and prod(local) + prod(owned) > 0  # torch gives empty shards other shapes, too
    for axis in reordered:
        if is_undefined or (in_module and axis != fsdp_axis):
            raise ModelMismatch(_order_problem(name, mesh, axis))
    if is_undefined:
        raise ModelMismatch(
            f"{name}, of shape {list(shape)}, has a local tensor of shape {list(local)} on this rank, where its placements "
            f"({', '.join(map(str, tensor.placements))}) on the mesh {describe_mesh(mesh_of(mesh))} give {list(owned)}: "
            "from_local() was called with shards of other sizes than distribute_tensor() makes; make it with the latter"
        )
    return layout, by_group


def check_packed(prefix: str, module: Any) -> None:
    """Raises ModelMismatch if the tensor parallelism of diffusers has divided a matrix of this model block by block, such as gate
    and up: its placement says that ranks have consecutive rows. ``prefix``: of the model's names."""
    config = getattr(vars(module).get("_parallel_config"), "tensor_parallel_config", None)
    if config is None:
        return
    from diffusers.hooks.tensor_parallel import resolve_tp_shard_specs

    for name, spec in resolve_tp_shard_specs(module, module._tp_plan, 1).items():
        if spec.block_sizes and len(spec.block_sizes) > 1 and isinstance(module.get_parameter(name), DTensor):
            raise ModelMismatch(
                f"{prefix}{name} is divided by the tensor parallelism of diffusers, block by block "
                f"({', '.join(map(str, spec.block_sizes))} along dimension {spec.dim}), while its placement says that ranks have "
                "consecutive parts; load, save or send the model without it: enable_parallelism() divides a loaded model"
            )


def group_rank(mesh: DeviceMesh, axis: int) -> int:
    """Returns this rank's index along an axis of a mesh in the order of the axis's process group, which torch's collectives use.

    torch sorts the ranks of a group, so that this differs from the coordinate if the mesh does not list them in ascending order.
    A mesh without groups has coordinates only.
    """
    try:
        return mesh.get_local_rank(axis)
    except RuntimeError:  # made without process groups
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        return coordinate[axis]


def _order_problem(name: str, mesh: DeviceMesh, axis: int) -> str:
    title = f" ({mesh.mesh_dim_names[axis]})" if mesh.mesh_dim_names else ""
    return (
        f"{name} is sharded over axis {axis}{title} of the mesh {describe_mesh(mesh_of(mesh))}, where the process group "
        "orders the ranks differently from the mesh. torch scatters and gathers shards in the group's order but computes "
        "offsets by the mesh's coordinates, so that it is undefined which shard a rank has. List the ranks of a mesh in "
        "ascending order along each axis"
    )


def _with_split_factor(placements: list[Placement], axis: int, mesh: DeviceMesh) -> Placement:
    """Returns the placement along FSDP's axis: it shards each shard that the axes to its right make of the same dim."""
    placement = placements[axis]
    if placement is None:
        return None
    axes = range(axis + 1, len(placements))
    return Sharded(placement.dim, prod(mesh.size(a) for a in axes if getattr(placements[a], "dim", None) == placement.dim))


def _placement(name: str, placement: TorchPlacement, tensor: DTensor) -> Placement:
    if isinstance(placement, Replicate):
        return None
    # Some torch versions derive _StridedShard from Shard and some do not. Both have dim; only _StridedShard has split_factor.
    split_factor = getattr(placement, "split_factor", None)
    if isinstance(placement, Shard) or split_factor is not None:
        dim = int(placement.dim)  # type: ignore[attr-defined]
        return Sharded(dim % tensor.ndim if tensor.ndim else dim, int(split_factor or 1))
    raise ModelMismatch(f"{name} has placement {placement}, which cannot be loaded into; redistribute it to Shard or Replicate")


def with_memory(tensor: Tensor) -> Tensor:
    """Returns the tensor whose memory a tensor is: the local tensor of a DTensor, else itself."""
    if type(tensor) is DTensor:
        return tensor._local_tensor
    if isinstance(tensor, DTensor):
        with torch.no_grad():  # with autograd on, to_local() takes ten times as long
            return tensor.to_local()
    return tensor


def local_tensors(tensors: list[Tensor]) -> list[Tensor]:
    """``to_local()`` of each DTensor, without a gradient, and each plain tensor, detached. They alias the model's storage."""
    with torch.no_grad():
        return [with_memory(tensor) if isinstance(tensor, DTensor) else tensor.detach() for tensor in tensors]


def metadata(tensors: Sequence[Any]) -> tuple[list[object], Tensor]:
    """Returns all of tensors that does not depend on their values, to be compared with a later result: how each is sharded, and
    what :func:`epload.native.ops.describe_memory` returns of the local tensors."""
    shardings: list[object] = [tensor._spec if isinstance(tensor, DTensor) else None for tensor in tensors]
    local = [with_memory(tensor) for tensor in tensors]
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return shardings, ops.describe_memory(local)
