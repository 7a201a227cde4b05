"""verify=: a bit that changes anywhere between the file and a shard is found, and named; and what is right is not doubted."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from epload import Checkpoint, CheckpointError, HierarchicalLoader, LoadError, LocalModules, Topology, WeightSender
from epload.checkpoint.file_checkpoint import FileCheckpoint
from epload.mapping.resolve import resolve_mapping
from epload.model.targets import Targets, collect
from epload.native import ops
from epload.planning.buckets import HEADER_BYTES
from epload.planning.plan import LoadPlan, make_plan
from epload.transport.local import Local
from epload.verify.proof import Proof
from support import ranks
from support.checks import all_fine
from support.small_model import BUCKET, NODES, State, meta_net, only_readers, state_for, wrong

WAYS = (
    ("one", "two_level"),
    ("one", "striped"),
    ("partitioned", "striped"),
    ("every", "two_level"),
)


def loader_for(way: tuple[str, str], verify: bool = True, bucket_bytes: int = BUCKET) -> HierarchicalLoader:
    nodes = Topology.from_nodes(NODES)
    return HierarchicalLoader(
        nodes, readers=way[0], algorithm=way[1], bucket_bytes=bucket_bytes, verify=verify, timeout=30
    )


def flip(data: Tensor, bit: int = 0) -> None:
    data.view(torch.uint8).view(-1)[bit // 8] ^= 1 << bit % 8


@contextmanager
def flips_in_shard(active: bool, name_of_victim: Callable[[Sequence[Tensor]], bool]) -> Iterator[None]:
    """After one unpack or read, the lowest bit of a shard changes."""
    done = not active

    def then_flip(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(local: Local, of: int | range, *args: Any) -> Any:
            nonlocal done
            result = inner(local, of, *args)
            for number in [of] if isinstance(of, int) else of:
                for target in local.regions(number).targets:
                    if not done and target.numel() and target.is_contiguous() and name_of_victim(target):
                        flip(target.detach())
                        done = True
            return result

        return call

    with (
        mock.patch.object(Local, "unpack", then_flip(Local.unpack)),
        mock.patch.object(Local, "read", then_flip(Local.read)),
    ):
        yield
    assert done or not active, "nothing was flipped"


@contextmanager
def flips_on_the_way(active: bool) -> Iterator[None]:
    """The lowest bit of the first payload byte that a relay or a broadcast brings to this rank changes. Striped, buckets have to
    be so large that each rank of a node has a stripe of one."""
    done = not active

    def then_flip(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal done
            result = inner(*args, **options)
            data = args[0][0] if isinstance(args[0], list) else args[0]
            if not done and bytes(data[:8].tolist()) == b"epload01":
                flip(data[HEADER_BYTES:])
                done = True
            return result

        return call

    with (
        mock.patch.object(ops, "relay", then_flip(ops.relay)),
        mock.patch.object(ops, "coalesced_bcast", then_flip(ops.coalesced_bcast)),
    ):
        yield
    assert done or not active, "nothing was flipped"


@contextmanager
def flips_while_read(active: bool) -> Iterator[None]:
    """The first bytes that are read from the file are wrong, once."""
    done = not active
    inner = FileCheckpoint.fill

    def fill(self: FileCheckpoint, bucket: Tensor, pieces: Any) -> None:
        nonlocal done
        inner(self, bucket, pieces)
        if not done:
            flip(bucket[pieces[0].bucket_offset :])
            done = True

    with mock.patch.object(FileCheckpoint, "fill", fill):
        yield
    assert done or not active, "nothing was flipped"


def outcome(action: Callable[[], Any]) -> str:
    try:
        action()
    except LoadError as error:
        return str(error)
    return "fine"


def good_loads(rank: int, path: Path, state: State) -> list[str]:
    problems = []
    for way in WAYS:
        for verify in (False, True):
            model = meta_net()
            report = loader_for(way, verify).load(model, path)
            what = f"{way} {verify}"
            problems += [f"{what}: {text}" for text in wrong(model, state)]
            if report.verify != verify or (report.phases["verify"].seconds > 0) != verify:
                problems.append(f"{what}: {report.verify} {report.phases['verify']}, readers {report.readers}")
    return problems


def test_what_is_right_is_not_doubted(tmp_path: Path) -> None:
    save_file(state_for(1), tmp_path / "model.safetensors")
    all_fine(ranks.run(4, good_loads, tmp_path / "model.safetensors", state_for(1), limit=200))


def flipped_in_shard(rank: int, path: Path, state: State) -> list[str]:
    problems = []
    for way in WAYS:
        model, loader = meta_net(), loader_for(way)

        def embedding(target: Tensor) -> bool:
            return target.ndim == 2 and target.shape[1] == 6 and target.dtype == torch.float32 and target.shape[0] <= 4

        with flips_in_shard(rank == 3, embedding):
            text = outcome(lambda model=model, loader=loader: loader.load(model, path))
        if "embed.weight on rank 3;" not in text:
            problems.append(f"{way}: {text}")
        loader.load(model, path)
        problems += [f"{way}, after that: {text}" for text in wrong(model, state)]
    return problems


def test_a_bit_that_flips_in_a_shard_is_found_and_named(tmp_path: Path) -> None:
    save_file(state_for(1), tmp_path / "model.safetensors")
    all_fine(ranks.run(4, flipped_in_shard, tmp_path / "model.safetensors", state_for(1)))


def stages_of_other_dims(rank: int, path: Path, state: State) -> list[str]:
    """Two ranks have five dims, two have one, all in one bucket; the third load is proven by what the first two have kept."""
    mine = ("patch", "bias") if rank < 2 else ("bias", "scale")
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros_like(state[name])) for name in mine})
    loader = loader_for(("one", "two_level"))
    problems = []
    for _ in range(2):
        loader.load(model, path, local_modules=[LocalModules("")])
        problems += [name for name in mine if not torch.equal(model[name].detach(), state[name])]
    with flips_in_shard(rank == 3, lambda target: target.shape == state["scale"].shape):
        text = outcome(lambda: loader.load(model, path, local_modules=[LocalModules("")]))
    return problems if "differ" in text and " scale on rank 3;" in text else [*problems, text]


def test_ranks_with_other_dims_are_proven(tmp_path: Path) -> None:
    shapes = {"patch": (3, 2, 2, 2, 2), "bias": (7,), "scale": (5,)}
    state = {name: torch.arange(1.0, 1 + prod(shape)).view(shape) for name, shape in shapes.items()}
    save_file(state, tmp_path / "model.safetensors")
    all_fine(ranks.run(4, stages_of_other_dims, tmp_path / "model.safetensors", state))


def flipped_on_the_way(rank: int, path: Path) -> list[tuple[str, str]]:
    problems = []
    for way in (("one", "two_level"), ("one", "striped"), ("partitioned", "striped")):
        loader = loader_for(way, bucket_bytes=4 * BUCKET)
        with flips_on_the_way(rank == 2):
            problems.append((str(way), outcome(lambda loader=loader: loader.load(meta_net(), path))))
        loader.load(meta_net(), path)
    return problems


def test_a_bit_that_flips_on_the_way_is_found(tmp_path: Path) -> None:
    save_file(state_for(1), tmp_path / "model.safetensors")
    for results in zip(*ranks.run(4, flipped_on_the_way, tmp_path / "model.safetensors"), strict=True):
        assert len({text for _, text in results}) == 1, results
        assert "after the load, shards differ from" in results[0][1], results


def flipped_while_read(rank: int, path: Path) -> list[str]:
    problems = []
    for way in (("one", "two_level"), ("per_node", "two_level"), ("partitioned", "striped")):
        loader = loader_for(way)
        with flips_while_read(rank == 0):
            problems.append(outcome(lambda loader=loader: loader.load(meta_net(), path)))
    return problems


def test_a_bit_that_flips_while_it_is_read_is_found(tmp_path: Path) -> None:
    save_file(state_for(1), tmp_path / "model.safetensors")
    for results in zip(*ranks.run(4, flipped_while_read, tmp_path / "model.safetensors"), strict=True):
        assert len(set(results)) == 1, results
        assert "after the load, shards differ from" in results[0], results
        assert "on rank" in results[0]


SOURCES = pytest.mark.parametrize("from_file", [False, True])
"""A dict is copied into a buffer, a file's regions are digested as they are read."""


