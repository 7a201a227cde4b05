"""Loads when something is wrong: every rank raises the same error, nothing has changed, and the next load is right."""

from __future__ import annotations

import gc
import os
import re
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import epload
from epload import HierarchicalLoader, LoadOptions, Mapping, Topology
from epload.mapping import Rename
from support import fakedev
from support.accelerator import ExternalStream, run_on
from support.checks import all_fine, as_bytes, local_of
from support.failures import Failing, Failure, Outcome, check, outcome, unpack_breaks_once
from support.findings import not_refused_by_all
from support.memory import mapped_memfds
from support.on_ranks import on_ranks
from support.readers import small_waves
from support.small_model import BUCKET, NODES, Net, meta_net, only_readers, state_for, wrong

Expected = dict[str, tuple[str, list[str]]]
OTHER = f"{fakedev.NAME}:1"


def snapshot(model: nn.Module) -> dict[str, Tensor | None]:
    state = {name: local_of(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    return {name: None if local.is_meta else as_bytes(local).clone() for name, local in state.items()}


def moved(model: nn.Module, before: dict[str, Tensor | None]) -> list[str]:
    def same(a: Tensor | None, b: Tensor | None) -> bool:
        return torch.equal(a, b) if a is not None and b is not None else a is b

    return [name for name, value in snapshot(model).items() if not same(value, before[name])]


# ---- found before data moves ----


def model_of(names: str = "abc", shapes: dict[str, tuple[int, ...]] | None = None, **dtypes: torch.dtype) -> nn.Module:
    """A parameter for each letter, in this order, of shape [3] where no other is given."""
    model = nn.Module()
    for name in names:
        tensor = torch.zeros((shapes or {}).get(name, (3,)), dtype=dtypes.get(name))
        model.register_parameter(name, nn.Parameter(tensor))
    return model


Case = tuple[str, list[str], dict[str, Any]]
"""The class of the error, what its text says, and what differs from a right load: model, source, options of loader and load."""
CANNOT, WRONG, DIFFER, BAD_TYPE = "CheckpointError", "ModelMismatch", "ManifestMismatch", "TypeError"


def mistakes(rank: int, folder: Path) -> dict[str, Case]:
    one = state_for(1)
    stray = {**{n: v for n, v in one.items() if n != "scale"}, "stray": torch.ones(2)}
    as_dtensor = DTensor.from_local(torch.ones(1), init_device_mesh("cpu", (4,)), [Replicate()])
    narrow = {name: v.to(torch.float8_e5m2) if v.is_floating_point() else v for name, v in one.items()}
    at_1, at_2 = rank == 1, rank == 2

    def scale(value: Any) -> dict[str, Any]:
        return {"source": {**one, "scale": value}}

    def nodes(**options: Any) -> dict[str, Any]:
        return {"loader": {"readers": "per_node"}, **options}

    good = {name: torch.ones(3) for name in "abc"}
    lenient = {"load": {"strict": False}}

    def other(odd: nn.Module, *lines: str, **options: Any) -> Case:
        """Rank 1 has another model; the message lists these differences, and no others."""
        return (
            DIFFER,
            ["nothing was moved:\n  " + "\n  ".join(lines)],
            {"model": odd if at_1 else model_of(), "source": good, **options},
        )

    renames = Mapping((Rename("^a$", "b" if at_1 else "a"), Rename("^d$", "a" if at_1 else "b")))
    renamed = {"model": model_of("ab"), "source": {"a": torch.ones(3), "d": torch.ones(3)}}
    typed = {"a": torch.ones(3).to(torch.bfloat16 if at_2 else torch.float32)}
    longer = {"a": torch.ones(3), **({"c": torch.ones(1)} if at_2 else {})}
    turned = dict(sorted(good.items(), reverse=at_2))
    keys = ["1 parameter missing from the checkpoint: scale", "1 unexpected checkpoint key: stray", "strict=False"]
    whole = "[3] on mesh [] whole"
    two_dtypes = f"rank 0 has 'model c: float32 {whole}' where rank 1 has 'model c: float64 {whole}'"
    two_shapes = f"rank 0 has 'model b: float32 {whole}' where rank 1 has 'model b: float32 [2, 4] on mesh [] whole'"
    return {
        "missing file": (CANNOT, [str(folder / "absent"), "rank 0"], {"source": folder / "absent"}),
        "truncated file": (CANNOT, [str(folder / "cut.safetensors"), "truncated"], {"source": folder / "cut.safetensors"}),
        "not a checkpoint": (BAD_TYPE, ["int"], {"source": 3}),
        "nothing": (BAD_TYPE, ["NoneType"], {"source": None}),
        "DTensor": (BAD_TYPE, ["'scale' is a DTensor"], scale(as_dtensor)),
        "shape": (WRONG, ["scale has shape [2]", "[1]"], scale(torch.ones(2))),
        "keys": (WRONG, keys, {"source": stray}),
        "int into float": (WRONG, ["scale is int32", "float32"], scale(one["scale"].int())),
        "fp8": (WRONG, ["scale is float8_e4m3fn", "float32"], scale(one["scale"].to(torch.float8_e4m3fn))),
        "fp8 into bf16": (WRONG, ["float8_e5m2", "bfloat16"], {"model": meta_net(torch.bfloat16), "source": narrow}),
        "mapping": ("ValueError", ["'nonsense'", "epload.Mapping"], {"load": {"mapping": "nonsense"}}),
        "dtype": (
            "ValueError", ["torch.bfloat16", "already has storage of torch.float32"],
            {"model": Net(), "load": {"dtype": torch.bfloat16}},
        ),
        "src": ("ValueError", ["got 4", "[0, 1, 2, 3]"], {"loader": {"src": 4}}),
        "bucket_bytes": ("ValueError", ["bucket_bytes", "8"], {"loader": {"bucket_bytes": 8}}),
        "one bad reader": (
            CANNOT, [str(folder / "absent"), "rank 2"], nodes(source=folder / ("absent" if at_2 else "one.safetensors")),
        ),
        "two bad readers": (CANNOT, ["absent-0", "rank 0"], nodes(source=folder / f"absent-{rank}")),  # the source rank first
        "one more": other(model_of("xabc"), "rank 1 has 'model x', which rank 0 lacks"),
        "one less, not strict": other(model_of("ac"), "rank 0 has 'model b', which rank 1 lacks", **lenient),
        "another order": other(
            model_of("bac"), "rank 0 has the same names in another order than rank 1: 'model a' where it has 'model b'",
            loader={"readers": "partitioned"},
        ),
        "another shape": other(model_of(shapes={"b": (2, 4)}), two_shapes),
        "another name and dtype": other(
            model_of("xbc", c=torch.float64),
            "rank 0 has 'model a', which rank 1 lacks", "rank 1 has 'model x', which rank 0 lacks", two_dtypes,
        ),
        "bucket_bytes differ": (
            DIFFER, [f"bucket_bytes={BUCKET}", f"bucket_bytes={BUCKET + 16}"], {"loader": {"bucket_bytes": BUCKET + 16 * at_2}},
        ),
        "readers differ": (
            DIFFER, ["readers=one", "readers=per_node", "2"], {"loader": {"readers": "per_node" if at_2 else "one"}},
        ),
        "sources differ": (DIFFER, ["src=0", "src=1", "2"], {"loader": {"src": int(at_2)}}),
        "timeouts differ": (DIFFER, ["timeout=60", "timeout=90", "2"], {"loader": {"timeout": 60 + 30 * at_2}}),
        "strict differs": (DIFFER, ["strict=True", "strict=False", "rank 0", "rank 2"], {"load": {"strict": not at_2}}),
        "hooks differ": (
            DIFFER, ["init_missing=hook", "[2]"], {"load": {"strict": False, "init_missing": print if at_2 else None}},
        ),
        "mappings differ": (DIFFER, ["Rename"], {**renamed, "load": {"mapping": renames}}),
        "nodes read another dtype": (
            DIFFER, ["checkpoint a: float32", "checkpoint a: bfloat16", "rank 2"], nodes(model=model_of("a"), source=typed),
        ),
        "nodes read other names": (DIFFER, ["checkpoint c", "rank 2"], nodes(model=model_of("a"), source=longer, **lenient)),
        "verl 6365, 6002: ranks read another order": (
            DIFFER, ["checkpoint a", "checkpoint c", "rank 2"],
            {"model": model_of(), "source": turned, "loader": {"readers": "partitioned"}},
        ),
    }  # fmt: skip


def mistakes_about_devices(rank: int, device: str) -> dict[str, Case]:
    two_devices = Net().to(device)
    two_devices.norm.to(OTHER)
    on_meta = meta_net(where=device)
    on_meta.table = torch.zeros(5, 3, device=OTHER)
    weight = torch.empty(3, device="meta")
    missing = DTensor.from_local(weight, init_device_mesh("cuda", (4,)), [Replicate()], run_check=False)
    no_backend = Topology.from_nodes(NODES, dist.new_group(backend="gloo"))
    ascend = Topology.from_nodes(NODES, dist.new_group(backend=fakedev.AS_ASCEND))
    other_stream = [f"a stream of {device}", f"got a stream of {OTHER}"]
    cases: dict[str, tuple[list[str], dict[str, Any]]] = {
        "two devices": (["one accelerator", f"norm.weight on {OTHER}", f"on {device}"], {"model": two_devices}),
        "two devices, on meta": (["one accelerator", f"table on {OTHER}", f"on {device}"], {"model": on_meta}),
        "stream of another device": (other_stream, {"loader": {"stream": torch.Stream(OTHER)}}),
        "stream for a model on cpu": (
            ["stream=None for a model on cpu", device], {"model": Net(), "loader": {"stream": torch.Stream(device)}},
        ),
        "rank 2's stream": (
            [*other_stream, "rank 2"], {"loader": {"stream": torch.Stream(OTHER if rank == 2 else device)}},
        ),
        "external stream": (["ExternalStream", "torch.npu.Stream"], {"loader": {"stream": ExternalStream()}}),
        "no backend": (
            [f"a backend for {fakedev.NAME} tensors", "init_process_group"], {"loader": {"topology": no_backend}},
        ),
        "no part for Ascend": (["HCCL", "EPLOAD_NPU=1"], {"loader": {"topology": ascend}}),
        "no such device": (
            ["the mesh of scale asks for cuda", f"torch finds {fakedev.NAME}"],
            {"model": nn.ParameterDict({"scale": nn.Parameter(missing)})},
        ),
    }  # fmt: skip
    on_cpu = {"model": Net() if rank == 3 else Net().to(device)}
    return {name: ("ValueError", *case) for name, case in cases.items()} | {
        "one rank on cpu": (DIFFER, ["device=cpu", f"device={fakedev.NAME}", "[3]"], on_cpu)
    }


def refusals(rank: int, device: str, folder: Path) -> tuple[Outcome, Expected]:
    """Runs each case on a model on meta and on a loaded one, or on its own, with a good load after it."""
    defaults: dict[str, Any] = {
        "topology": Topology.from_nodes(NODES), "readers": "one", "bucket_bytes": BUCKET, "timeout": 60,
    }  # fmt: skip
    good = HierarchicalLoader(**defaults)
    loaded = meta_net(where=device)
    failures: dict[str, Failure] = {}
    problems: list[str] = []
    cases = mistakes(rank, folder) if device == "cpu" else mistakes_about_devices(rank, device)
    for name, (_, _, case) in cases.items():
        options = defaults | case.get("loader", {})
        source = case.get("source", state_for(1))
        source = source if isinstance(source, Path) else only_readers(source, options["readers"])
        good.load(loaded, only_readers(state_for(2)))
        for model in [case["model"]] if "model" in case else [meta_net(where=device), loaded]:
            before = snapshot(model)
            failure = outcome(lambda: HierarchicalLoader(**options).load(model, source, **case.get("load", {})))  # noqa: B023
            if failures.setdefault(name, failure) != failure:
                problems.append(f"{name}: {failure} on a loaded model, {failures[name]} on meta")
            problems += [f"{name}: {tensor} has changed" for tensor in moved(model, before)]
        good.load(loaded, only_readers(state_for(1)))
        problems += [f"after {name}: {text}" for text in wrong(loaded, state_for(1), where=device)]
    return (failures, problems), {name: (kind, texts) for name, (kind, texts, _) in cases.items()}


@pytest.mark.parametrize("place", ["cpu", "nccl"])
def test_a_load_that_cannot_be_right_is_refused_before_anything_moves(place: str, tmp_path: Path) -> None:
    save_file(state_for(1), tmp_path / "one.safetensors")
    save_file(state_for(1), tmp_path / "cut.safetensors")
    os.truncate(tmp_path / "cut.safetensors", (tmp_path / "cut.safetensors").stat().st_size - 1)
    by_rank = run_on(place, 4, refusals, tmp_path)
    check([outcome for outcome, _ in by_rank], by_rank[0][1])
    for case, (_, parts) in by_rank[0][1].items():
        if parts[0].startswith("nothing was moved:\n"):
            assert by_rank[0][0][0][case][1].endswith(parts[0]), case


# ---- files that differ between ranks ----

DIFFERENCES = {
    "size": ["its size differs", 'readers="one"'],
    "header": ["its header differs"],
    "content": ["its content differs"],
    "empty": ["its size differs"],
    "missing": ["cannot read", "a file that the source rank reads: pass the same checkpoint on every rank"],
}


def differing(path: Path, what: str) -> None:
    """Writes the file that one rank has in place of that of the others."""
    path.parent.mkdir()
    state = state_for(1)
    if what == "size":
        state["scale"] = torch.ones(2)
    elif what == "content":
        state["layers.1.0.weight"][5, 3] += 1
    if what != "missing":
        save_file(state, path)
    if what == "header":  # the same bytes under other names
        raw, one, other = path.read_bytes(), b'"layers.0.0.weight"', b'"layers.1.0.weight"'
        path.write_bytes(raw.replace(one, b"*").replace(other, one).replace(b"*", other, 1))
    elif what == "empty":
        path.write_bytes(b"")


def one_differs(rank: int, device: str, folder: Path, readers: str, odd: int) -> Outcome:
    failures: dict[str, Failure] = {}
    problems = []
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, bucket_bytes=BUCKET, timeout=60)
    for what in DIFFERENCES:
        path = folder / what / "model.safetensors" if rank == odd else folder / "1.safetensors"
        model = meta_net(where=device)
        if readers == "auto":
            with mock.patch("epload.loading.inputs.logger.warning") as warning:
                report = loader.load(model, path)
            problems += [f"{what}: {text}" for text in wrong(model, state_for(1), where=device)]
            warned = [call.args[0] % call.args[1:] for call in warning.call_args_list]
            expected = f"rank {rank} gets another rank's checkpoint: {path} is not the file that the source rank has"
            if [text.startswith(expected) for text in warned] != [True] * (rank == odd and what != "missing"):
                problems.append(f"{what}: {warned}")
            if report.readers != "one" or "auto -> one: only rank 0" not in report.reason:
                problems.append(f"{what}: {report.readers}, {report.reason}")
            continue
        failures[what] = outcome(lambda: loader.load(model, path))  # noqa: B023
        if not all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            problems.append(f"{what}: the model left meta")
        loader.load(model, folder / "2.safetensors")
        problems += [f"after {what}: {text}" for text in wrong(model, state_for(2), where=device)]
    return failures, problems


@pytest.mark.parametrize(
    ("place", "readers", "odd"),
    [("cpu", "every", 3), ("cpu", "partitioned", 3), ("cpu", "auto", 3), ("nccl", "every", 2)],
)
def test_a_file_that_is_another_on_one_rank(place: str, readers: str, odd: int, tmp_path: Path) -> None:
    for number in (1, 2):
        save_file(state_for(number), tmp_path / f"{number}.safetensors")
    for what in DIFFERENCES:
        differing(tmp_path / what / "model.safetensors", what)
    outcomes = run_on(place, 4, one_differs, tmp_path, readers, odd)
    if readers == "auto":
        all_fine([problems for _, problems in outcomes])
        return
    named = {what: [*texts, str(tmp_path / what), f"[rank {odd}]"] for what, texts in DIFFERENCES.items()}
    check(outcomes, {what: ("CheckpointError", texts) for what, texts in named.items()})


# ---- in the middle of the data ----


def in_the_middle(
    rank: int, device: str, readers: str, algorithm: str, nodes: list[list[int]], reading: Sequence[int]
) -> Outcome:
    """Each reader fails at one time or another, some at once, all at once; a rank cannot unpack; a hook fails."""
    small_waves()
    options: dict[str, Any] = {"readers": readers, "algorithm": algorithm, "bucket_bytes": BUCKET, "timeout": 60}
    loader = HierarchicalLoader(Topology.from_nodes(nodes), **options)
    one, two = state_for(1), state_for(2)
    loaded = meta_net(where=device)
    loader.load(loaded, two)
    failures: dict[str, Failure] = {}
    problems: list[str] = []

    def fails(case: str, source: Any = one, model: nn.Module | None = None, **options: Any) -> None:
        model = meta_net(where=device) if model is None else model
        failures[case] = outcome(lambda: loader.load(model, source, **options))
        if torch.device(device).type != "cpu":
            torch.accelerator.synchronize()
        for name, tensor in model.state_dict().items():
            if not tensor.is_meta and b"on fire" in bytes(local_of(tensor).cpu().flatten().view(torch.uint8)):
                problems.append(f"after {case}: {name} holds the text of the error")
        loader.load(model, two)
        problems.extend(f"after {case}: {text}" for text in wrong(model, two, where=device))

    on_fire = OSError(5, "the disk is on fire")
    for at, culprits in enumerate([*zip(reading, strict=True), tuple(reading)[1:3], tuple(reading)]):
        if culprits:
            source = Failing(one, on_fire, at % 3) if rank in culprits else one
            fails(f"read {culprits}", source, loaded if at % 2 else None)
    for case, error in {
        "long": RuntimeError("x" * 10_000),
        "odd": RuntimeError("é" * 300),
        "memory": MemoryError(),
    }.items():
        fails(case, Failing(one, error, 1) if rank == reading[-1] else one)
    for culprit, model in ((3, loaded), (3, None), (reading[0], None)):
        with unpack_breaks_once(culprit, "upload" if readers == "every" and device != "cpu" else "unpack"):
            fails(f"unpack on {culprit}, {'meta' if model is None else 'loaded'}", one, model)

    def hook(module: nn.Module, path: str, names: tuple[str, ...]) -> None:
        if rank == 1:
            raise KeyError(f"no rule for {path} {names}")
        for name in names:
            local_of(getattr(module, name)).detach().zero_()

    partial = {name: value for name, value in one.items() if name != "norm.bias"}
    fails("hook", partial, strict=False, init_missing=hook)
    return failures, problems


@pytest.mark.parametrize(
    ("place", "readers", "algorithm", "nodes"),
    [
        ("cpu", "one", "two_level", NODES),
        ("cpu", "per_node", "two_level", NODES),
        ("cpu", "partitioned", "two_level", [[0, 1, 2], [3]]),
        ("cpu", "every", "two_level", NODES),
        ("nccl", "one", "striped", NODES),
        ("hccl", "partitioned", "two_level", NODES),
        ("nccl", "every", "two_level", NODES),
    ],
)
def test_a_failure_in_the_middle(place: str, readers: str, algorithm: str, nodes: list[list[int]]) -> None:
    """The first failure is reported on every rank, and no other."""
    leaders = [node[0] for node in nodes]
    shared = readers == "every" or (readers == "partitioned" and place == "cpu")
    reading = [0] if readers == "one" else [0, 1, 2, 3] if shared else leaders
    outcomes = run_on(place, 4, in_the_middle, readers, algorithm, nodes, reading)
    expected: Expected = {}
    for case, failure in outcomes[0][0].items():
        if case.startswith("read"):
            expected[case] = ("LoadError", ["OSError", "the disk is on fire"])
            culprits = [rank for rank in re.findall(r"\d", case) if f"rank {rank} could not read bucket" in str(failure)]
            assert len(culprits) == 1, (case, failure)
        elif case.startswith("unpack"):
            expected[case] = ("LoadError", [f"rank {case[10]} could not ", "RuntimeError: no room to unpack"])
    culprit = f"rank {reading[-1]} could not read bucket"
    for case, text in {"long": "RuntimeError: xxxx", "odd": "RuntimeError: éééé", "memory": "MemoryError"}.items():
        expected[case] = ("LoadError", [culprit, text])
    expected["hook"] = ("LoadError", ["rank 1", "KeyError", "no rule for norm", "bias"])
    check(outcomes, expected)


def test_failures_without_a_process_group() -> None:
    """The bucket and its tensor are named, also where the text is longer than the bucket."""
    state = {"w": torch.arange(400.0)}
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(400))})
    options = LoadOptions(bucket_bytes=BUCKET)
    failure = outcome(lambda: epload.load(model, Failing(state, RuntimeError("stop")), options=options))
    assert failure is not None
    assert failure[0] == "LoadError"
    assert "rank 0 could not read bucket 3 (w of state dict): RuntimeError: stop" in failure[1]
    epload.load(model, state, options=options)
    assert torch.equal(model["w"].detach(), state["w"])


