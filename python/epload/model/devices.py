"""On which device a load runs, and whether it can: decided on every rank before anything moves."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from epload.model.targets import Targets
from epload.native.build import build_info

CPU = torch.device("cpu")


class Devices(NamedTuple):
    """Where a load works, and where what is on meta goes."""

    load: torch.device
    """The accelerator that some of the targets are on, or will be; else the CPU."""
    home: torch.device
    """Of tensors on meta that do not say: that of the others."""
    meta: bool
    """Whether any target is on meta now."""


def devices_of(targets: Targets, offloaded: AbstractSet[int], stream: torch.Stream | None) -> Devices:
    """DTensors on meta will be on their mesh's device, unless FSDP keeps them on CPU. Plain tensors on meta go to the device of
    the others or of their meshes, or else of the stream.

    Args:
        offloaded: ids of parameters that FSDP keeps on CPU.
        stream: the one the loader was given.

    Raises:
        ValueError: targets are on two accelerators, or the stream is of another device than they are.
    """
    first: dict[torch.device, str] = {}
    homes: dict[torch.device, str] = {}
    floating, meta = None, False
    for name, tensor in zip(targets.names, targets.tensors, strict=True):
        device = tensor.device
        meta |= tensor.is_meta
        if isinstance(tensor, DTensor) and (tensor.is_meta or id(tensor) in offloaded):
            home = _current(name, tensor.device_mesh.device_type)
            homes.setdefault(home, name)
            device = CPU if id(tensor) in offloaded else home
        elif tensor.is_meta:
            floating = name
            continue
        first.setdefault(device, name)
    seen = {device: name for device, name in {**homes, **first}.items() if device != CPU}
    if len(seen) > 1:
        said = ", ".join(f"{name} on {device}" for device, name in seen.items())
        raise ValueError(f"expected the model's tensors on one accelerator device (and CPU), got {said}")
    home = next(iter(seen), stream.device if stream is not None and not first else CPU)
    if floating is not None:
        first.setdefault(home, floating)
    device = next((device for device in first if device != CPU), CPU)
    if stream is not None and stream.device != device:
        what = "stream=None for a model on cpu" if device == CPU else f"a stream of {device}, where the model is"
        raise ValueError(f"expected {what}, got a stream of {stream.device}")
    return Devices(device, home, meta)


def _current(name: str, kind: str) -> torch.device:
    if kind == "cpu":
        return CPU
    here = torch.accelerator.current_accelerator()
    if here is None or here.type != kind:
        has = f"has {here.type}" if here is not None else "has no accelerator"
        raise ValueError(f"{name} lies on a mesh of {kind} devices, but this torch {has}; install a torch for {kind}")
    return torch.device(kind, torch.accelerator.current_device_index())


def check_backend(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raises ValueError unless the group can send tensors of a device."""
    if group is None or device == CPU:
        return
    config = dist.get_backend_config(group)
    kinds = dict(part.partition(":")[::2] for part in config.split(","))
    if device.type not in kinds:
        raise ValueError(
            f"expected a process group with a backend for {device.type} tensors, got {config!r}; "
            "make it with one, e.g. init_process_group('cpu:gloo,cuda:nccl')"
        )
    if kinds[device.type] == "hccl" and not build_info()["npu"]:
        raise ValueError(
            f"the process group {config!r} uses HCCL, for which this build of epload has no part; rebuild it with EPLOAD_NPU=1 "
            "in the environment that has torch_npu"
        )


def check_stream(stream: torch.Stream | None) -> None:
    """Raises ValueError for a stream on which collectives cannot be queued: one that torch_npu did not make."""
    if stream is not None and stream.device.type == "npu" and type(stream).__name__ == "ExternalStream":
        raise ValueError(
            "expected a stream that torch_npu made, got an ExternalStream, which its process groups refuse; "
            "pass a torch.npu.Stream, or stream=None"
        )
