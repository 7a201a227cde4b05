"""HierarchicalLoader when something is wrong: every rank raises the same error, and the next load is right."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import epload
from epload import Checkpoint, HierarchicalLoader, LoadOptions, Topology
from epload.native import ops
from support import ranks
from support.checks import all_fine
from support.failures import Failing, Failure, Outcome, check, outcome, unpack_breaks_once
from support.small_model import BUCKET, NODES, local_of, meta_net, only_readers, state_for, wrong


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad():
        state = model.state_dict(keep_vars=True)
        return {n: (t.to_local() if isinstance(t, DTensor) else t).detach().clone() for n, t in state.items()}


def moved(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    return [name for name, value in snapshot(model).items() if not torch.equal(value, before[name])]


# ---- found before data moves ----


def _bad_input(rank: int, folder: Path) -> Outcome:
    topology = Topology.from_nodes(NODES)
    loader = HierarchicalLoader(topology, bucket_bytes=BUCKET)
    per_node = HierarchicalLoader(topology, readers="per_node", bucket_bytes=BUCKET)
    one, two = state_for(1), state_for(2)
    model = meta_net()
    failures: dict[str, Failure] = {}
    problems: list[str] = []

    def refused(case: str, action: Callable[[nn.Module], Any]) -> None:
        """On a model on meta and on a loaded one, with a good load behind each."""
        fresh = meta_net()
        on_meta = outcome(lambda: action(fresh))
        if not all(tensor.is_meta for tensor in (*fresh.parameters(), *fresh.buffers())):
            problems.append(f"{case}: the model left meta")
        loader.load(model, only_readers(one))
        before = snapshot(model)
        failures[case] = outcome(lambda: action(model))
        if on_meta != failures[case] and case not in MATERIALISED_ONLY:
            problems.append(f"{case}: {on_meta} on meta, {failures[case]} on a loaded model")
        problems.extend(f"{case}: {name} has changed" for name in moved(model, before))
        loader.load(model, only_readers(two))
        problems.extend(f"after {case}: {text}" for text in wrong(model, two))

    mesh = init_device_mesh("cpu", (4,))
    ones = torch.ones(2)
    stray = {**{n: v for n, v in one.items() if n != "scale"}, "stray": ones}
    as_dtensor = {**one, "scale": DTensor.from_local(torch.ones(1), mesh, [Replicate()])}
    refused("missing file", lambda m: loader.load(m, folder / "absent"))
    refused("truncated file", lambda m: loader.load(m, folder / "cut.safetensors"))
    refused("not a checkpoint", lambda m: loader.load(m, only_readers(3)))
    refused("nothing", lambda m: loader.load(m, None))
    refused("DTensor", lambda m: loader.load(m, only_readers(as_dtensor)))
    refused("shape", lambda m: loader.load(m, only_readers({**one, "scale": ones})))
    refused("keys", lambda m: loader.load(m, only_readers(stray)))
    refused("int into float", lambda m: loader.load(m, only_readers({**one, "scale": one["scale"].int()})))
    refused("fp8", lambda m: loader.load(m, only_readers({**one, "scale": one["scale"].to(torch.float8_e4m3fn)})))
    refused("mapping", lambda m: loader.load(m, only_readers(one), mapping="nonsense"))
    refused("dtype", lambda m: loader.load(m, only_readers(one), dtype=torch.bfloat16) if not _on_meta(m) else None)
    refused("src", lambda m: HierarchicalLoader(topology, src=4).load(m, only_readers(one)))
    refused("readers", lambda m: HierarchicalLoader(topology, readers="nonsense").load(m, only_readers(one)))
    refused("algorithm", lambda m: HierarchicalLoader(topology, algorithm="nonsense").load(m, only_readers(one)))
    refused("bucket_bytes", lambda m: HierarchicalLoader(topology, bucket_bytes=8).load(m, only_readers(one)))
    refused("one bad reader", lambda m: per_node.load(m, folder / ("absent" if rank == 2 else "one.safetensors")))
    refused("two bad readers", lambda m: per_node.load(m, folder / f"absent-{rank}"))
    return failures, problems


MATERIALISED_ONLY = ("dtype",)


def _on_meta(model: nn.Module) -> bool:
    return next(model.parameters()).is_meta


def test_bad_input(tmp_path: Path) -> None:
    save_file(state_for(1), tmp_path / "one.safetensors")
    cut = tmp_path / "cut.safetensors"
    save_file(state_for(1), cut)
    os.truncate(cut, cut.stat().st_size - 1)
    expected = {
        "missing file": ("CheckpointError", [str(tmp_path / "absent"), "rank 0"]),
        "truncated file": ("CheckpointError", [str(cut), "truncated"]),
        "not a checkpoint": ("TypeError", ["int"]),
        "nothing": ("TypeError", ["NoneType"]),
        "DTensor": ("TypeError", ["'scale' is a DTensor"]),
        "shape": ("ModelMismatch", ["scale has shape [2]", "[1]"]),
        "keys": (
            "ModelMismatch",
            ["1 parameter missing from the checkpoint: scale", "1 unexpected checkpoint key: stray", "strict=False"],
        ),
        "int into float": ("ModelMismatch", ["scale is int32", "float32"]),
        "fp8": ("ModelMismatch", ["scale is float8_e4m3fn", "float32"]),
        "mapping": ("ValueError", ["'nonsense'", "epload.Mapping"]),
        "dtype": ("ValueError", ["torch.bfloat16", "already has storage of torch.float32"]),
        "src": ("ValueError", ["got 4", "[0, 1, 2, 3]"]),
        "readers": ("ValueError", ["readers", "per_node", "'nonsense'"]),
        "algorithm": ("ValueError", ["algorithm", "two_level", "'nonsense'"]),
        "bucket_bytes": ("ValueError", ["bucket_bytes", "8"]),
        "one bad reader": ("CheckpointError", [str(tmp_path / "absent"), "rank 2"]),
        "two bad readers": ("CheckpointError", ["absent-0", "rank 0"]),  # the source rank is asked first
    }
    check(ranks.run(4, _bad_input, tmp_path), expected)


def _fp8_into_bf16(rank: int) -> Outcome:
    loader = HierarchicalLoader(Topology.from_nodes(NODES), bucket_bytes=BUCKET)
    bad = {name: v.to(torch.float8_e5m2) if v.is_floating_point() else v for name, v in state_for(1).items()}
    return {"fp8": outcome(lambda: loader.load(meta_net(torch.bfloat16), only_readers(bad)))}, []


def model_of(**shapes: tuple[int, ...]) -> nn.Module:
    return nn.ParameterDict({n: nn.Parameter(torch.zeros(shape)) for n, shape in sorted(shapes.items())})


def _ranks_differ(rank: int) -> Outcome:
    topology = Topology.from_nodes(NODES)
    loader = HierarchicalLoader(topology, bucket_bytes=BUCKET)
    odd = rank == 1
    failures: dict[str, Failure] = {}
    problems: list[str] = []

    def refused(case: str, action: Callable[[], Any]) -> None:
        failures[case] = outcome(action)
        model = meta_net()
        loader.load(model, only_readers(state_for(2)))
        problems.extend(f"after {case}: {text}" for text in wrong(model, state_for(2)))

    good = {"a": torch.ones(3), "b": torch.ones(4, 2)}
    name = model_of(a=(3,), **({"c": (4, 2)} if odd else {"b": (4, 2)}))
    more = model_of(a=(3,), b=(4, 2), **({"c": (1,)} if odd else {}))
    dtype = model_of(a=(3,), b=(4, 2))
    if odd:
        dtype.bfloat16()
    refused("another name, not strict", lambda: loader.load(name, only_readers(good), strict=False))
    refused("one more, not strict", lambda: loader.load(more, only_readers(good), strict=False))
    refused("another dtype", lambda: loader.load(dtype, only_readers(good)))
    sizes = HierarchicalLoader(topology, bucket_bytes=BUCKET + 16 * (rank == 3))
    refused("bucket_bytes", lambda: sizes.load(dtype, only_readers(good)))
    readers = HierarchicalLoader(topology, readers="per_node" if rank == 2 else "one", bucket_bytes=BUCKET)
    refused("readers", lambda: readers.load(dtype, good))
    sources = HierarchicalLoader(topology, src=int(rank == 3), bucket_bytes=BUCKET)
    refused("src", lambda: sources.load(dtype, good))
    patience = HierarchicalLoader(topology, timeout=60 + 30 * (rank == 1), bucket_bytes=BUCKET)
    refused("timeout", lambda: patience.load(dtype, good))
    strictness = model_of(a=(3,), b=(4, 2))
    refused("strict", lambda: loader.load(strictness, only_readers(good), strict=rank != 2))
    shapes = model_of(a=(3,), b=(4, 2))
    refused("shapes", lambda: loader.load(shapes, only_readers(good), ignore_mismatched_shapes=rank == 2))
    per_node = HierarchicalLoader(topology, readers="per_node", bucket_bytes=BUCKET)
    same = model_of(a=(3,), b=(4, 2))
    narrow = {n: v.bfloat16() for n, v in good.items()} if rank == 2 else good
    refused("nodes read another dtype", lambda: per_node.load(same, narrow))
    larger = {**good, "c": torch.ones(1)} if rank == 2 else good
    refused("nodes read other names", lambda: per_node.load(same, larger, strict=False))
    refused("nodes read another order", lambda: per_node.load(same, dict(sorted(good.items(), reverse=rank == 2))))
    for case, model in (("name", name), ("more", more), ("dtype", dtype), ("same", same)):
        problems += [f"{case}: {n} has changed" for n, value in model.items() if value.count_nonzero()]
    return failures, problems


def test_fp8_means_nothing_without_its_scale() -> None:
    check(ranks.run(4, _fp8_into_bf16), {"fp8": ("ModelMismatch", ["float8_e5m2", "bfloat16"])})


def test_ranks_that_disagree() -> None:
    """Named are the entry, and a rank of each kind."""
    expected = {
        "another name, not strict": ("ManifestMismatch", ["model b", "model c", "rank 0", "rank 1"]),
        "one more, not strict": ("ManifestMismatch", ["model c", "rank 1"]),
        "another dtype": ("ManifestMismatch", ["model a: float32", "model a: bfloat16", "rank 0", "rank 1"]),
        "timeout": ("ManifestMismatch", ["timeout=60", "timeout=90", "1"]),
        "bucket_bytes": ("ManifestMismatch", [f"bucket_bytes={BUCKET}", f"bucket_bytes={BUCKET + 16}", "3"]),
        "readers": ("ManifestMismatch", ["readers=one", "readers=per_node", "2"]),
        "src": ("ManifestMismatch", ["src=0", "src=1", "3"]),
        "strict": ("ManifestMismatch", ["strict=True", "strict=False", "rank 0", "rank 2"]),
        "shapes": ("ManifestMismatch", [f"ignore_mismatched_shapes={x}" for x in (True, False)] + ["rank 0", "rank 2"]),
        "nodes read another dtype": ("ManifestMismatch", ["checkpoint a: float32", "checkpoint a: bfloat16", "rank 2"]),
        "nodes read other names": ("ManifestMismatch", ["checkpoint c", "rank 2"]),
        "nodes read another order": ("ManifestMismatch", ["checkpoint a", "checkpoint b", "rank 2"]),
    }
    check(ranks.run(4, _ranks_differ), expected)


def _model_fits_nowhere(rank: int) -> Outcome:
    loader = HierarchicalLoader(Topology.from_nodes(NODES), bucket_bytes=BUCKET)
    odd = rank == 1
    good = {"a": torch.ones(3), "b": torch.ones(4, 2)}
    models = {
        "another shape": model_of(a=(3,), b=(2, 4) if odd else (4, 2)),
        "another name": model_of(a=(3,), **({"c": (4, 2)} if odd else {"b": (4, 2)})),
    }
    failures = {case: outcome(lambda m=m: loader.load(m, only_readers(good))) for case, m in models.items()}
    problems = [f"{case}: {n} has changed" for case, m in models.items() for n, v in m.items() if v.count_nonzero()]
    fine = model_of(a=(3,), b=(4, 2))
    loader.load(fine, only_readers(good))
    return failures, problems + [f"{n} is wrong after" for n, value in fine.items() if not torch.equal(value, good[n])]


def test_a_rank_whose_model_does_not_fit_disagrees_with_the_rest() -> None:
    """The checkpoint fits the other ranks, so the model of the odd one is to be named, not the checkpoint."""
    expected = {
        "another shape": ("ManifestMismatch", ["b: ", "[4, 2]", "[2, 4]", "rank 0", "rank 1"]),
        "another name": ("ManifestMismatch", ["model b", "model c", "rank 0", "rank 1"]),
    }
    check(ranks.run(4, _model_fits_nowhere), expected)


# ---- in the middle of the data ----


def _in_the_middle(rank: int, readers: str) -> Outcome:
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, bucket_bytes=BUCKET)
    one, two = state_for(1), state_for(2)
    reader = 0 if readers == "one" else 2
    failures: dict[str, Failure] = {}
    problems: list[str] = []
    models = {"meta": meta_net(), "loaded": meta_net()}
    loader.load(models["loaded"], only_readers(two, readers))

    def fails(case: str, model: nn.Module, source: Any, **options: Any) -> None:
        failures[case] = outcome(lambda: loader.load(model, source, **options))
        loader.load(model, only_readers(two, readers))
        problems.extend(f"after {case}: {text}" for text in wrong(model, two))

    def broken(error: Exception) -> Any:
        return Failing(one, error) if rank == reader else only_readers(one, readers)

    for where, model in models.items():
        checkpoint = broken(OSError(5, "the disk is on fire"))
        fails(f"read, {where}", model, checkpoint)
        if rank == reader and checkpoint.calls != 4:
            problems.append(f"read {checkpoint.calls} buckets after one that failed")
    fails("read, long text", meta_net(), broken(RuntimeError("x" * 10_000)))
    fails("read, odd text", meta_net(), broken(RuntimeError("é" * 300)))
    fails("read, out of memory", meta_net(), broken(MemoryError()))
    for where, model in {"meta": meta_net(), "loaded": models["loaded"]}.items():
        with unpack_breaks_once(3):
            fails(f"unpack, {where}", model, only_readers(one, readers))
    with unpack_breaks_once(reader):
        fails("unpack on the reader", meta_net(), only_readers(one, readers))

    def hook(module: nn.Module, path: str, names: tuple[str, ...]) -> None:
        if rank == 1:
            raise KeyError(f"no rule for {path} {names}")
        for name in names:
            getattr(module, name).to_local().detach().zero_()

    partial = {name: value for name, value in one.items() if name != "norm.bias"}
    fails("hook", meta_net(), only_readers(partial, readers), strict=False, init_missing=hook)
    return failures, problems


def _expected(reader: int) -> dict[str, tuple[str, list[str]]]:
    read = f"rank {reader} could not read bucket 3 ("
    unpack, why = "could not unpack bucket 0 (scale to embed.weight of state dict)", "RuntimeError: no room to unpack"
    return {
        "read, meta": ("LoadError", [read, "OSError", "the disk is on fire"]),
        "read, loaded": ("LoadError", [read, "OSError", "the disk is on fire"]),
        "read, long text": ("LoadError", [read, "RuntimeError: xxxx"]),
        "read, odd text": ("LoadError", [read, "RuntimeError: éééé"]),
        "read, out of memory": ("LoadError", [read, "MemoryError"]),
        "unpack, meta": ("LoadError", [f"rank 3 {unpack}", why]),
        "unpack, loaded": ("LoadError", [f"rank 3 {unpack}", why]),
        "unpack on the reader": ("LoadError", [f"rank {reader} {unpack}", why]),
        "hook": ("LoadError", ["rank 1", "KeyError", "no rule for norm", "bias"]),
    }


def test_failures_in_the_middle_one_reader() -> None:
    check(ranks.run(4, _in_the_middle, "one"), _expected(0))


def test_failures_in_the_middle_a_reader_a_node() -> None:
    check(ranks.run(4, _in_the_middle, "per_node"), _expected(2))


def _small_bucket(rank: int) -> Outcome:
    loader = HierarchicalLoader(Topology.from_nodes(NODES), bucket_bytes=BUCKET)
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(1))})
    error = OSError(5, "the disk is on fire")
    source = Failing({"w": torch.ones(1)}, error, bucket=0) if rank == 0 else None
    return {"small bucket": outcome(lambda: loader.load(model, source))}, []


def test_the_whole_cause_is_reported_though_its_bucket_is_small() -> None:
    expected = {
        "small bucket": (
            "LoadError",
            ["rank 0 could not read bucket 0 (w of state dict)", "OSError", "the disk is on fire"],
        )
    }
    check(ranks.run(4, _small_bucket), expected)


def _consumed(rank: int) -> list[str]:
    """A load that failed inside the first tensor has consumed nothing, so the same source can be loaded again."""
    loader = HierarchicalLoader(Topology.from_nodes(NODES), bucket_bytes=BUCKET)
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(384))})
    full = torch.arange(384.0)
    source = Checkpoint.from_state_dict({"w": full.clone()}, consume=True) if rank == 0 else None
    with mock.patch.object(ops, "pack", side_effect=[None, None, RuntimeError("stop")]):
        if outcome(lambda: loader.load(model, source)) is None:
            return ["the load did not fail"]
    failure = outcome(lambda: loader.load(model, source))
    if failure is not None:
        return [f"the second load raised {failure}"]
    return [] if torch.equal(model["w"].detach(), local_of(full, model["w"])) else ["wrong values"]


def test_a_consumed_source_can_be_retried() -> None:
    all_fine(ranks.run(4, _consumed))


def test_failures_without_a_process_group() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(400))})
    state = {"w": torch.arange(400.0)}
    failure = outcome(
        lambda: epload.load(model, Failing(state, RuntimeError("stop")), options=LoadOptions(bucket_bytes=BUCKET))
    )
    assert failure is not None
    assert failure[0] == "LoadError"
    assert "rank 0 could not read bucket 3 (w of state dict): RuntimeError: stop" in failure[1]
    epload.load(model, state, options=LoadOptions(bucket_bytes=BUCKET))
    assert torch.equal(model["w"].detach(), state["w"])


def load_with_own_mapping(rank: int) -> str:
    """Rank 1 would put the checkpoint's tensors elsewhere; model, manifest and options are the same."""
    model = torch.nn.ParameterDict({"a": torch.zeros(2), "b": torch.zeros(2)})
    state = {"x": torch.ones(2), "y": torch.full((2,), 2.0)}
    to = ("b", "a") if rank == 1 else ("a", "b")
    mapping = epload.Mapping(renames=(epload.mapping.Rename("^x$", to[0]), epload.mapping.Rename("^y$", to[1])))
    loader = epload.HierarchicalLoader(epload.Topology.from_nodes([[0, 1], [2, 3]]), progress=False)
    try:
        loader.load(model, state if rank == 0 else None, mapping=mapping)
    except epload.ManifestMismatch as error:
        assert not any(p.any() for p in model.values()), "nothing moved"
        return str(error)
    return "loaded"


def test_mappings_that_differ_between_ranks() -> None:
    texts = ranks.run(4, load_with_own_mapping)
    assert len(set(texts)) == 1
    assert "Rename" in texts[0]


def topologies_that_differ(rank: int) -> str:
    nodes = [[0, 2], [1, 3]] if rank == 3 else [[0, 1], [2, 3]]
    try:
        epload.coalesced_bcast([torch.ones(3)], 0, epload.Topology.from_nodes(nodes))
    except epload.ManifestMismatch as error:
        return str(error)
    return "done"


def test_topologies_that_differ_between_ranks() -> None:
    texts = ranks.run(4, topologies_that_differ)
    assert len(set(texts)) == 1
    assert "topologies differ" in texts[0]
    assert "rank 3" in texts[0]