@on_ranks(4)
def test_topologies_that_differ_between_ranks(rank: int) -> list[str]:
    make = partial(Topology.from_nodes, [[0, 2], [1, 3]] if rank == 3 else NODES)
    return not_refused_by_all(make, "ManifestMismatch", "topologies differ", "rank 3")


def test_a_load_that_fails_frees_model_and_checkpoint(tmp_path: Path) -> None:
    """The garbage collector need not come first: who tries again needs the memory."""

    def attempt(fails: str) -> list[weakref.ref[Any]]:
        model, state = nn.Linear(4, 4), {"weight": torch.ones(4, 4), "bias": torch.ones(4)}
        if fails == "match":
            del state["bias"]
        try:
            if fails == "save":
                epload.save(model, tmp_path / "file" / "folder")
            else:
                epload.load(model, tmp_path / "none" if fails == "open" else state, progress=False)
        except epload.LoadError:
            return [weakref.ref(model), weakref.ref(state["weight"])]
        return []

    (tmp_path / "file").write_text("")
    gc.collect()
    gc.disable()
    try:
        for fails in ("match", "open", "save"):
            references = attempt(fails)
            assert references
            assert [reference() for reference in references] == [None, None], fails
    finally:
        gc.enable()


def shared_buffers() -> int:
    gc.collect()
    return len(mapped_memfds())


@on_ranks(2)
def test_a_closed_loader_frees_its_memory_and_loads_no_more(rank: int) -> None:
    options: dict[str, Any] = {"topology": Topology.from_nodes([[0, 1]]), "readers": "one", "bucket_bytes": BUCKET}
    with HierarchicalLoader(**options) as loader:
        loader.load(meta_net(), only_readers(state_for(1)))
        assert shared_buffers(), "no memory is shared, so that nothing can be freed"
    assert not shared_buffers()
    loader.close()
    half_closed = HierarchicalLoader(**options, timeout=20)
    if rank == 1:
        half_closed.close()
    model = meta_net()
    for unusable in (loader, half_closed):
        with pytest.raises(ValueError, match="got one that was closed; make a new one"):
            unusable.load(model, only_readers(state_for(3)))
    assert all(parameter.is_meta for parameter in model.parameters())
    HierarchicalLoader(**options).load(model, only_readers(state_for(4)))
    assert wrong(model, state_for(4)) == []
