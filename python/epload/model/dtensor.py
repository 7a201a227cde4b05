"""Reads DTensors and FSDP2's state: layouts, local tensors, parameter groups.

Loads read thousands of DTensors, and torch's public API costs 5 us for each: 0.1 s for a model of 18,867. On the torch
minors that are listed here, private attributes are read instead. Both give equal results (tested).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Placement as TorchPlacement

from epload.core.placement import Layout, Placement, Replicated, Sharded, owned_shape
from epload.errors import ModelMismatch

_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
_PRIVATE_PATH_TESTED = {(2, 13), (2, 14)}
_FSDP_COUNTS_STRIDED_SHARDS = (2, 13)
"""The first torch minor known to do so."""
_MAX_RANKS_SHOWN = 64


def private_path_available() -> bool:
    """Returns True if the private paths were tested with this torch."""
    return _TORCH in _PRIVATE_PATH_TESTED


# ---- FSDP ----


def parameter_groups(module: FSDPModule) -> list[Any]:
    """The parameter groups of one FSDP module. torch 2.11 has at most one; later versions have a list."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def fsdp_shard_axes(modules: Iterable[FSDPModule]) -> dict[int, int]:
    """Returns the mesh axis along which FSDP shards each parameter, by the parameter's id; only for parameters whose placements
    or coordinates do not describe their shards.

    FSDP assigns shards by rank in its process group, which has its ranks in ascending order whatever their order in the mesh.

    FSDP shards what tensor parallelism left to a rank, which makes a _StridedShard whose split factor is the number of shards of
    that dim on other axes. torch 2.11 does not count axes that are themselves a _StridedShard (a fused projection), and reports a
    Shard; :func:`layout_of` corrects that.
    """
    groups = [group for module in modules for group in parameter_groups(module)]
    sharding = [group for group in groups if getattr(group.mesh_info, "shard_mesh_dim", None) is not None]
    if _TORCH >= _FSDP_COUNTS_STRIDED_SHARDS:
        sharding = [group for group in sharding if not _in_mesh_order(group.mesh_info)]
    return {
        id(fsdp_param.sharded_param): _axis_of_group(fsdp_param.sharded_param, group.mesh_info)
        for group in sharding
        for fsdp_param in group.fsdp_params
    }


def _in_mesh_order(mesh_info: Any) -> bool:
    """Returns True if FSDP's rank in its group is the coordinate in the mesh."""
    return bool(mesh_info.shard_mesh_rank == mesh_info.mesh.get_coordinate()[mesh_info.shard_mesh_dim])


def _axis_of_group(parameter: DTensor, mesh_info: Any) -> int:
    """Returns the axis of the parameter's own mesh, which may have axes for tensor parallelism too, that FSDP's group spans."""
    # By ranks: torch may replace the mesh of a parameter by an equal one, which has groups of its own.
    mesh, ranks = parameter.device_mesh, get_process_group_ranks(mesh_info.shard_process_group)
    return next(axis for axis in range(mesh.ndim) if get_process_group_ranks(mesh.get_group(axis)) == ranks)


# ---- layouts ----


@dataclass(frozen=True)
class Mesh:
    """The shape and the ranks of a device mesh."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """Global ranks in row-major order."""

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Mesh:
        return cls(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.ranks[:_MAX_RANKS_SHOWN]))
        return f"[{shown}{', ...' if len(self.ranks) > _MAX_RANKS_SHOWN else ''}] of shape {list(self.shape)}"


def layout_of(
    name: str, tensor: Tensor, fsdp_axis: int | None = None, in_module: bool = True
) -> tuple[Layout, tuple[int, ...]]:
    """Returns the layout of a DTensor or a plain tensor, and this rank's coordinate in its mesh, by the order of the mesh's
    process groups along each axis that shards the tensor.

    Args:
        fsdp_axis: see :func:`fsdp_shard_axes`.
        in_module: False for an entry of a state dict, which is what its ``full_tensor()`` returns, by the order of the groups.

    Raises:
        ModelMismatch: a placement that cannot be loaded into (Partial), a mesh without this rank, or a mesh whose groups have
            another order than its coordinates, along an axis that shards the tensor other than by FSDP.
    """
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
    by_group = list(coordinate)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Sharded):
            by_group[axis] = group_rank(mesh, axis)
            if by_group[axis] != coordinate[axis] and in_module and axis != fsdp_axis:
                raise ModelMismatch(_order_problem(name, mesh, axis))
    if by_group != list(coordinate) and tuple(tensor.to_local().shape) != owned_shape(layout, by_group):
        raise ModelMismatch(_order_problem(name, mesh, next(a for a, n in enumerate(by_group) if n != coordinate[a])))
    return layout, tuple(by_group)


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
        f"{name} is sharded over axis {axis}{title} of the mesh {Mesh.of(mesh)}, where the process group orders the ranks "
        "differently from the mesh. torch scatters and gathers shards in the group's order but computes offsets by the mesh's "
        "coordinates, so that it is undefined which shard a rank has. List the ranks of a mesh in ascending order along each axis"
    )


def _with_split_factor(placements: list[Placement], axis: int, mesh: DeviceMesh) -> Placement:
    """The placement along FSDP's axis: it shards each shard that the axes to its right make of the same dim."""
    placement = placements[axis]
    if isinstance(placement, Replicated):
        return placement
    right = list(enumerate(placements))[axis + 1 :]
    split_factor = prod(mesh.size(i) for i, p in right if isinstance(p, Sharded) and p.dim == placement.dim)
    return Sharded(placement.dim, split_factor)