@SOURCES
def test_what_differs_is_found_and_nothing_else(from_file: bool, tmp_path: Path) -> None:
    """Two ranks hold the same, and one has the end of every tenth tensor wrong."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.full((1 + i * 7 % 90,), float(i))) for i in range(60)])
    checkpoint, targets, plan = planned(model, tmp_path if from_file else None)
    one, local = Proof(plan, [0]), Local(plan, targets.local())
    right = one.claims(local)[0]
    for value in list(model.parameters())[::10]:
        value.data[-1] += 1
    wrong_too = one.claims(local)[0]
    list(one.check(0, {0: right, 7: right}, checkpoint, checkpoint.manifest))
    failure = outcome(lambda: list(one.check(0, {0: right, 3: wrong_too, 7: right}, checkpoint, checkpoint.manifest)))
    listed = re.fullmatch(
        r"after the load, shards differ from .* as rank 0 reads it: (.*); the memory, the network.*", failure
    )
    assert listed is not None, failure
    names = listed[1].split(", ")
    assert all(re.fullmatch(r"\d+ on rank 3", text) for text in names), "and of no other rank"
    assert {text.split()[0] for text in names} == {f"{i}" for i in range(0, 60, 10)}


def test_a_file_that_ends_before_it_is_proven_is_named(tmp_path: Path) -> None:
    """The first of two; of both, the tensors have been read for the load."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.full((50,), float(i))) for i in range(20)])
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for number in range(2):
        part = {name: value for name, value in state.items() if int(name) % 2 == number}
        save_file(part, tmp_path / f"model-{number}.safetensors")
    checkpoint, targets = Checkpoint.open(tmp_path), collect(model, None, None)
    plan = make_plan(checkpoint.manifest, targets, resolve_mapping("auto", model, targets.index), 512)
    one = Proof(plan, [0])
    claims = one.claims(Local(plan, targets.local()))
    list(one.check(0, claims, checkpoint, checkpoint.manifest))
    os.truncate(tmp_path / "model-0.safetensors", 1500)
    with pytest.raises(CheckpointError, match=r"model-0\.safetensors was truncated \(\d+ bytes, now 1500\)"):
        list(one.check(0, claims, checkpoint, checkpoint.manifest))


