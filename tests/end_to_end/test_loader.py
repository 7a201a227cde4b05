"""HierarchicalLoader on real ranks: what a load leaves in a model, and what moves to get it there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

import epload
from epload import HierarchicalLoader, LoadOptions, LoadReport, ModelMismatch, Topology
from support import ranks
from support.checks import all_fine
from support.small_model import BUCKET, NODES, Net, State, meta_net, only_readers, sharded, state_for, wrong

TURNS = (0, 2, 1, 3)
"""Who takes buckets in turn with ``readers="partitioned"``."""
WAYS = (
    ("one", "two_level"),
    ("one", "striped"),
    ("per_node", "two_level"),
    ("partitioned", "two_level"),
    ("partitioned", "striped"),
    ("auto", "auto"),
)


# ---- what a load leaves ----


def _ways(rank: int, folder: Path) -> list[str]:
    """From meta, reload, each choice of readers and algorithm, other sources, uneven nodes, no DTensors."""
    problems = []
    one, two = state_for(1), state_for(2)

    def check(case: str, model: nn.Module, state: State, **options: Any) -> None:
        problems.extend(f"{case}: {text}" for text in wrong(model, state, **options))

    topology = Topology.from_nodes(NODES)
    for readers, algorithm in WAYS:
        loader = HierarchicalLoader(topology, readers=readers, algorithm=algorithm, bucket_bytes=BUCKET)
        model = meta_net()
        case = f"{readers} {algorithm}"
        report = loader.load(model, folder / "one.safetensors")
        check(f"{case} from meta", model, one)
        if report.buckets < 10 or report.tensors != len(one):
            problems.append(f"{case}: {report}")
        before = [id(p) for p in model.parameters()]
        loader.load(model, only_readers(two, readers))
        check(f"{case} reload from a dict", model, two)
        if before != [id(p) for p in model.parameters()]:
            problems.append(f"{case}: a reload replaced parameters")
        model(torch.arange(13))  # leaves the root unsharded
        loader.load(model, folder / "one.safetensors")
        check(f"{case} after a forward", model, one)
        model(torch.arange(13))
        if not all(isinstance(m, FSDPModule) for m in (model, *model.layers)):
            problems.append(f"{case}: no FSDP model any more")

    model = meta_net()
    for nodes, src in (([[0], [1, 2, 3]], 0), ([[0], [1, 2, 3]], 3), ([[3, 1], [0, 2]], 2), ([[0, 1, 2, 3]], 1)):
        loader = HierarchicalLoader(Topology.from_nodes(nodes), src=src, bucket_bytes=BUCKET)
        number = 3 + src
        loader.load(model, state_for(number) if rank == src else None)
        check(f"{nodes} from {src}", model, state_for(number))

    loader = HierarchicalLoader(topology, bucket_bytes=BUCKET)
    with torch.device("meta"):
        plain = Net()
    loader.load(plain, folder / "one.safetensors")
    check("no DTensor, from meta", plain, one)
    plain = Net()
    loader.load(plain, only_readers(two))
    check("no DTensor, materialized", plain, two)

    model = meta_net()
    epload.load(
        model, folder / "one.safetensors", strict=True, progress=False, options=LoadOptions(bucket_bytes=BUCKET)
    )
    check("epload.load", model, one)

    consumed = state_for(4)
    loader.load(model, epload.Checkpoint.from_state_dict(consumed, consume=True) if rank == 0 else None)
    check("consume", model, state_for(4))
    if bool(consumed) != (rank != 0):
        problems.append(f"consume left {list(consumed)}")
    return problems


def test_the_model_has_its_shards(tmp_path: Path) -> None:
    save_file(state_for(1), tmp_path / "one.safetensors")
    all_fine(ranks.run(4, _ways, tmp_path))


def _dtypes(rank: int, folder: Path) -> list[str]:
    problems = []
    loader = HierarchicalLoader(Topology.from_nodes(NODES), bucket_bytes=BUCKET)
    one = state_for(1)

    def check(case: str, model: nn.Module, state: State, dtype: torch.dtype) -> None:
        problems.extend(f"{case}: {text}" for text in wrong(model, state, dtype))

    model = meta_net(torch.bfloat16)
    report = loader.load(model, only_readers(one))
    check("fp32 into bf16", model, one, torch.bfloat16)
    if report.casts != len(list(model.parameters())):
        problems.append(f"{report.casts} casts")
    narrow = state_for(2, torch.bfloat16)
    model = meta_net()
    loader.load(model, only_readers(narrow))
    check("bf16 into fp32", model, {**narrow, "table": narrow["table"].float()}, torch.float32)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        model = meta_net()
        loader.load(model, only_readers(one), dtype=dtype)
        check(f"dtype={dtype}", model, one, dtype)
        if any(p.dtype != dtype for p in model.parameters()) or model.table.dtype != torch.float32:
            problems.append(f"dtype={dtype}: {[p.dtype for p in model.parameters()]}, {model.table.dtype}")
        model(torch.arange(13))
        loader.load(model, only_readers(state_for(3)), dtype=dtype)  # now materialized, in that dtype
        check(f"again dtype={dtype}", model, state_for(3), dtype)
    return problems


def test_dtypes_are_converted(tmp_path: Path) -> None:
    all_fine(ranks.run(4, _dtypes, tmp_path))


class Hollow(nn.Module):
    """A plain model whose non-persistent buffer no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7)])
        self.inner = nn.Module()
        self.inner.register_buffer("angles", torch.arange(4.0), persistent=False)


