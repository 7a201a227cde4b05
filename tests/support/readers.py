"""Loads of the small model with every choice of readers and algorithm, over every topology, from every kind of source."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from epload import HierarchicalLoader, LoadReport, Topology
from epload.planning import choose, schedule
from epload.transfer import direct_read
from support.failures import Filling
from support.small_model import BUCKET, meta_net, state_for, wrong

Nodes = list[list[int]]
SHAPES: dict[int, list[Nodes]] = {
    1: [[[0]]],
    2: [[[0], [1]], [[1, 0]]],
    3: [[[0, 1, 2]], [[2, 0], [1]]],
    4: [[[0, 1], [2, 3]], [[2, 0], [1, 3]], [[0, 1, 2], [3]]],
    6: [[[0, 1], [3, 2], [4, 5]]],
    7: [[[0, 1, 2], [3, 4], [6, 5]]],
}
WAYS = [
    ("one", "two_level"), ("one", "striped"), ("one", "auto"), ("per_node", "auto"), ("partitioned", "two_level"),
    ("partitioned", "striped"), ("partitioned", "auto"), ("every", "two_level"), ("auto", "auto"), ("auto", "striped"),
]  # fmt: skip
SOURCES = ("file", "folder", "torch", "dict", "object")


def small_waves() -> None:
    """Makes a bucket of a few hundred bytes a wave that several readers share, and that is read on its own, on this rank."""
    schedule.MIN_PART_BYTES = 100
    direct_read.READ_BYTES, direct_read.GROWTH = 100, 1


def save(folder: Path, number: int) -> None:
    """Saves one state in all the forms in which a path can hold it."""
    state = state_for(number)
    parts = folder / "parts"
    parts.mkdir(parents=True)
    save_file(state, folder / "one.safetensors")
    torch.save(state, folder / "one.pt")
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(state)}
    for file in set(weight_map.values()):
        save_file({name: value for name, value in state.items() if weight_map[name] == file}, parts / file)
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def saved(folder: Path) -> Path:
    for number in (1, 2):
        save(folder / str(number), number)
    return folder


def source_of(kind: str, folder: Path, number: int, src: int, readers: str) -> Any:
    """Returns what a rank passes; where only ``src`` reads, the others have no dict."""
    if kind in ("dict", "object"):
        reads = dist.get_rank() == src or readers not in ("one", "auto")
        return None if not reads else state_for(number) if kind == "dict" else Filling(state_for(number))
    return folder / str(number) / {"file": "one.safetensors", "folder": "parts", "torch": "one.pt"}[kind]


def matrix(rank: int, device: str, folder: Path, ways: Sequence[tuple[str, str]] = WAYS) -> list[str]:
    """Loads twice with every way over every shape, from the first, the middle and the last rank in turn."""
    small_waves()
    problems: list[str] = []
    world = dist.get_world_size()
    on_cpu, shared_gpu = device == "cpu", device.startswith("cuda")  # whose ranks send over gloo
    for number, (nodes, (readers, algorithm)) in enumerate(product(SHAPES[world], ways)):
        src = sorted({0, world // 2, world - 1})[number % min(world, 3)]
        stream = None if on_cpu else (None, torch.Stream(device), torch.accelerator.current_stream(device))[number % 3]
        loader = HierarchicalLoader(
            Topology.from_nodes(nodes), src=src, readers=readers, algorithm=algorithm, bucket_bytes=BUCKET, timeout=60,
            stream=stream,
        )  # fmt: skip
        model = meta_net(where=device)
        parameters: list[nn.Parameter] = []
        groups = len(dist.distributed_c10d._world.pg_names)
        for turn in (1, 2):
            kind = SOURCES[(2 * number + number // len(ways) + turn) % len(SOURCES)]
            case = f"{nodes} from {src}, {readers} {algorithm}, {kind}, turn {turn}"
            report = loader.load(model, source_of(kind, folder, turn, src, readers))
            differing = [*wrong(model, state_for(turn), where=device)]
            if not shared_gpu:
                differing += misreported(report, nodes, readers, algorithm, kind, src, device)
            before, parameters = parameters, list(model.parameters())
            if turn == 2 and not all(map(operator.is_, before, parameters)):
                differing.append("a reload replaced parameters")
            if not on_cpu and not report.stream.endswith("the caller's" if stream is not None else ""):
                differing.append(f"on the stream {report.stream!r}")
            problems += [f"{case}: {text}" for text in differing]
            model(torch.arange(13, device=device))  # leaves the root unsharded
        if not shared_gpu and not report.algorithm and len(dist.distributed_c10d._world.pg_names) != groups:
            problems.append(f"{case}: made a process group, and nothing is sent over one")
        if not all(isinstance(module, FSDPModule) for module in (model, *model.layers)):
            problems.append(f"{case}: no FSDP model any more")
    return problems


def misreported(
    report: LoadReport, nodes: Nodes, readers: str, algorithm: str, kind: str, src: int, device: str
) -> Iterator[str]:
    way = readers
    if readers == "auto":
        alone = kind in ("dict", "object") and sum(map(len, nodes)) > 1
        way, why = ("one", f"only rank {src}") if alone else ("every", "per-rank data is small")
        if f"auto -> {way}: {why}" not in report.reason:
            yield f"does not say why {way}: {report.reason!r}"
    even = len(set(map(len, nodes))) == 1
    expected = algorithm
    if algorithm == "auto":
        stripes = device != "cpu" and len(nodes) > 1 and even and len(nodes[0]) > 1 and way in ("one", "partitioned")
        expected = "striped" if stripes else "two_level"
    elif algorithm == "striped" and not even:
        expected = "two_level"
        if way != "every" and "two_level in place of striped, as node sizes differ" not in report.reason:
            yield f"does not say why not striped: {report.reason!r}"
    if readers != "auto" and algorithm != "striped" and report.reason:
        yield f"nothing was chosen, but: {report.reason!r}"
    if not sends(nodes, way, algorithm, device):
        expected = ""
    if (report.readers, report.algorithm) != (way, expected):
        yield f"reports {report.readers}, {report.algorithm}, expected {way}, {expected}"
    if report.buckets < 10 or report.tensors != len(state_for(1)):
        yield f"reports {report.buckets} buckets, {report.tensors} tensors"


def sends(nodes: Nodes, way: str, algorithm: str, device: str) -> bool:
    """True if any rank sends buckets. In a node, ranks share host memory, unless they were told how to send."""
    crosses = len(nodes) > 1 and way != "per_node"
    inside = any(len(node) > 1 for node in nodes) and device != "cpu" and algorithm != "auto"
    return way != "every" and (crosses or inside)


def bytes_read(rank: int, device: str, folder: Path) -> list[str]:
    """Compares what each rank reads of large tensors with what it owns, and with what others read."""
    state = {f"w{i}": torch.arange(9.0 * 4096).reshape(9, 4096) + 1e6 * i for i in range(6)}
    total = sum(value.nbytes for value in state.values())
    path = folder / "large.safetensors"
    if rank == 0:
        save_file(state, path)
    dist.barrier()
    small_waves()
    problems = []
    partitioned = [total / 4] * 4 if device == "cpu" else [total / 2, 0] * 2
    parts = {"one": [total, 0, 0, 0], "per_node": [total, 0, total, 0], "every": [*[total / 3] * 3, 0]}
    for readers, expected in {**parts, "partitioned": partitioned, "auto": partitioned}.items():
        with torch.device("meta"):
            model = nn.ParameterDict({name: nn.Parameter(torch.empty(9, 4096)) for name in state})
        fully_shard(model, mesh=init_device_mesh(torch.device(device).type, (4,)))
        loader = HierarchicalLoader(Topology.from_nodes(SHAPES[4][0]), readers=readers, bucket_bytes=1 << 18)
        way, rule = readers, nullcontext()
        if readers == "auto":  # by a rule that sees each byte read too often
            way, rule = "partitioned", mock.patch.multiple(choose, SMALL_BYTES=-1, MAX_FILE_READS=0.5)
        with rule:
            report = loader.load(model, path)
        by_rank: list[Any] = [None] * 4
        dist.all_gather_object(by_rank, (report.phases["read"].nbytes, report.nbytes, report.tensors, report.readers))
        if [whole for _, *whole in by_rank] != [[total, 6, way]] * 4:
            problems.append(f"{readers}: ranks report {by_rank}")
        slack = {"partitioned": 1.5, "every": 1}.get(way, 1.01)
        nbytes_of = [nbytes for nbytes, *_ in by_rank]
        if any(not part / slack <= nbytes <= part * slack for part, nbytes in zip(expected, nbytes_of, strict=True)):
            problems.append(f"{readers}: of {total} bytes, ranks read {by_rank}, expected {expected}")
        crosses = rank in (0, 2) and way in ("one", "partitioned")
        sent = report.transport_steps, report.phases["inter_node"].nbytes
        if device == "cpu" and tuple(number > 0 for number in sent) != (crosses, crosses):
            problems.append(f"{readers}: {sent[0]} messages, {sent[1]} bytes in them")
        if device == "cpu" and (report.peak_staging == 0) != (way == "every"):
            problems.append(f"{readers}: {report.peak_staging} bytes of buffers")
        shards = {name: (*value.chunk(4), value[:0])[rank] for name, value in state.items()}
        problems += [f"{readers}: {n}" for n, v in shards.items() if not torch.equal(model[n].to_local().cpu(), v)]
    return problems