def cast(rank: int, path: Path, state: State) -> list[str]:
    """Into bfloat16, of which a proof has to convert what it reads."""
    problems = []
    for way in WAYS:
        model, loader = meta_net(), loader_for(way)
        loader.load(model, path, dtype=torch.bfloat16)
        problems += [f"{way}: {text}" for text in wrong(model, state, torch.bfloat16)]
        with flips_in_shard(rank == 3, lambda target: target.dtype == torch.bfloat16):
            text = outcome(lambda model=model, loader=loader: loader.load(model, path, dtype=torch.bfloat16))
        if "on rank 3;" not in text:
            problems.append(f"{way}: {text}")
    return problems


def test_shards_of_another_dtype_are_proven(tmp_path: Path) -> None:
    save_file(state_for(1), tmp_path / "model.safetensors")
    all_fine(ranks.run(4, cast, tmp_path / "model.safetensors", state_for(1)))


NARROW = (torch.bfloat16, torch.float16, torch.float64)


def nan_places(rank: int, folder: Path, state: State) -> list[str]:
    """Loads that convert NaN, into tensors of rows and of columns, out of a file and of a dict."""
    problems = []
    for wanted, turned, source in product(NARROW, (False, True), (folder, state)):
        shape = state["w"].shape
        place = torch.empty(shape[::-1], dtype=wanted).T if turned else torch.empty(shape, dtype=wanted)
        model = torch.nn.ParameterDict({"w": torch.nn.Parameter(place)})
        loader = loader_for(("one", "two_level"))
        for _ in range(2):
            text = outcome(lambda loader=loader, model=model, source=source: loader.load(model, only_readers(source)))
            problems += [f"{wanted} {turned}: {text}"] if text != "fine" else []
        with flips_in_shard(rank == 1 and not turned, lambda _: True):
            text = outcome(lambda loader=loader, model=model: loader.load(model, folder))
        if (" w on rank 1;" in text) == turned:
            problems.append(f"{wanted} {turned}: {text}")
    return problems


def test_which_nan_something_is_converted_to_is_not_doubted(tmp_path: Path) -> None:
    """It depends on where it lies."""
    values = torch.randn(40, 33)
    values[::3, 1::5] = torch.nan
    values[1::3, ::7] = -torch.nan
    save_file({"w": values}, tmp_path / "model.safetensors")
    all_fine(ranks.run(4, nan_places, tmp_path, {"w": values}))


def planned(model: nn.Module, folder: Path | None) -> tuple[Checkpoint, Targets, LoadPlan]:
    """For what the model holds, copied into a dict or into a file in ``folder``."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if folder is not None:
        save_file(state, folder / "model.safetensors")
    checkpoint = Checkpoint.open(state if folder is None else folder)
    targets = collect(model, None, None)
    return (
        checkpoint,
        targets,
        make_plan(checkpoint.manifest, targets, resolve_mapping("auto", model, targets.index), 512),
    )


def consumed(rank: int) -> str:
    source = Checkpoint.from_state_dict(state_for(), consume=True)
    with pytest.raises(ValueError, match="verify=True reads the checkpoint again") as refusal:
        loader_for(WAYS[0]).load(meta_net(), only_readers(source))
    loader_for(WAYS[0], verify=False).load(meta_net(), only_readers(source))
    return str(refusal.value)


def test_what_can_be_read_only_once_cannot_be_verified() -> None:
    assert all("leave out consume=True" in text for text in ranks.run(4, consumed))


@pytest.mark.parametrize(("verify", "advice"), [("full", "True to"), ("off", "False not to"), (1, "True to")])
def test_verify_is_a_bool(verify: Any, advice: str) -> None:
    for make in (
        HierarchicalLoader,
        lambda **options: WeightSender(nn.Linear(2, 2), "127.0.0.1:0", receivers=1, **options),
    ):
        with pytest.raises(
            TypeError, match=f"expected verify to be a bool, got {verify!r}; pass verify={advice} prove"
        ):
            make(verify=verify)