def _strictness(rank: int) -> list[str]:
    problems = []
    loader = HierarchicalLoader(Topology.from_nodes(NODES), bucket_bytes=BUCKET)
    one, two = state_for(1), state_for(2)
    model = meta_net()
    loader.load(model, only_readers(one))
    partial = {name: value for name, value in two.items() if name not in ("scale", "layers.1.0.bias")}
    partial["stray.b"] = partial["stray.a"] = torch.ones(3)
    report = loader.load(model, only_readers(partial), strict=False)
    keys = sorted(report.missing_keys), sorted(report.unexpected_keys)
    if keys != (["layers.1.0.bias", "scale"], ["stray.a", "stray.b"]):
        problems.append(f"keys: {report.missing_keys} {report.unexpected_keys}")
    kept = {name: one[name] for name in ("scale", "layers.1.0.bias")}
    problems += wrong(model, {**two, **kept})

    calls: list[tuple[str, tuple[str, ...]]] = []

    def fill(module: nn.Module, path: str, names: tuple[str, ...]) -> None:
        calls.append((path, names))
        for name in names:
            tensor = getattr(module, name)
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().fill_(-1)

    model = meta_net()
    report = loader.load(model, only_readers(partial), strict=False, init_missing=fill)
    if sorted(calls) != [("", ("scale",)), ("layers.1.0", ("bias",))]:
        problems.append(f"init_missing was called with {calls}")
    if sorted(report.initialized) != ["layers.1.0.bias", "scale"]:
        problems.append(f"initialized: {report.initialized}")
    problems += wrong(model, {**two, **{name: torch.full_like(one[name], -1) for name in kept}})

    calls.clear()
    with torch.device("meta"):
        hollow = sharded(Hollow())
    state = {"layers.0.weight": torch.arange(35.0).reshape(7, 5), "layers.0.bias": torch.arange(7.0) + 100}
    try:
        loader.load(hollow, only_readers(state))
        problems.append("a buffer that nothing fills was accepted")
    except ModelMismatch as error:
        if "inner.angles" not in str(error) or "init_missing" not in str(error):
            problems.append(str(error))
    if not all(tensor.is_meta for tensor in (*hollow.parameters(), *hollow.buffers())):
        problems.append("the refused model left meta")
    report = loader.load(hollow, only_readers(state), init_missing=fill)
    if calls != [("inner", ("angles",))] or report.initialized != ["inner.angles"]:
        problems.append(f"{calls} {report.initialized}")
    if hollow.inner.angles.tolist() != [-1.0] * 4:
        problems.append(f"angles are {hollow.inner.angles}")
    return problems + wrong(hollow, state)


