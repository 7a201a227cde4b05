"""Chooses the device of a load and checks that the load can run there, on every rank before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from epload.model.targets import Targets
from epload.native.info import has_npu

CPU = torch.device("cpu")


def requested_device(passed: object) -> torch.device | None:
    """Returns the device that a caller has passed as ``device=``, with its index; None if there is none.

    Raises:
        TypeError: it is neither a device nor a string. ValueError: this process has no such device.
    """
    if passed is None:
        return None
    if not isinstance(passed, str | torch.device):
        raise TypeError(f"expected device to be a torch.device or its name, such as 'cuda:0', got {passed!r}")
    try:
        device = torch.device(passed)
    except RuntimeError:
        raise ValueError(f"expected device to be the name of a device, such as 'cuda:0', got {passed!r}") from None
    if device.type == "cpu":
        return CPU
    current = _current_device(f"device='{device}'", device.type)
    number = torch.accelerator.device_count()
    if device.index is not None and device.index >= number:
        raise ValueError(f"expected device to be one of {device.type}:0 to {device.type}:{number - 1}, got {passed!r}")
    return current if device.index is None else device


def devices_of(
    targets: Targets,
    offloaded: AbstractSet[int],
    streams: Sequence[torch.Stream],
    requested: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.device, torch.device]:
    """Returns the device for loading these targets, and that for meta tensors whose own device is not known. The first is the
    accelerator that some targets are on, or will be, or the CPU if there is none; the second the accelerator of the other
    targets or of their meshes, otherwise what the caller requested, the streams' device, or that of the process group.

    Args:
        offloaded: ids of the parameters that FSDP keeps on the CPU.
        streams: those that the caller gave.
        requested: see :func:`requested_device`.
        group: that of the load.

    Raises:
        ValueError: targets are on two accelerators or not on the requested device, or a stream is on a device where they are not.
    """
    accelerators: dict[torch.device, str] = {}
    current: dict[str, torch.device] = {}
    """Device of each type of mesh."""
    unlocated, fills_accelerator = True, False
    for name, tensor in zip(targets.names, targets.tensors, strict=True):
        device, is_offloaded = tensor.device, id(tensor) in offloaded
        mesh_type = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else ""
        if device.type == "meta" and not mesh_type:
            fills_accelerator = True
            continue
        unlocated = False
        if mesh_type and (device.type == "meta" or is_offloaded):  # where FSDP computes with it
            if mesh_type not in current:
                current[mesh_type] = _current_device(f"the mesh of {name}", mesh_type)
            device = current[mesh_type]
        if requested not in (None, device):
            raise ValueError(
                f"expected device='{requested}' to be that of the model's tensors that have storage or a mesh, but {name} is on "
                f"{'a mesh of ' if mesh_type else ''}{device}; leave out device=, or move the model first"
            )
        if device != CPU:
            accelerators.setdefault(device, name)
            fills_accelerator |= not is_offloaded
    if len(accelerators) > 1:
        listed = ", ".join(f"{name} on {device}" for device, name in accelerators.items())
        raise ValueError(f"expected the model's tensors on one accelerator device (and CPU), got {listed}")
    chosen = requested or (streams[0].device if streams else _device_of(group))
    materialize_on = next(iter(accelerators), chosen if unlocated else CPU)
    load = materialize_on if fills_accelerator else CPU
    for stream in streams:
        if stream.device != load:
            expected = "stream=None for a model on cpu" if load == CPU else f"a stream of {load}, where the model is"
            raise ValueError(f"expected {expected}, got a stream of {stream.device}")
    return load, materialize_on


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Returns the device of a process group: the one that it was initialized for (``device_id=``), the current accelerator if it
    has no backend for tensors on CPU, else the CPU."""
    if group is None:
        return CPU
    if group.bound_device_id is not None:
        return group.bound_device_id
    available, backends = torch.accelerator.current_accelerator(), backends_of(group)
    if available is None or "cpu" in backends or available.type not in backends:
        return CPU
    return torch.device(available.type, torch.accelerator.current_device_index())


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Returns a group's backend for each type of device."""
    return dict(part.partition(":")[::2] for part in dist.get_backend_config(group).split(","))


def _current_device(asker: str, device_type: str) -> torch.device:
    if device_type == "cpu":
        return CPU
    available = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if available is None or available.type != device_type:
        found = "no accelerator" if available is None else available.type
        raise ValueError(f"{asker} asks for {device_type}, but torch finds {found} here; epload doctor shows more")
    return torch.device(device_type, torch.accelerator.current_device_index())


def check_backend(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raises ValueError unless the group has a backend for tensors on a device, and this build of epload supports it."""
    if group is None or device == CPU:
        return
    config, backends = dist.get_backend_config(group), backends_of(group)
    if device.type not in backends:
        raise ValueError(
            f"expected a process group with a backend for {device.type} tensors, got {config!r}; "
            "make it with one, e.g. init_process_group('cpu:gloo,cuda:nccl')"
        )
    if backends[device.type] == "hccl" and not has_npu():
        raise ValueError(
            f"the process group {config!r} uses HCCL, which this build of epload does not support; rebuild it with EPLOAD_NPU=1 "
            "in the environment that has torch_npu"
        )


def check_stream(stream: torch.Stream | None) -> None:
    """Raises ValueError for a stream that was not made by torch_npu: its process groups queue no collectives on such a stream."""
    if stream is not None and stream.device.type == "npu" and type(stream).__name__ == "ExternalStream":
        raise ValueError(
            "expected a stream made by torch_npu, got an ExternalStream, which its process groups refuse; "
            "pass a torch.npu.Stream, or stream=None"
        )
