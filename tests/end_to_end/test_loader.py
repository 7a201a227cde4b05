"""HierarchicalLoader on CPU and on a fake accelerator: what a load leaves in a model, and what moves to get it there."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import time
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

import epload
from epload import HierarchicalLoader, LoadError, LoadOptions, LoadReport, ModelMismatch, Topology
from measure import PeakMemory
from support import fakedev, ranks
from support.accelerator import NODES, WAYS, for_readers, run_on
from support.checks import all_fine, local_of
from support.on_ranks import on_ranks
from support.readers import bytes_read, matrix, saved
from support.small_model import BUCKET, Net, State, meta_net, only_readers, sharded, state_for, wrong

TURNS = (0, 2, 1, 3)
"""Ranks in the order in which they take buckets with ``readers="partitioned"``."""


PLACES = [
    (1, "cpu"),
    (3, "cpu"),
    (4, "cpu"),
    (6, "cpu"),
    (7, "cpu"),
    (1, "nccl"),
    (2, "hccl"),
    (3, "hccl"),
    (4, "nccl"),
]


@pytest.mark.parametrize(("world", "place"), PLACES)
def test_every_way_from_every_source(world: int, place: str, tmp_path: Path) -> None:
    all_fine(run_on(place, world, matrix, saved(tmp_path)))


@pytest.mark.parametrize("place", ["cpu", "nccl"])
def test_each_reader_reads_its_part(place: str, tmp_path: Path) -> None:
    all_fine(run_on(place, 4, bytes_read, saved(tmp_path)))


class Bare(nn.Module):
    """A buffer that no checkpoint holds, and none that one does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 5)])
        self.register_buffer("angles", torch.arange(4.0) + 1, persistent=False)


