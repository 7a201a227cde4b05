"""Parts of the GPU check: whole loads of a Mixture of Experts from the page cache, by one rank and by several; peers."""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import epload
from gpu_parts.common import Clock, Row, checkpoint_of, device_of, finished, size_of
from support import ranks
from workload import FILE, Reference, Size, meta_model, sharded_model, wrong_shards


def load(options: argparse.Namespace) -> Iterator[Row]:
    """From meta, and again into the same model, with the phases of each; every bit is compared with the file."""
    device, folder = device_of(options), checkpoint_of(options)
    model = meta_model(size_of(options))
    stream = torch.Stream(device) if device.type != "cpu" else None
    with epload.HierarchicalLoader(stream=stream, progress=False, readers="every") as loader:
        for what in ("from meta", "reload", "reload again"):
            yield timed(f"load, {what}", loader, model, folder, device)
    if wrong := wrong_shards(model, Reference(folder, 0, 1)):
        raise RuntimeError(f"{len(wrong)} tensors differ from the file: {wrong[:3]}")
    yield {"what": "load, compared with the file", "wrong": 0}


def timed(what: str, loader: epload.HierarchicalLoader, model: nn.Module, folder: Path, device: torch.device) -> Row:
    """One load until the device has done it, which is after it returns."""
    began = time.perf_counter()
    report = loader.load(model, folder)
    finished(device, lambda: None)()
    seconds = time.perf_counter() - began
    row = {"what": what, "GB": report.nbytes / 1e9, "s": seconds, "GB_s": report.nbytes / seconds / 1e9}
    return row | {f"{name}_s": phase.seconds for name, phase in report.phases.items() if phase.seconds > 0.001}


def several_ranks(options: argparse.Namespace) -> Iterator[Row]:
    """Two ranks on one device, over gloo, as NCCL refuses that; and a rank on each of several GPUs, over NCCL."""
    count = torch.cuda.device_count() if options.device == "cuda" else 0
    size, folder = size_of(options), checkpoint_of(options)
    for backend, world in [("gloo", 2)] + ([("nccl", min(count, 8))] if count > 1 else []):
        for readers in ("every", "per_node", "one"):
            what = f"FSDP2, {world} ranks over {backend}, {readers}"
            setup = partial(_backends, backend, options.device)
            devices = [options.device] * world if backend == "gloo" else list(range(world))
            results = ranks.run(world, _load_sharded, devices, size, folder, readers, what, setup=setup, limit=40)
            if wrong := [name for _, found, _ in results for name in found]:
                raise RuntimeError(f"{what}: {len(wrong)} tensors differ from the file: {wrong[:3]}")
            contexts = [found for *_, found in results]
            yield results[0][0] | {"wrong": 0, "contexts": contexts}
            if any(len(found) > 1 for found in contexts):
                raise RuntimeError(f"expected a context on its own GPU for each rank, found {contexts}")


def _backends(backend: str, device: str) -> str:
    return "gloo" if device == "cpu" else f"cpu:gloo,cuda:{backend}"


def _load_sharded(
    rank: int, devices: list[str | int], size: Size, folder: Path, readers: str, what: str
) -> tuple[Row, list[str], list[int]]:
    """What a rank measured at its second load, what is wrong, and the GPUs on which it has a context."""
    if devices[rank] == "cpu":
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", 0 if devices[rank] == "cuda" else int(devices[rank]))
        torch.cuda.set_device(device)
    world = len(devices)
    model = sharded_model(size, init_device_mesh(device.type, (world,)))
    with epload.HierarchicalLoader(readers=readers, progress=False, timeout=60) as loader:
        timed(what, loader, model, folder, device)
        row = timed(what, loader, model, folder, device)
    return row, wrong_shards(model, Reference(folder, rank, world)), contexts()


def contexts() -> list[int]:
    """The GPUs on which this process has a context, each of some hundred MB."""
    if not torch.cuda.is_initialized():
        return []
    driver = ctypes.CDLL("libcuda.so.1")
    found = []
    for index in range(torch.cuda.device_count()):
        flags, active = ctypes.c_uint(), ctypes.c_int()
        device = ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        found += [index] if active.value else []
    return found


def others(options: argparse.Namespace) -> Iterator[Row]:
    """Other libraries that load the same file to the device, where they are installed, and epload into a model that is there."""
    device, folder = device_of(options), checkpoint_of(options)
    file = str(folder / FILE)
    nbytes = os.path.getsize(file)
    model = meta_model(size_of(options))
    loader = epload.HierarchicalLoader(stream=torch.Stream(device) if device.type != "cpu" else None, progress=False)
    loaders: dict[str, Callable[[], object]] = {
        "epload, into a model that is there": lambda: loader.load(model, folder),
        "safetensors load_file": lambda: _safetensors(file, device),
        "fastsafetensors": lambda: _fastsafetensors(file, device),
        "Run:ai streamer": lambda: _runai(file, device),
    }
    for name, run in loaders.items():
        try:
            seconds, _ = Clock(device).best(finished(device, run))
        except ModuleNotFoundError as error:
            yield {"what": name, "is": f"not installed: {error.name}"}
        except Exception as error:  # another library's: the others are measured all the same
            yield {"what": name, "not_run": f"{type(error).__name__}: {error}"[:200]}
        else:
            yield {"what": name, "GB": nbytes / 1e9, "s": seconds, "GB_s": nbytes / seconds / 1e9}


def _safetensors(file: str, device: torch.device) -> object:
    from safetensors.torch import load_file

    return load_file(file, device=str(device))


def _fastsafetensors(file: str, device: torch.device) -> object:
    from fastsafetensors import fastsafe_open

    with fastsafe_open(filenames=[file], nogds=True, device=str(device)) as opened:
        return [opened.get_tensor(name).clone() for name in opened.keys()]  # noqa: SIM118


def _runai(file: str, device: torch.device) -> object:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(file)
        return [tensor.to(device, non_blocking=True) for _, tensor in streamer.get_tensors()]
