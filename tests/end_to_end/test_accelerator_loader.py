"""HierarchicalLoader into models on a fake asynchronous accelerator, over groups that behave as NCCL's and as HCCL's: what a load
leaves, on which streams it works, which waits it needs, and what it refuses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate

from epload import HierarchicalLoader, Topology
from support import fakedev, ranks
from support.accelerator import (
    DEVICE,
    NODES,
    SEMANTICS,
    WAYS,
    ExternalStream,
    Odd,
    aborted_into,
    for_readers,
    meta_net,
    odd_state,
    wrong,
)
from support.checks import all_fine
from support.failures import Failing, Outcome, check, outcome, unpack_breaks_once
from support.readers import sends
from support.small_model import BUCKET, Net, sharded, state_for

OTHER = f"{fakedev.NAME}:1"


pytestmark = pytest.mark.usefixtures("fake_device")


# ---- what a load leaves ----


def contract(rank: int, folder: Path) -> list[str]:
    """From meta, reload, after a forward; every choice of readers and algorithm; the stream given, current and own."""
    problems: list[str] = []
    world = dist.get_world_size()
    topology = Topology.from_nodes(NODES[world])
    streams = {"own": None, "given": torch.Stream(DEVICE), "current": torch.accelerator.current_stream(DEVICE)}
    tokens = torch.arange(13).to(DEVICE)
    for number, (readers, algorithm) in enumerate(WAYS):
        which = list(streams)[number % len(streams)]
        loader = HierarchicalLoader(
            topology, readers=readers, algorithm=algorithm, bucket_bytes=BUCKET, stream=streams[which]
        )
        case = f"{readers} {algorithm}, stream {which}"
        model = meta_net()
        report = loader.load(model, folder / "one.safetensors")
        problems += [f"{case}, from meta: {text}" for text in wrong(model, state_for(1))]
        expected = {"striped": "striped" if world in (1, 2, 4) else "two_level"}.get(algorithm, algorithm)
        expected = expected if sends(NODES[world], readers, algorithm, DEVICE) else ""
        if report.buckets < 10 or report.algorithm != expected or not report.stream:
            problems.append(f"{case}: {report} on {report.stream!r}")
        loader.load(model, for_readers(state_for(2), readers))
        problems += [f"{case}, reload: {text}" for text in wrong(model, state_for(2))]
        model(tokens)
        loader.load(model, folder / "one.safetensors")
        problems += [f"{case}, after a forward: {text}" for text in wrong(model, state_for(1))]
        if loader.stream is not None and not report.stream.endswith("the caller's"):
            problems.append(f"{case}: {report.stream}")
    return problems


@pytest.mark.parametrize(("world", "semantics"), [(1, "nccl"), (2, "hccl"), (3, "hccl"), (4, "nccl")])
def test_the_model_has_its_shards(world: int, semantics: str, tmp_path: Path) -> None:
    save_file(state_for(1), tmp_path / "one.safetensors")
    all_fine(ranks.run(world, contract, tmp_path, setup=partial(fakedev.setup, semantics)))


class Bare(nn.Module):
    """No persistent buffer; of the computed one no checkpoint says where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 5)])
        self.register_buffer("angles", torch.arange(4.0), persistent=False)


