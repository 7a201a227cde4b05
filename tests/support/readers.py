"""The contract of each choice of readers, for CPU and for devices."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from epload import HierarchicalLoader, LoadReport, Topology
from epload.checkpoint.file_checkpoint import FileCheckpoint
from epload.core.regions import Regions
from epload.planning import schedule
from epload.transfer import direct_read
from support.checks import all_fine
from support.failures import Failing, Failure, Outcome, check, outcome
from support.small_model import BUCKET, NODES, meta_net, state_for, wrong

Nodes = list[list[int]]
SHAPES: dict[int, list[Nodes]] = {
    1: [[[0]]],
    3: [[[0, 1, 2]], [[2, 0], [1]]],
    4: [[[0, 1], [2, 3]], [[0], [1], [2], [3]], [[2, 0], [1, 3]]],
}
Way = tuple[str, str]
"""Readers and algorithm."""
WAYS: list[Way] = [
    ("partitioned", "two_level"),
    ("partitioned", "striped"),
    ("every", "two_level"),
    ("every", "striped"),
    ("auto", "auto"),
    ("auto", "striped"),
]
SOURCES = ("file", "folder", "torch", "dict")


def small_waves() -> None:
    """So that a bucket of a few hundred bytes is a wave that several readers share, and is read on its own. For this rank's
    process."""
    schedule.MIN_PART_BYTES = 100
    direct_read.READ_BYTES = 100


def save(folder: Path, number: int) -> None:
    """One state in all the forms in which a path can hold it."""
    folder.mkdir()
    state = state_for(number)
    save_file(state, folder / "one.safetensors")
    torch.save(state, folder / "one.pt")
    parts = folder / "parts"
    parts.mkdir()
    names = list(state)
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        save_file({name: state[name] for name in names if weight_map[name] == file}, parts / file)
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def source_of(kind: str, folder: Path, number: int, rank: int, src: int, readers: str) -> Any:
    """What a rank passes; where only ``src`` reads, the others have no dict."""
    if kind == "dict":
        return state_for(number) if rank == src or readers != "auto" else None
    return folder / str(number) / {"file": "one.safetensors", "folder": "parts", "torch": "one.pt"}[kind]


def matrix(rank: int, world: int, folder: Path, device: str = "cpu", ways: Sequence[Way] = WAYS) -> list[str]:
    """Loads with every way over every shape, from the first, the middle and the last rank in turn."""
    small_waves()
    problems = []
    turn = 0
    for shift, nodes in enumerate(SHAPES[world]):
        topology = Topology.from_nodes(nodes)
        for readers, algorithm in ways:
            sources = sorted({0, world // 2, world - 1})
            src = sources[(turn // 2 + shift) % len(sources)]
            loader = HierarchicalLoader(
                topology, src=src, readers=readers, algorithm=algorithm, bucket_bytes=BUCKET, timeout=60
            )
            model = meta_net(where=device)
            for number in (1, 2):
                kind = SOURCES[turn % len(SOURCES)]
                turn += 1
                case = f"{nodes} from {src}, {readers} {algorithm}, {kind}"
                report = loader.load(model, source_of(kind, folder, number, rank, src, readers))
                problems += [f"{case}: {text}" for text in wrong(model, state_for(number), where=device)]
                problems += [
                    f"{case}: {text}" for text in misreported(report, nodes, readers, algorithm, kind, src, device)
                ]
    return problems


def misreported(
    report: LoadReport, nodes: Nodes, readers: str, algorithm: str, kind: str, src: int, device: str
) -> Iterator[str]:
    if readers != "auto":
        way = readers
    elif kind == "dict" and sum(map(len, nodes)) > 1:
        way = "one"
        if f"auto -> one: only rank {src}" not in report.reason:
            yield f"does not say why one: {report.reason!r}"
    else:
        way = "every"
        if "auto -> every: per-rank data is small" not in report.reason:
            yield f"does not say why every: {report.reason!r}"
    uneven = len(set(map(len, nodes))) > 1 and way != "every"  # where no bucket moves, no algorithm is in the way
    stripes = device != "cpu" and len(nodes) > 1 and len(set(map(len, nodes))) == 1 and len(nodes[0]) > 1
    chosen = "striped" if stripes and way in ("one", "partitioned") else "two_level"
    expected = chosen if algorithm == "auto" else "two_level" if algorithm == "striped" and uneven else algorithm
    if algorithm == "striped" and uneven and "two_level in place of striped, as node sizes differ" not in report.reason:
        yield f"does not say why not striped: {report.reason!r}"
    if way == readers and algorithm != "striped" and report.reason:
        yield f"nothing was chosen, but: {report.reason!r}"
    if not sends(nodes, way, algorithm, device):
        expected = ""
    if (report.readers, report.algorithm) != (way, expected):
        yield f"reports {report.readers}, {report.algorithm}, expected {way}, {expected}"


def sends(nodes: Nodes, way: str, algorithm: str, device: str) -> bool:
    """Whether any rank sends buckets to another. In a node, ranks share host memory, unless they were told how to send."""
    crosses = len(nodes) > 1 and way != "per_node"
    inside = any(len(node) > 1 for node in nodes)
    shares = device == "cpu" or algorithm == "auto"
    return way != "every" and (crosses or (inside and not shares))


def saved(folder: Path) -> Path:
    for number in (1, 2):
        save(folder / str(number), number)
    return folder


def pieces_read(
    rank: int, folder: Path, nodes: Nodes, algorithm: str, device: str = "cpu"
) -> list[tuple[int, int, int]]:
    """Tensor, offset and bytes of what this rank read with partitioned readers."""
    small_waves()
    read: list[tuple[int, int, int]] = []
    fill, fill_on_device = FileCheckpoint.fill, FileCheckpoint.fill_on_device

    def noted(self: FileCheckpoint, bucket: Tensor, pieces: Any, *pipe: Any) -> Any:
        read.extend((p.tensor, p.tensor_offset, p.nbytes) for p in pieces)
        return (fill_on_device if pipe else fill)(self, bucket, pieces, *pipe)

    loader = HierarchicalLoader(
        Topology.from_nodes(nodes), readers="partitioned", algorithm=algorithm, bucket_bytes=BUCKET, timeout=60
    )
    model = meta_net(where=device)
    with mock.patch.multiple(FileCheckpoint, fill=noted, fill_on_device=noted):
        report = loader.load(model, folder / "1" / "one.safetensors")
    assert wrong(model, state_for(1), where=device) == []
    padding = report.phases["read"].nbytes - sum(nbytes for _, _, nbytes in read)
    assert 0 <= padding <= 16 * (len(read) + 1), "the report counts what was read"
    return read


def each_byte_once(per_rank: list[list[tuple[int, int, int]]], readers: int) -> None:
    """What the ranks say that they read is the checkpoint, once, shared by so many of them."""
    ends: dict[int, int] = {}
    for tensor, offset, nbytes in sorted(piece for pieces in per_rank for piece in pieces):
        assert offset == ends.get(tensor, 0), f"tensor {tensor} is read twice or not at all at {offset}"
        ends[tensor] = offset + nbytes
    assert sorted(ends.values()) == sorted(value.nbytes for value in state_for(1).values() if value.nbytes)
    shares = [sum(nbytes for _, _, nbytes in pieces) for pieces in per_rank]
    some = [share for share in shares if share]
    assert len(some) == readers
    assert max(some) <= 2 * min(some), f"balanced by bytes: {shares}"


def own_bytes(rank: int, path: Path, device: str = "cpu") -> tuple[int, int, int]:
    """Bytes that this rank read and owns, and messages, with readers="every"."""
    with torch.device("meta"):
        model = nn.ParameterDict({f"w{i}": nn.Parameter(torch.empty(9, 4096)) for i in range(6)})
    fully_shard(model, mesh=init_device_mesh(torch.device(device).type, (4,)))
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers="every", bucket_bytes=1 << 18)
    report = loader.load(model, path)
    local = [parameter.to_local() for parameter in model.parameters()]
    for i, shard in enumerate(local):
        assert torch.equal(shard.flatten().cpu(), torch.arange(shard.numel()) + 3.0 * rank * 4096 + 1e6 * i)
    return report.phases["read"].nbytes, sum(shard.nbytes for shard in local), report.transport_steps


def six_tensors(folder: Path) -> Path:
    state = {f"w{i}": torch.arange(9 * 4096).reshape(9, 4096).float() + 1e6 * i for i in range(6)}
    save_file(state, folder / "w.safetensors")
    return folder / "w.safetensors"


def own_and_no_more(seen: list[tuple[int, int, int]]) -> None:
    """The manifest comes with the agreement."""
    assert [read for read, _, _ in seen] == [owned for _, owned, _ in seen]
    assert sum(read for read, _, _ in seen) == 6 * 9 * 4096 * 4
    assert [messages for _, _, messages in seen] == [0] * 4


def differing(path: Path, what: str) -> None:
    """The file that one rank has in place of that of the others."""
    state = state_for(1)
    if what == "size":
        state["scale"] = torch.ones(2)
    elif what == "content":
        state["layers.1.0.weight"] = state["layers.1.0.weight"].clone()
        state["layers.1.0.weight"][5, 3] += 1
    if what == "empty":
        path.write_bytes(b"")
    elif what != "missing":
        save_file(state, path)
    if what == "header":  # the same bytes under other names
        raw, one, other = path.read_bytes(), b'"layers.0.0.weight"', b'"layers.1.0.weight"'
        path.write_bytes(raw.replace(one, b"*").replace(other, one).replace(b"*", other, 1))


DIFFERENCES = {
    "size": ["its size differs", 'readers="one"'],
    "header": ["its header differs"],
    "content": ["its content differs"],
    "empty": ["its size differs"],
    "missing": ["cannot read", "No such file"],
}


def one_differs(rank: int, folder: Path, readers: str, odd: int = 3, device: str = "cpu") -> Outcome:
    """``odd``: the rank that has other files; one that reads."""
    failures: dict[str, Failure] = {}
    problems = []
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, bucket_bytes=BUCKET, timeout=60)
    for what in DIFFERENCES:
        path = folder / what / "model.safetensors" if rank == odd else folder / "1" / "one.safetensors"
        model = meta_net(where=device)
        if readers == "auto":
            report = loader.load(model, path)
            problems += [f"{what}: {text}" for text in wrong(model, state_for(1), where=device)]
            if report.readers != "one" or "auto -> one: only rank 0" not in report.reason:
                problems.append(f"{what}: {report.readers}, {report.reason}")
            continue
        failures[what] = outcome(lambda: loader.load(model, path))  # noqa: B023
        if not all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            problems.append(f"{what}: the model left meta")
        loader.load(model, folder / "2" / "one.safetensors")
        problems += [f"after {what}: {text}" for text in wrong(model, state_for(2), where=device)]
    return failures, problems


def with_others(folder: Path) -> Path:
    """Beside the files of :func:`save`, those that one rank has."""
    for what in DIFFERENCES:
        (folder / what).mkdir()
        differing(folder / what / "model.safetensors", what)
    return saved(folder)


def differences_are_reported(outcomes: Sequence[Outcome], folder: Path, readers: str, odd: int = 3) -> None:
    expected = {
        what: ("CheckpointError", [*texts, str(folder / what), f"[rank {odd}]"]) for what, texts in DIFFERENCES.items()
    }
    if readers == "auto":
        all_fine([problems for _, problems in outcomes])
    else:
        check(outcomes, expected)


class FailingRegions(Failing):
    """A source that can read regions, and fails at one."""

    def read_regions(self, regions: Regions) -> int | None:
        self.calls += 1
        if self.calls == self._bucket + 1:
            raise self._error
        return None


def in_the_middle(
    rank: int, readers: str, algorithm: str, nodes: Nodes, reading: Sequence[int] = range(4), device: str = "cpu"
) -> Outcome:
    """``reading``: the ranks that read. Each of them fails at one time or another; some at once; all at once."""
    small_waves()
    loader = HierarchicalLoader(
        Topology.from_nodes(nodes), readers=readers, algorithm=algorithm, bucket_bytes=BUCKET, timeout=60
    )
    failures: dict[str, Failure] = {}
    problems: list[str] = []
    kinds: dict[str, Callable[..., Failing]] = {"fill": Failing}
    if readers == "every":
        kinds["regions"] = FailingRegions
    some, everyone = tuple(reading)[1:3], tuple(reading)
    cases = [*product(kinds, zip(reading, strict=True), (1,)), ("fill", some, 0), ("fill", everyone, 2)]
    for kind, culprits, at in cases:
        case = f"{kind} {culprits} {at}"
        model = meta_net(where=device)
        error = OSError(5, "the disk is on fire")
        source = kinds[kind](state_for(1), error, at) if rank in culprits else state_for(1)
        failures[case] = outcome(lambda: loader.load(model, source))  # noqa: B023
        loader.load(model, state_for(2))
        problems += [f"after {case}: {text}" for text in wrong(model, state_for(2), where=device)]
    return failures, problems


IN_THE_MIDDLE = pytest.mark.parametrize(
    ("readers", "algorithm", "nodes"),
    [
        ("partitioned", "striped", NODES),
        ("partitioned", "two_level", [[0, 1, 2], [3]]),
        ("every", "two_level", NODES),
    ],
)


def first_failure_is_reported(outcomes: Sequence[Outcome], cases: int) -> None:
    """On every rank, and no other."""
    expected: dict[str, tuple[str, list[str]]] = {}
    for case, failure in outcomes[0][0].items():
        culprits = re.findall(r"\d", case.partition(")")[0])
        named = [rank for rank in culprits if failure and f"rank {rank} could not read bucket" in failure[1]]
        assert len(named) == 1, (case, failure, "the first failure is reported, and no other")
        expected[case] = ("LoadError", ["OSError", "the disk is on fire"])
    assert len(expected) == cases
    check(outcomes, expected)