def _placement(name: str, placement: TorchPlacement, tensor: DTensor) -> Placement:
    if isinstance(placement, Replicate):
        return Replicated()
    # Some torch versions derive _StridedShard from Shard and some do not. Both have dim; only _StridedShard has split_factor.
    split_factor = getattr(placement, "split_factor", None)
    if isinstance(placement, Shard) or split_factor is not None:
        dim = int(placement.dim)  # type: ignore[attr-defined]
        return Sharded(dim % tensor.ndim if tensor.ndim else dim, int(split_factor or 1))
    raise ModelMismatch(
        f"{name} has placement {placement}, which cannot be loaded into; redistribute it to Shard or Replicate"
    )


# ---- many tensors at once ----


def local_tensors(tensors: list[Tensor], private: bool | None = None) -> list[Tensor]:
    """``to_local()`` of each DTensor, without a gradient, and each plain tensor, detached. They alias the model's storage."""
    private = private_path_available() if private is None else private
    with torch.no_grad():
        if not private:
            return [_to_local(t) for t in tensors]
        return [t._local_tensor if type(t) is DTensor else _to_local(t) for t in tensors]


def _to_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def kinds(tensors: list[Any]) -> tuple[Sequence[int], Sequence[int]]:
    """Numbers tensors by what they have in common: class, dtype and device, and the layout of a DTensor. Without the private path
    each is of its own kind.

    Returns:
        The kind of each tensor, and of each kind the index of the first tensor.
    """
    if not private_path_available():
        return range(len(tensors)), range(len(tensors))
    numbers: dict[tuple[object, ...], int] = {}
    firsts: list[int] = []
    kind_of: list[int] = []
    for i, t in enumerate(tensors):
        key = type(t), t.dtype, t.device, id(t._spec) if type(t) is DTensor else None
        number = numbers.setdefault(key, len(firsts))
        if number == len(firsts):
            firsts.append(i)
        kind_of.append(number)
    return kind_of, firsts


class MetadataRecord:
    """The shapes, dtypes, devices and layouts of many tensors, to check later that they are unchanged.

    On the private path a DTensor's metadata is its spec and its local tensor, compared by identity. The record keeps the specs,
    which refer to no tensor. It does not keep the local tensors alive: as another one may get the same id, it fails every check
    after one of them has been freed.
    """

    def __init__(self, tensors: list[Tensor], private: bool | None = None) -> None:
        self._private = private_path_available() if private is None else private
        self._freed: list[object] = []
        self._local_tensors = [
            weakref.ref(t._local_tensor, self._freed.append) for t in tensors if self._private and type(t) is DTensor
        ]
        self._metadata = self._read(tensors)

    def matches(self, tensors: list[Tensor]) -> bool:
        """Returns True if these tensors have the recorded metadata, in the recorded order."""
        return self._read(tensors) == self._metadata and not self._freed

    def _read(self, tensors: list[Tensor]) -> object:
        if not self._private:
            return [_metadata(t) for t in tensors]
        is_dtensor = [type(t) is DTensor for t in tensors]
        dtensors: list[Any] = list(compress(tensors, is_dtensor))
        others = [t for t in tensors if type(t) is not DTensor] if len(dtensors) < len(tensors) else []
        specs, local = [t._spec for t in dtensors], [id(t._local_tensor) for t in dtensors]
        return is_dtensor, specs, local, [_metadata(t) for t in others]


def _metadata(t: Tensor) -> tuple[object, ...]:
    if isinstance(t, DTensor):
        return t.shape, t.dtype, t.device, t.placements, t.device_mesh
    return t.shape, t.dtype, t.device