def _kinds(rank: int) -> list[str]:
    """Ties, buffers, 0-d, empty and split tensors, casts, tensors that stay on CPU, missing keys."""
    problems = []
    topology = Topology.from_nodes(NODES[dist.get_world_size()])
    one = state_for(1)

    def fill(module: nn.Module, path: str, names: tuple[str, ...]) -> None:
        for name in names:
            getattr(module, name).fill_(-1)

    for readers in ("one", "partitioned", "every"):
        loader = HierarchicalLoader(topology, readers=readers, bucket_bytes=BUCKET)
        mesh = init_device_mesh(fakedev.NAME, (dist.get_world_size(),))
        with torch.device("meta"):
            odd = sharded(Odd(), mesh=mesh)
        for number in (1, 2):
            loader.load(odd, for_readers(odd_state(number), readers), strict=False, init_missing=fill)
            tied = {**odd_state(number), "head.weight": odd_state(number)["tail.weight"]}
            problems += [f"{readers}, odd: {text}" for text in wrong(odd, tied)]
        if odd.head.weight is not odd.tail.weight or odd.angles.tolist() != [-1.0] * 4:
            problems.append(f"{readers}: the tie is gone, or {odd.angles}")

        model = meta_net(torch.bfloat16)
        report = loader.load(model, for_readers(one, readers))
        problems += [f"{readers}, cast: {text}" for text in wrong(model, one, dtype=torch.bfloat16)]
        if report.casts != len(list(model.parameters())):
            problems.append(f"{readers}: {report.casts} casts")

        model = meta_net()
        model.table = torch.zeros(5, 3)  # on CPU, beside shards on the device
        loader.load(model, for_readers(one, readers))
        problems += [f"{readers}, buffer on CPU: {text}" for text in wrong(model, one, on_cpu=["table"])]

        model = meta_net(offload_policy=CPUOffloadPolicy(pin_memory=False))
        for number in (1, 2):
            report = loader.load(model, for_readers(state_for(number), readers))
            on_device = [name for name, _ in model.named_buffers()]
            on_cpu = [name for name in one if name not in on_device]
            problems += [f"{readers}, offloaded: {text}" for text in wrong(model, state_for(number), on_cpu=on_cpu)]

        with torch.device("meta"):
            bare = sharded(Bare(), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        state = {name: value for name, value in odd_state(1).items() if name.startswith("layers")}
        report = loader.load(bare, for_readers(state, readers), init_missing=fill)
        problems += [f"{readers}, all offloaded: {text}" for text in wrong(bare, state, on_cpu=list(state))]
        if report.stream or str(bare.angles.device) != DEVICE or bare.angles.tolist() != [-1.0] * 4:
            problems.append(f"{readers}: {report.stream!r}, {bare.angles}")

        model = meta_net()
        loader.load(model, for_readers(one, readers))
        partial_state = {name: value for name, value in state_for(2).items() if name != "scale"}
        report = loader.load(model, for_readers({**partial_state, "stray": torch.ones(3)}, readers), strict=False)
        if (report.missing_keys, report.unexpected_keys) != (["scale"], ["stray"]):
            problems.append(f"{readers}: {report.missing_keys} {report.unexpected_keys}")
        problems += [f"{readers}, partial: {text}" for text in wrong(model, {**partial_state, "scale": one["scale"]})]
    return problems


@SEMANTICS
def test_kinds_of_tensors(semantics: str) -> None:
    all_fine(ranks.run(3, _kinds, setup=partial(fakedev.setup, semantics)))


# ---- when something goes wrong ----


def _in_the_middle(rank: int, readers: str, algorithm: str) -> Outcome:
    topology = Topology.from_nodes(NODES[4])
    loader = HierarchicalLoader(topology, readers=readers, algorithm=algorithm, bucket_bytes=BUCKET)
    one, two = state_for(1), state_for(2)
    reader = 0 if readers == "one" else 2
    failures: dict[str, tuple[str, str] | None] = {}
    problems: list[str] = []
    loaded = meta_net()
    loader.load(loaded, for_readers(two, readers))

    def fails(case: str, model: nn.Module, source: Any) -> None:
        failures[case] = outcome(lambda: loader.load(model, source))
        problems.extend(f"after {case}: {name} was aborted into" for name in aborted_into(model))
        loader.load(model, for_readers(two, readers))
        problems.extend(f"after {case}: {text}" for text in wrong(model, two))

    for where, model in {"meta": meta_net(), "loaded": loaded}.items():
        error = OSError(5, "the disk is on fire")
        fails(f"read, {where}", model, Failing(one, error) if rank == reader else for_readers(one, readers))
        with unpack_breaks_once(3, "upload" if readers == "every" else "unpack"):
            fails(f"unpack, {where}", model, for_readers(one, readers))
    return failures, problems


@pytest.mark.parametrize(
    ("readers", "algorithm", "semantics"),
    [
        ("one", "two_level", "hccl"),
        ("one", "striped", "nccl"),
        ("per_node", "two_level", "nccl"),
        ("partitioned", "two_level", "hccl"),
        ("every", "two_level", "nccl"),
    ],
)
def test_failures_in_the_middle(readers: str, algorithm: str, semantics: str) -> None:
    reader = 0 if readers == "one" else 2
    # The fourth that it reads: of its own turns, or of those that it needs something of.
    bucket = {"partitioned": "7 (", "every": ""}.get(readers, "3 (")
    read = ("LoadError", [f"rank {reader} could not read bucket {bucket}", "OSError", "the disk is on fire"])
    what = "read" if readers == "every" else "unpack"  # then it is one step
    unpack = ("LoadError", [f"rank 3 could not {what} bucket", "RuntimeError: no room to unpack"])
    expected = {"read, meta": read, "read, loaded": read, "unpack, meta": unpack, "unpack, loaded": unpack}
    check(ranks.run(4, _in_the_middle, readers, algorithm, setup=partial(fakedev.setup, semantics)), expected)


def _refused(rank: int, folder: Path) -> Outcome:
    topology = Topology.from_nodes(NODES[4])
    one, two = state_for(1), state_for(2)
    failures: dict[str, tuple[str, str] | None] = {}
    problems: list[str] = []

    def refused(case: str, model: nn.Module, source: Any, topo: Topology = topology, **options: Any) -> None:
        before = {n: t if t.is_meta else t.detach().cpu() for n, t in model.state_dict().items()}
        failures[case] = outcome(lambda: HierarchicalLoader(topo, bucket_bytes=BUCKET, **options).load(model, source))
        for name, tensor in model.state_dict().items():
            if tensor.is_meta != before[name].is_meta or not (
                tensor.is_meta or bool((tensor.cpu() == before[name]).all())
            ):
                problems.append(f"{case}: {name} has changed")

    two_devices = Net().to(DEVICE)
    two_devices.norm.to(OTHER)
    refused("two devices", two_devices, one)
    on_meta = meta_net()
    on_meta.table = torch.zeros(5, 3, device=OTHER)
    refused("two devices, on meta", on_meta, one)
    refused("stream of another device", meta_net(), one, stream=torch.Stream(OTHER))
    refused("stream for a model on cpu", Net(), one, stream=torch.Stream(DEVICE))
    host_only = Topology.from_nodes(NODES[4], dist.new_group(backend="gloo"))
    refused("no backend", meta_net(), one, topo=host_only)
    ascend = Topology.from_nodes(NODES[4], dist.new_group(backend=fakedev.AS_ASCEND))
    refused("no part for Ascend", meta_net(), one, topo=ascend)
    refused("external stream", meta_net(), one, stream=ExternalStream())
    refused("external stream, on the device", Net().to(DEVICE), one, stream=ExternalStream())
    on_side, elsewhere = torch.Stream(DEVICE), torch.Stream(OTHER)
    refused("rank 2's stream", Net().to(DEVICE), one, stream=elsewhere if rank == 2 else on_side)
    weight = torch.empty(3, device="meta")
    lacking = DTensor.from_local(weight, init_device_mesh("cuda", (4,)), [Replicate()], run_check=False)
    refused("no such device", nn.ParameterDict({"scale": nn.Parameter(lacking)}), one)
    on_cpu = Net() if rank == 3 else Net().to(DEVICE)
    refused("one rank on cpu", on_cpu, one)
    refused("missing file", meta_net(), folder / "absent")
    refused("keys", meta_net(), {n: v for n, v in one.items() if n != "scale"})
    refused("shape", meta_net(), {**one, "scale": torch.ones(2)})
    model = meta_net()
    HierarchicalLoader(topology, bucket_bytes=BUCKET).load(model, two)
    return failures, problems + wrong(model, two)


def test_wrong_use_is_refused_before_anything_moves(tmp_path: Path) -> None:
    expected = {
        "two devices": ("ValueError", ["one accelerator", f"norm.weight on {OTHER}", f"on {DEVICE}"]),
        "two devices, on meta": ("ValueError", ["one accelerator", f"table on {OTHER}", f"on {DEVICE}"]),
        "stream of another device": ("ValueError", [f"a stream of {DEVICE}", f"got a stream of {OTHER}"]),
        "stream for a model on cpu": ("ValueError", ["stream=None for a model on cpu", DEVICE]),
        "no backend": ("ValueError", [f"a backend for {fakedev.NAME} tensors", "init_process_group"]),
        "no part for Ascend": ("ValueError", ["HCCL", "EPLOAD_NPU=1"]),
        "external stream": ("ValueError", ["ExternalStream", "torch.npu.Stream"]),
        "external stream, on the device": ("ValueError", ["ExternalStream", "torch.npu.Stream"]),
        "rank 2's stream": ("ValueError", [f"a stream of {DEVICE}", f"got a stream of {OTHER}", "rank 2"]),
        "no such device": ("ValueError", ["mesh of cuda devices", f"this torch has {fakedev.NAME}"]),
        "one rank on cpu": ("ManifestMismatch", ["device=cpu", f"device={fakedev.NAME}", "[3]"]),
        "missing file": ("CheckpointError", ["absent"]),
        "keys": ("ModelMismatch", ["1 parameter missing from the checkpoint: scale"]),
        "shape": ("ModelMismatch", ["scale has shape [2]"]),
    }
    check(ranks.run(4, _refused, tmp_path, setup=fakedev.setup), expected)


def _without_cpu_backend(rank: int) -> list[str]:
    problems = []
    for readers, algorithm in (("one", "two_level"), ("partitioned", "striped"), ("every", "two_level")):
        loader = HierarchicalLoader(
            Topology.from_nodes(NODES[4]), readers=readers, algorithm=algorithm, bucket_bytes=BUCKET
        )
        model = meta_net()
        loader.load(model, for_readers(state_for(1), readers))
        problems += [f"{readers}: {text}" for text in wrong(model, state_for(1))]
    return problems


def device_only() -> str:
    fakedev.setup("hccl")
    return f"{fakedev.NAME}:fakeccl"


def test_a_job_whose_only_backend_is_the_devices() -> None:
    all_fine(ranks.run(4, _without_cpu_backend, setup=device_only))