class Odd(Bare):
    """Ties, 0-d, empty, uneven, larger than a bucket, computed buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.tail = nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)
        self.head.weight = self.tail.weight
        self.large = nn.Parameter(torch.empty(37, 53))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("scalar", torch.zeros(()))


def odd_state(number: int) -> State:
    shapes = {name: value.shape for name, value in Odd().state_dict().items() if name != "head.weight"}
    start = 20_000 * number
    return {n: torch.arange(float(prod(s))).reshape(s) + 3000 * i + start for i, (n, s) in enumerate(shapes.items())}


def fill(module: nn.Module, path: str, names: tuple[str, ...]) -> None:
    for name in names:
        local_of(getattr(module, name)).detach().fill_(-1)


def kinds(rank: int, device: str) -> list[str]:
    """Ties, buffers, 0-d, empty and split tensors, casts, offloaded tensors, missing keys."""
    problems: list[str] = []
    world = dist.get_world_size()
    on_device = device != "cpu"
    one = state_for(1)
    mesh = init_device_mesh(torch.device(device).type, (world,))

    def check(case: str, model: nn.Module, state: State, **options: Any) -> None:
        problems.extend(f"{readers}, {case}: {text}" for text in wrong(model, state, **{"where": device, **options}))

    for readers in ("one", "partitioned", "every"):
        loader = HierarchicalLoader(Topology.from_nodes(NODES[world]), readers=readers, bucket_bytes=BUCKET)
        with torch.device("meta"):
            odd, bare = sharded(Odd(), mesh=mesh), sharded(Bare(), mesh=mesh, offload_policy=CPUOffloadPolicy(False))
        for number in (1, 2):
            loader.load(odd, for_readers(odd_state(number), readers), strict=False, init_missing=fill)
            check("odd", odd, {**odd_state(number), "head.weight": odd_state(number)["tail.weight"]})
        if odd.head.weight is not odd.tail.weight or odd.angles.tolist() != [-1.0] * 4:
            problems.append(f"{readers}: the tie is gone, or {odd.angles}")

        linear = {name: value for name, value in odd_state(1).items() if name.startswith("layers")}
        loader.load(bare, for_readers(linear, readers), init_missing=fill)
        check("all offloaded", bare, linear, on_cpu=list(linear))
        if str(bare.angles.device) != device or bare.angles.tolist() != [-1.0] * 4:
            problems.append(f"{readers}: {bare.angles}")

        with torch.device(device if rank == 1 else "meta"):  # only one rank has the buffers
            some_have = Bare()
            mask = torch.ones(3, dtype=torch.bool)
        some_have.register_buffer("mask", mask.to("cpu") if rank == 1 else mask, persistent=False)
        some_have.layers.to_empty(device=device)
        loader.load(some_have, for_readers(linear, readers))
        if some_have.angles.tolist() != [1, 2, 3, 4] or not all(some_have.mask.tolist()):
            problems.append(f"{readers}: {some_have.angles}, {some_have.mask}")

        model = meta_net(torch.bfloat16, where=device)
        report = loader.load(model, for_readers(one, readers))
        check("fp32 into bf16", model, one, dtype=torch.bfloat16)
        if report.casts != len(list(model.parameters())):
            problems.append(f"{readers}: {report.casts} casts")
        narrow = state_for(2, torch.bfloat16)
        model = meta_net(where=device)
        if on_device:
            model.table = torch.zeros(5, 3)  # on CPU, beside shards on the device
        loader.load(model, for_readers(narrow, readers))
        on_cpu = ["table"] if on_device else []
        check("bf16 into fp32", model, {**narrow, "table": narrow["table"].float()}, dtype=torch.float32, on_cpu=on_cpu)

        for dtype in (torch.float16, torch.float64)[: 0 if on_device else 2]:
            model = meta_net()
            for number in (1, 2):  # on meta, and then materialized in that dtype
                loader.load(model, for_readers(state_for(number), readers), dtype=dtype)
                check(f"dtype={dtype}", model, state_for(number), dtype=dtype)
                if any(p.dtype != dtype for p in model.parameters()) or model.table.dtype != torch.float32:
                    problems.append(f"dtype={dtype}: {[p.dtype for p in model.parameters()]}, {model.table.dtype}")

        model = meta_net(where=device, offload_policy=CPUOffloadPolicy(pin_memory=False))
        buffers = [name for name, _ in model.named_buffers()]
        for number in (1, 2):
            with mock.patch.object(torch.accelerator, "synchronize", wraps=torch.accelerator.synchronize) as waits:
                loader.load(model, for_readers(state_for(number), readers))
            if on_device and number == 2 and not waits.called:
                problems.append("a load does not wait for the device to read what is offloaded")
            check("offloaded", model, state_for(number), on_cpu=[name for name in one if name not in buffers])

        model = Net().to(device)
        loader.load(model, for_readers(one, readers))
        check("no DTensor", model, one)
        some = {name: value for name, value in state_for(2).items() if name != "scale"}
        report = loader.load(model, for_readers({**some, "stray": torch.ones(3)}, readers), strict=False)
        check("partial", model, {**some, "scale": one["scale"]})
        if (report.missing_keys, report.unexpected_keys) != (["scale"], ["stray"]):
            problems.append(f"{readers}: {report.missing_keys} {report.unexpected_keys}")
    return problems


@pytest.mark.parametrize("place", ["cpu", *fakedev.SEMANTICS])
def test_kinds_of_tensors(place: str) -> None:
    all_fine(run_on(place, 3, kinds))


def device_only() -> str:
    fakedev.setup("hccl")
    return f"{fakedev.NAME}:fakeccl"


@pytest.mark.usefixtures("fake_device")
def test_a_job_whose_only_backend_is_the_devices(tmp_path: Path) -> None:
    all_fine(ranks.run(4, matrix, f"{fakedev.NAME}:0", saved(tmp_path), WAYS[::2], setup=device_only))


@on_ranks(4)
def test_axolotl_3476_veomni_642_nothing_but_the_planned_messages_moves(rank: int) -> list[str]:
    problems = []
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    topology = Topology.from_nodes(NODES[4])
    for readers, algorithm in WAYS:
        loader = HierarchicalLoader(topology, readers=readers, algorithm=algorithm, bucket_bytes=BUCKET)
        model, case = meta_net(), f"{readers} {algorithm}"
        with CommDebugMode() as seen, profile(activities=[ProfilerActivity.CPU], experimental_config=threads) as trace:
            report = loader.load(model, only_readers(state_for(1), readers))
        events = Counter(event.name for event in trace.events() if event.name.startswith("c10d::"))
        expected = _messages(rank, readers, algorithm, report.buckets)
        if seen.get_total_counts() or events != expected or report.transport_steps != events.total():
            problems.append(f"{case}: {seen.get_comm_counts()}, expected {expected}, profiled {events}, {report}")
        if report.peak_staging > 2 * BUCKET:
            problems.append(f"{case}: staging of {report.peak_staging} bytes")
        problems += wrong(model, state_for(1))
    return problems


def _messages(rank: int, readers: str, algorithm: str, buckets: int) -> Counter[str]:
    """Returns the messages of a rank of 2 nodes x 2: every bucket once between the nodes, through one rank of each or, in
    stripes, through all; nothing inside a node, which shares memory. The manifest comes with the agreement."""
    if readers in ("every", "per_node") or (algorithm != "striped" and rank not in (0, 2)):
        return Counter()
    sends = buckets if rank in (0, 1) else 0
    if readers == "partitioned":
        sends = len([b for b in range(buckets) if TURNS[b % len(TURNS)] // 2 == rank // 2])
    return +Counter({"c10d::send": sends, "c10d::recv_": buckets - sends})


@on_ranks(2, tcp=True)
def test_a_manifest_of_megabytes_comes_in_parts(rank: int) -> list[str]:
    """Loads from a checkpoint whose names do not compress."""
    chance = random.Random(0)
    names = [chance.randbytes(1000).hex() for _ in range(5000)]
    model = nn.ParameterDict({names[0]: nn.Parameter(torch.zeros(3))})
    state = {name: torch.full((1,), float(i)) for i, name in enumerate(names)}
    state[names[0]] = torch.arange(3.0) + 1
    loader = HierarchicalLoader(Topology.from_nodes([[0], [1]]), readers="every", timeout=60.0)
    report = loader.load(model, state, strict=False)
    right = model[names[0]].tolist() == [1, 2, 3] and len(report.unexpected_keys) == len(names) - 1
    return [] if right else ["wrong"]


def test_without_a_process_group(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Net()
    report = epload.load(model, saved(tmp_path) / "1/parts", options=LoadOptions(bucket_bytes=BUCKET))
    assert isinstance(report, LoadReport)
    assert wrong(model, state_for(1)) == []
    assert (report.transport_steps, report.missing_keys, report.unexpected_keys) == (0, [], [])
    model(torch.arange(13)).sum().backward()
    assert epload.load(model, state_for(2)).buckets == 1
    with pytest.raises(ModelMismatch, match="14 parameters missing from the checkpoint: scale, steps"):
        epload.load(model, {})
    with pytest.raises(ModelMismatch, match="nothing to load"):
        epload.load(model, {}, strict=False)
    assert wrong(model, state_for(2)) == []
    assert epload.load(nn.Module(), {}).tensors == 0


def test_a_load_does_not_settle_how_multiprocessing_starts_processes() -> None:
    script = "import multiprocessing, torch, epload; m = torch.nn.Linear(2, 3); epload.load(m, m.state_dict());"
    command = [sys.executable, "-c", f"{script} multiprocessing.set_start_method('spawn')"]
    subprocess.run(command, timeout=240, check=True)


def test_a_buffer_without_elements_of_its_own_is_refused() -> None:
    zeros = torch.zeros(4, 3)
    buffers = {
        "w is expanded": zeros[:1].expand(4, 3),
        "w is torch.sparse_coo": zeros.to_sparse(),
        "w is torch.sparse_csr": zeros.to_sparse_csr(),
        "w is torch._mkldnn": zeros.to_mkldnn(),
    }
    for text, buffer in buffers.items():
        model = nn.Module()
        model.register_buffer("w", buffer)
        with pytest.raises(ModelMismatch, match=text):
            epload.load(model, {"w": torch.arange(12.0).reshape(4, 3)})
        assert not model.w.to_dense().any()
        model.register_buffer("w", buffer, persistent=False)
        model.register_buffer("v", torch.zeros(2))
        epload.load(model, {"v": torch.ones(2)})
        assert model.v.tolist() == [1, 1]


# ---- a job that reloads at every step for weeks: loads take bounded memory and leave nothing behind ----


WARM, LOADS = 8, 12


def threads(at_most: int, seconds: float) -> int:
    """Counts them, again until there are few enough, as the system lists a thread a little longer than Python."""
    until = time.monotonic() + seconds
    while (number := len(os.listdir("/proc/self/task"))) > at_most and time.monotonic() < until:
        time.sleep(0.02)
    return number


def resources(before: dict[str, int]) -> dict[str, int]:
    """Counts the resources of this process."""
    assert dist.group.WORLD is not None
    gc.collect()
    sys._clear_type_cache()  # it keeps names of attributes, more and more until it is full
    return {
        "threads": threads(before["threads"], 30.0) if before else threads(0, 0.1),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "groups": len(dist.distributed_c10d._world.pg_names),
        "keys of the store": dist.group.WORLD.get_group_store().num_keys(),
        "blocks of Python's memory": sys.getallocatedblocks(),
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
    }


def repeated(rank: int, device: str, ways: list[dict[str, Any]], refused: bool, anew: bool, folder: Path) -> list[str]:
    topology = Topology.from_nodes(NODES[4])
    model = meta_net(where=device)
    # A rank posts heartbeats only in loads that last a second: its key is there from the start, so that it is no more after them.
    topology.control.store.set(f"heartbeat/{rank}", "{}")

    def made() -> list[HierarchicalLoader]:
        return [HierarchicalLoader(topology, bucket_bytes=BUCKET, **options) for options in ways]

    loaders = made()
    loaders[0].load(model, folder / "0.safetensors")

    def loads(count: int, before: dict[str, int]) -> dict[str, int]:
        for turn in range(count):
            for loader in made() if anew else loaders:
                loader.load(model, folder / f"{turn % 2}.safetensors")
                if refused:
                    with pytest.raises(LoadError, match="missing"):
                        loader.load(model, folder / "short.safetensors")
        dist.barrier()  # keys are counted while nobody writes
        counts = resources(before)
        dist.barrier()
        return counts

    before = loads(WARM, {})
    after = loads(LOADS, before)
    # The last two vary: allocators and interpreters keep some of what was freed.
    problems = [
        f"{what}: {after[what] - number} more, of {number}, after {LOADS} loads"
        for what, number in before.items()
        if after[what] - number >= (LOADS if what in ("blocks of Python's memory", "mappings") else 1)
    ]
    return problems + wrong(model, state_for(1), where=device)


@pytest.mark.parametrize(
    ("place", "ways", "refused", "anew"),
    [
        ("cpu", [{"timeout": 60}, {"readers": "partitioned", "algorithm": "striped", "timeout": 90}], True, False),
        ("cpu", [{"readers": "one", "verify": True}, {}], False, True), ("nccl", [{}], True, False),
        ("hccl", [{"readers": "partitioned", "algorithm": "striped", "verify": True}], False, False),
    ],
)  # fmt: skip
def test_loads_leave_nothing_behind(place: str, ways: Any, refused: bool, anew: bool, tmp_path: Path) -> None:
    """``refused``: each load is followed by one that is refused. ``anew``: each is of a new loader, as ``epload.load``'s are."""
    short = state_for(0)
    short.popitem()
    for name, state in {"0": state_for(0), "1": state_for(1), "short": short}.items():
        save_file(state, tmp_path / f"{name}.safetensors")
    all_fine(run_on(place, 4, repeated, ways, refused, anew, tmp_path))


