"""Parts of the GPU check: whole loads of a Mixture of Experts from the page cache, by one rank and by several; peers."""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import epload
from gpu_parts.common import Clock, Row, checkpoint_of, device_of, finished, size_of
from support import ranks
from support.jobs import Job, Meeting
from support.jobs import run as run_jobs
from workload import FILE, Reference, Size, full_tensors, meta_model, sharded_model, write_checkpoint, wrong_shards


def load(options: argparse.Namespace) -> Iterator[Row]:
    """From meta, and again into the same model, with the phases of each; every bit is compared with the file."""
    yield from loads("load", size_of(options), checkpoint_of(options), device_of(options))


def loads(what: str, size: Size, folder: Path, device: torch.device) -> Iterator[Row]:
    limit = limit_of(device)
    yield {"what": "the limit: a copy from pinned memory", "GB_s": limit / 1e9}
    model = meta_model(size)
    with loader_on(device) as loader:
        for turn in ("from meta", "reload", "reload again"):
            if turn == "reload again":
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()
                finished(device, lambda: None)()
            row = timed(f"{what}, {turn}", loader, model, folder, device)
            yield row | {"of_the_limit": row["GB_s"] * 1e9 / limit}
            if turn != "reload":
                check(model, folder, what)
    yield {"what": f"{what}, compared with the file", "wrong": 0}


def check(model: nn.Module, folder: Path, what: str) -> None:
    """Raises RuntimeError if a bit of a model that is not sharded differs from the file. Where the model is."""
    full = full_tensors(folder)

    def differs(named: tuple[str, Tensor]) -> bool:
        name, parameter = named
        return not torch.equal(parameter.detach(), full[name].to(parameter.device))

    with ThreadPoolExecutor(8) as pool:
        named = list(model.named_parameters())
        wrong = [name for (name, _), differ in zip(named, pool.map(differs, named), strict=True) if differ]
    if wrong:
        raise RuntimeError(f"{what}: {len(wrong)} tensors differ from the file: {wrong[:3]}")


def loader_on(device: torch.device) -> epload.HierarchicalLoader:
    """Its stream says where a model on meta goes."""
    return epload.HierarchicalLoader(stream=torch.Stream(device) if device.type != "cpu" else None, progress=False)


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
        setup = partial(_backends, backend, options.device)
        devices = [options.device] * world if backend == "gloo" else list(range(world))
        what = f"FSDP2, {world} ranks over {backend}"
        results = ranks.run(world, _load_sharded, devices, size, folder, what, setup=setup, limit=40)
        if wrong := [name for _, found, _ in results for name in found]:
            raise RuntimeError(f"{what}: {len(wrong)} tensors differ from the file: {wrong[:3]}")
        yield from results[0][0]
        contexts = [found for *_, found in results]
        yield {"what": what, "wrong": 0, "contexts": contexts}
        if any(len(found) > 1 for found in contexts):
            raise RuntimeError(f"expected a context on its own GPU for each rank, found {contexts}")


def _backends(backend: str, device: str) -> str:
    return "gloo" if device == "cpu" else f"cpu:gloo,cuda:{backend}"


def _load_sharded(
    rank: int, devices: list[str | int], size: Size, folder: Path, what: str
) -> tuple[list[Row], list[str], list[int]]:
    """Returns a rank's rows for the second load of each mode, what is wrong, and the GPUs on which it has a context."""
    if devices[rank] == "cpu":
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", 0 if devices[rank] == "cuda" else int(devices[rank]))
        torch.cuda.set_device(device)
    world, rows, wrong = len(devices), [], []
    model, reference = sharded_model(size, init_device_mesh(device.type, (world,))), Reference(folder, rank, world)
    for readers in ("every", "per_node", "one"):
        with epload.HierarchicalLoader(readers=readers, progress=False, timeout=60) as loader:
            timed(what, loader, model, folder, device)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            rows.append(timed(f"{what}, {readers}", loader, model, folder, device))
        wrong += wrong_shards(model, reference)
    return rows, wrong, contexts()


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