def test_keys_that_do_not_meet() -> None:
    all_fine(ranks.run(4, _strictness))


# ---- what moves ----


def _steps(rank: int) -> list[str]:
    problems = []
    topology = Topology.from_nodes(NODES)
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    for readers, algorithm in WAYS:
        loader = HierarchicalLoader(topology, readers=readers, algorithm=algorithm, bucket_bytes=BUCKET)
        model = meta_net()
        case = f"{readers} {algorithm}"
        with CommDebugMode() as seen, profile(activities=[ProfilerActivity.CPU], experimental_config=threads) as trace:
            report = loader.load(model, only_readers(state_for(1), readers))
        events = [event.name for event in trace.events() if event.name.startswith("c10d::")]
        expected = _messages(rank, readers, algorithm, report.buckets)
        if seen.get_total_counts():
            problems.append(f"{case}: collectives {dict(seen.get_comm_counts())}")
        if Counter(events) != expected or report.transport_steps != len(events):
            problems.append(f"{case}: report {report.transport_steps}, expected {expected}, profiled {Counter(events)}")
        if not 0 < report.peak_staging <= 2 * BUCKET:
            problems.append(f"{case}: staging of {report.peak_staging} bytes")
        problems += wrong(model, state_for(1))
    return problems


def _messages(rank: int, readers: str, algorithm: str, buckets: int) -> Counter[str]:
    """Returns the messages of a rank of 2 nodes x 2: every bucket once between the nodes, through one rank of each or, in
    stripes, through all; nothing inside a node, which shares memory. The manifest comes with the agreement."""
    if readers in ("every", "per_node"):
        return Counter()
    sends = receives = 0
    if readers in ("one", "auto") and (algorithm == "striped" or rank in (0, 2)):
        sends, receives = (buckets, 0) if rank in (0, 1) else (0, buckets)
    if readers == "partitioned" and (algorithm == "striped" or rank in (0, 2)):
        ours = len([b for b in range(buckets) if TURNS[b % len(TURNS)] // 2 == rank // 2])
        sends, receives = ours, buckets - ours
    return +Counter({"c10d::send": sends, "c10d::recv_": receives})


def test_nothing_but_the_planned_messages_moves() -> None:
    all_fine(ranks.run(4, _steps))


def _report(rank: int) -> dict[str, Any]:
    loader = HierarchicalLoader(Topology.from_nodes(NODES), bucket_bytes=BUCKET)
    partial = {**state_for(1), "stray": torch.ones(2)}
    del partial["norm.bias"]
    model = meta_net()
    loader.load(model, only_readers(state_for(1)))
    report = loader.load(model, only_readers(partial), strict=False)
    return {"json": json.loads(json.dumps(report.to_dict())), "text": str(report), "repr": repr(report)}


def test_reports_of_all_ranks() -> None:
    reports = ranks.run(4, _report)
    nbytes = sum(value.nbytes for name, value in state_for(1).items() if name != "norm.bias")
    shared = ("missing_keys", "unexpected_keys", "tied_keys", "initialized", "nbytes", "tensors", "buckets", "casts")
    for report in reports:
        values, text = report["json"], report["text"]
        assert [values[key] for key in shared] == [reports[0]["json"][key] for key in shared]
        assert (values["missing_keys"], values["unexpected_keys"]) == (["norm.bias"], ["stray"])
        assert (values["nbytes"], values["tensors"]) == (nbytes, len(state_for()) - 1)
        assert (values["readers"], values["algorithm"]) == ("one", "two_level")
        assert 0 < values["seconds"] < 60
        assert set(values["phases"]) == {
            "plan", "materialize", "read", "inter_node", "intra_node", "unpack", "verify",
            "wait",
        }  # fmt: skip
        assert "norm.bias" in text
        assert "stray" in text
        assert f"{values['tensors']} tensors" in text
    assert [report["json"]["phases"]["read"]["nbytes"] > 0 for report in reports] == [True, False, False, False]
    assert [report["json"]["phases"]["inter_node"]["nbytes"] > 0 for report in reports] == [True, False, True, False]
    assert all(report["json"]["phases"]["unpack"]["nbytes"] >= nbytes for report in reports)


# ---- one process ----


def test_without_a_process_group(tmp_path: Path) -> None:
    save_file(state_for(1), tmp_path / "one.safetensors")
    with torch.device("meta"):
        model = Net()
    report = epload.load(model, tmp_path, options=LoadOptions(bucket_bytes=BUCKET))
    assert isinstance(report, LoadReport)
    assert wrong(model, state_for(1)) == []
    assert (report.transport_steps, report.missing_keys, report.unexpected_keys) == (0, [], [])
    model(torch.arange(13)).sum().backward()
    assert epload.load(model, state_for(2)).buckets == 1
    assert wrong(model, state_for(2)) == []
    with pytest.raises(ModelMismatch, match="14 parameters missing from the checkpoint: scale, steps"):
        epload.load(model, {})
    assert wrong(model, state_for(2)) == []
    with pytest.raises(ModelMismatch, match="nothing to load"):
        epload.load(model, {}, strict=False)
    assert wrong(model, state_for(2)) == []
    assert epload.load(nn.Module(), {}).tensors == 0


def test_a_load_does_not_settle_how_multiprocessing_starts_processes() -> None:
    script = """
import multiprocessing, torch, epload
model = torch.nn.Linear(2, 3)
epload.load(model, model.state_dict())
multiprocessing.set_start_method("spawn")
"""
    subprocess.run([sys.executable, "-c", script], timeout=240, check=True)


def test_tensors_that_are_empty_0d_or_larger_than_a_bucket() -> None:
    shapes: dict[str, tuple[int, ...]] = {"empty": (0, 3), "scalar": (), "large": (37, 53), "cube": (3, 4, 5)}
    with torch.device("meta"):
        model = nn.ParameterDict({name: nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()})
    state = {
        name: torch.arange(float(prod(shape))).reshape(shape) + 10_000 * i
        for i, (name, shape) in enumerate(shapes.items())
    }
    report = epload.load(model, state, options=LoadOptions(bucket_bytes=BUCKET))
    assert report.peak_staging <= 2 * BUCKET
    assert wrong(model, state) == []
    del state["empty"]
    assert epload.load(model, state).missing_keys == []


def test_a_buffer_without_elements_of_its_own_is_refused() -> None:
    zeros = torch.zeros(4, 3)
    kept = {
        "w is expanded": zeros[:1].expand(4, 3),
        "w is torch.sparse_coo": zeros.to_sparse(),
        "w is torch.sparse_csr": zeros.to_sparse_csr(),
        "w is torch._mkldnn": zeros.to_mkldnn(),
    }
    for text, buffer in kept.items():
        model = nn.Module()
        model.register_buffer("w", buffer)
        with pytest.raises(ModelMismatch, match=text):
            epload.load(model, {"w": torch.arange(12.0).reshape(4, 3)})
        assert not model.w.to_dense().any()
        model.register_buffer("w", buffer, persistent=False)
        model.register_buffer("v", torch.zeros(2))
        epload.load(model, {"v": torch.ones(2)})
        assert model.v.tolist() == [1, 1]


def test_two_names_that_become_one_are_refused() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(3))})
    state = {"w": torch.ones(3), "old.w": torch.full((3,), 2.0)}
    with pytest.raises(ModelMismatch, match=r"old\.w"):
        epload.load(model, state, mapping=epload.Mapping(renames=(epload.mapping.Rename("^old[.]", ""),)))