LARGE_BUCKET = 8 << 20
LAYERS, WIDTH = 96, 768  # 226 MB of float32


def load_and_watch(rank: int, path: str) -> None:
    """Compares the most memory above the start with this rank's shards and two buckets."""
    for readers in ("one", "per_node"):
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        for layer in model:
            fully_shard(layer)
        topology = Topology.from_nodes(NODES[4])
        loader = HierarchicalLoader(topology, readers=readers, bucket_bytes=LARGE_BUCKET, progress=False)
        with PeakMemory() as memory:
            report = loader.load(model, path)
        shards = sum(p.to_local().nbytes for p in model.parameters())
        assert shards == LAYERS * WIDTH * WIDTH  # a quarter of 4 bytes an element
        assert report.peak_staging <= 2 * LARGE_BUCKET
        assert memory.above <= shards + 2 * LARGE_BUCKET + (100 << 20)
        loader.close()
        del model
        gc.collect()


def test_transformers_43749_45649_ms_swift_9980_pytorch_149640_peak_memory_is_shards_and_two_buckets(
    tmp_path: Path,
) -> None:
    state = {f"{i}.weight": torch.full((WIDTH, WIDTH), float(i)) for i in range(LAYERS)}
    save_file(state, tmp_path / "model.safetensors")
    ranks.run(4, load_and_watch, str(tmp_path))