def save(options: argparse.Namespace) -> Iterator[Row]:
    """A model on the device into files in memory, and plain writes of as many bytes there by one thread."""
    device, folder, there = device_of(options), checkpoint_of(options), options.memory
    model = meta_model(size_of(options))
    with loader_on(device) as loader:
        timed("a load", loader, model, folder, device)
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        began = time.perf_counter()
        block, left = memoryview(bytes(64 << 20)), nbytes
        with open(Path(there) / "plain", "wb", buffering=0) as file:
            while left > 0:
                left -= file.write(block[:left])
        plain = time.perf_counter() - began
        (Path(there) / "plain").unlink()
        yield {"what": "plain writes to memory", "GB": nbytes / 1e9, "s": plain, "GB_s": nbytes / plain / 1e9}
        limit = limit_of(device, to_host=True)
        for turn in ("first", "second"):
            began = time.perf_counter()
            report = epload.save(model, f"{there}/saved", overwrite=True)
            seconds = time.perf_counter() - began
            row = {"what": f"save, {turn}", "GB": nbytes / 1e9, "s": seconds, "GB_s": nbytes / seconds / 1e9}
            phases = {f"{name}_s": phase.seconds for name, phase in report.phases.items() if phase.seconds > 0.001}
            yield row | phases | {"of_the_limit": nbytes / seconds / limit, "of_plain_writes": plain / seconds}
        again = meta_model(size_of(options))
        timed("what was saved", loader, again, Path(there) / "saved", device)
        check(again, folder, "save")
    yield {"what": "save, compared with the file", "wrong": 0}


SYNCS = ((("none", 1), ("device", 1), ("host", 1)), (("none", 3),))
"""Stages, and numbers of receiving processes, in the same processes one after the other."""
Cases = tuple[tuple[str, int], ...]


def sync(options: argparse.Namespace) -> Iterator[Row]:
    """Three versions from one process to another, and from one to three, on one device: into models, beside them and into host
    memory; with a copy on the device as the limit of the first."""
    size, folder = size_of(options), checkpoint_of(options)
    limit = copy_rate(device_of(options))
    yield {"what": "the limit: a copy on the device", "GB_s": limit}
    for cases in SYNCS:  # each in processes of their own, so that one that fails costs no other
        jobs = [Job(1, _send, (options.device, size, folder, cases))]
        receivers = max(count for _, count in cases)
        jobs += [Job(1, _receive, (options.device, size, folder, cases)) for _ in range(receivers)]
        (sent,), (received,), *_ = run_jobs(jobs, limit=35)
        for (stage, count), row, commit in zip(cases, sent, received, strict=True):
            what = f"sync to {count} process{'es' * (count > 1)}, stage={stage}"
            share = {"of_the_limit": row["GB_s"] / limit} if stage == "none" else {}
            yield {"what": what, **row, **commit, **share, "wrong": 0}


def copy_rate(device: torch.device) -> float:
    """GB/s of a copy of 256 MiB on the device, the best of five."""
    source = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = finished(device, lambda: target.copy_(source))
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - began)
    return source.nbytes / min(seconds) / 1e9


def _on(device: str) -> torch.device:
    return torch.device(device, 0) if device != "cpu" else torch.device("cpu")


def _send(rank: int, meeting: Meeting, device: str, size: Size, folder: Path, cases: Cases) -> list[Row]:
    model, rows = meta_model(size), []
    with loader_on(_on(device)) as loader:
        timed("a load", loader, model, folder, _on(device))
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    for number, (_, receivers) in enumerate(cases):
        with epload.WeightSender(model, ("127.0.0.1", 0), receivers=receivers, timeout=60) as sender:
            meeting.say(f"address {number}", sender.address)
            reports = []
            for version in (1, 2, 3):
                time.sleep(0.5)  # the receivers wait by then
                reports += filter(None, [sender.send_weights(version)])
        best = min(reports, key=lambda report: report.seconds)
        row: Row = {"GB": nbytes / 1e9, "send_s": best.seconds, "GB_s": nbytes / best.seconds / 1e9}
        row |= {f"{name}_s": phase.seconds for name, phase in best.phases.items() if phase.seconds > 0.001}
        rows.append(row | {"transport": best.transport} | ({"why": best.not_pulled} if best.not_pulled else {}))
    return rows


def _receive(rank: int, meeting: Meeting, device: str, size: Size, folder: Path, cases: Cases) -> list[Row]:
    model, rows = meta_model(size).to_empty(device=_on(device)), []
    for number, (stage, _) in enumerate(cases):
        rows.append(_receive_versions(model, meeting.hear(f"address {number}"), device, stage))
        check(model, folder, f"sync, stage={stage}")
    return rows


def _receive_versions(model: nn.Module, address: str, device: str, stage: str) -> Row:
    """Returns what the last of three versions took on this receiver."""
    with epload.WeightReceiver(model, address, timeout=60, stage=stage) as receiver:
        for _ in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            report = receiver.receive_weights()
            finished(_on(device), lambda: None)()
            began = time.perf_counter()
            receiver.commit()
            finished(_on(device), lambda: None)()
            commit = time.perf_counter() - began
    phases = {f"received_{name}_s": phase.seconds for name, phase in report.phases.items() if phase.seconds > 0.001}
    return {"commit_s": commit, **phases}


REAL = Size(layers=48, experts=128, hidden=2048, intermediate=768, vocabulary=151936)
"""Qwen3-30B-A3B: 18,867 tensors, 61 GB."""


def real_size(options: argparse.Namespace) -> Iterator[Row]:
    """A load from meta and reloads of REAL from memory, compared with the file; then other libraries."""
    device, folder = device_of(options), Path(options.memory)
    nbytes = sum(tensor.nbytes for tensor in meta_model(REAL).state_dict().values())
    room, spare = shutil.disk_usage(folder).free, available()
    there = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    if room < 1.01 * nbytes or spare < nbytes + 6e9 or there < 1.08 * nbytes:
        have = f"{room / 1e9:.0f} GB in {folder}, {spare / 1e9:.0f} GB of memory, {there / 1e9:.0f} GB on the device"
        yield {"what": "real size", "is": f"left out: {nbytes / 1e9:.0f} GB do not fit into {have}"}
        return
    began = time.perf_counter()
    write_checkpoint(folder, REAL, seed=1, varied=True)
    yield {"what": "written", "GB": nbytes / 1e9, "s": time.perf_counter() - began}
    yield from loads("real size", REAL, folder, device)
    yield from peer_rows(str(folder / FILE), device, limit_of(device))


def available() -> int:
    """Bytes of memory that may be taken: what the page cache would give back, too."""
    found = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found.group(1)) << 10 if found else 0


def limit_of(device: torch.device, to_host: bool = False) -> float:
    """Bytes/s of a copy of 1 GiB from pinned memory, or to it, the best of some."""
    nbytes = 1 << 30 if device.type == "cuda" else 64 << 20
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    to, source = (here, there) if to_host else (there, here)
    seconds, _ = Clock(device).best(finished(device, lambda: to.copy_(source, non_blocking=True)))
    return nbytes / seconds


def others(options: argparse.Namespace) -> Iterator[Row]:
    """Other libraries that load the same file to the device, where they are installed, and epload into a model that is there."""
    device, folder = device_of(options), checkpoint_of(options)
    model = meta_model(size_of(options))
    limit = limit_of(device)
    with loader_on(device) as loader:
        timed("a first load", loader, model, folder, device)
        row = timed("epload, into a model that is there", loader, model, folder, device)
        yield row | {"of_the_limit": row["GB_s"] * 1e9 / limit}
    yield from peer_rows(str(folder / FILE), device, limit)


def peer_rows(file: str, device: torch.device, limit: float) -> Iterator[Row]:
    """Yields a row for each other loader. One that takes long is not run twice to warm up."""
    nbytes = os.path.getsize(file)
    loaders: dict[str, tuple[str, Callable[[str, torch.device], object]]] = {
        "InstantTensor, mmap": ("instanttensor", _instanttensor),
        "Run:ai streamer": ("runai_model_streamer", _runai),
        "safetensors load_file": ("safetensors.torch", _safetensors),
        "fastsafetensors": ("fastsafetensors", _fastsafetensors),
        "transformers from_pretrained": ("transformers", _transformers),
    }
    for name, (module, run) in loaders.items():
        if device.type == "cuda":
            torch.cuda.empty_cache()  # others do not ask torch for memory
        try:
            import_module(module)
            whole = finished(device, partial(run, file, device))
            if nbytes < 10e9:
                seconds, _ = Clock(device).best(whole)
            else:
                began = time.perf_counter()
                whole()
                seconds = time.perf_counter() - began
        except ModuleNotFoundError as error:
            yield {"what": name, "is": f"not installed: {error.name}"}
        except Exception as error:  # another library's: the others are measured all the same
            yield {"what": name, "not_run": f"{type(error).__name__}: {error}"[:200]}
        else:
            rate = nbytes / seconds
            yield {"what": name, "GB": nbytes / 1e9, "s": seconds, "GB_s": rate / 1e9, "of_the_limit": rate / limit}


def _instanttensor(file: str, device: torch.device) -> object:
    os.environ.setdefault("INSTANTTENSOR_BACKEND", "MMAP")  # its fastest where files are in the page cache
    from instanttensor import safe_open

    with safe_open(file, framework="pt", device=device.index or 0) as opened:
        return [tensor for _, tensor in opened.tensors()]


def _safetensors(file: str, device: torch.device) -> object:
    from safetensors.torch import load_file

    return load_file(file, device=str(device))


def _fastsafetensors(file: str, device: torch.device) -> object:
    os.environ.setdefault("FASTSAFETENSORS_ODIRECT", "0")  # files are in the page cache
    from fastsafetensors import fastsafe_open

    with fastsafe_open(filenames=[file], nogds=True, device=str(device)) as opened:
        return [opened.get_tensor(name) for name in opened.keys()]  # noqa: SIM118


def _runai(file: str, device: torch.device) -> object:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(file, device=str(device))
        return [tensor for _, tensor in streamer.get_tensors()]


def _transformers(file: str, device: torch.device) -> object:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(Path(file).parent, dtype=torch.bfloat16, device_map=str(device))
