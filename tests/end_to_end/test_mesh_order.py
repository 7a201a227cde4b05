"""Meshes that do not list their ranks in ascending order. torch's process groups sort their ranks, so that a rank's index in a
group is not its coordinate in the mesh. torch's own ``full_tensor()`` and logits say which shard text rank has."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import epload
from support import ranks
from support.checks import all_fine, full_tensor, local_of
from support.failures import error_of
from support.findings import differing
from support.jobs import Job, Meeting, run
from support.on_ranks import on_ranks
from support.small_syncs import receiving, take
from support.sync_jobs import send_model

WIDTH, HIDDEN = 7, 12  # FSDP's shards of the first dim are uneven, those of tensor parallelism even
X = torch.arange(2.0 * WIDTH).view(2, WIDTH) / 13


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.down(self.up(x).relu()))
        return y


def reference(version: int = 0) -> Perceptron:
    """Has the same values on every rank."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(version)
        model = Perceptron()
        for parameter in model.parameters():
            parameter.normal_()
    return model


def named(order: Any, *names: str) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(order), mesh_dim_names=names)


def fsdp(model: Perceptron, mesh: DeviceMesh) -> None:
    for layer in (model.up, model.down, model):
        fully_shard(layer, mesh=mesh)


def tp(model: Perceptron, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def parallelize(model: Perceptron, how: str) -> Perceptron:
    if how == "fsdp":
        fsdp(model, named([1, 0], "fsdp"))
    elif how == "hsdp":
        fsdp(model, named([[3, 2], [1, 0]], "replicate", "shard"))
    elif how == "submesh":
        fsdp(model, named([[2, 3], [0, 1]], "fsdp", "other")["fsdp"])
    elif how == "flat":
        fsdp(model, named([[3, 1], [2, 0]], "dp", "cp")["dp", "cp"]._flatten("dp_cp"))
    elif how == "tp":
        tp(model, named([1, 0], "tp"))
    elif how == "tp on one node":
        tp(model, named([[0, 1], [3, 2]], "fsdp", "tp")["tp"])
    else:  # only one of the axes is in another order
        mesh = named([[1, 0], [3, 2]] if how == "fsdp over reversed tp" else [[2, 3], [0, 1]], "fsdp", "tp")
        tp(model, mesh["tp"])
        fsdp(model, mesh["fsdp"])
    return model


def wrong(model: Perceptron, version: int = 0) -> list[str]:
    """Differences from what torch itself says that the model holds and computes."""
    expected = reference(version)
    problems = [] if torch.allclose(full_tensor(model(X)), expected(X), atol=1e-5) else ["logits"]
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return problems + differing(model, expected)


def load_and_save(rank: int, cases: list[str], folder: str) -> list[str]:
    problems = []
    for number, how in enumerate(cases):
        # What is loaded ...
        with torch.device("meta"):
            model = Perceptron()
        parallelize(model, how)
        readers = ("every", "one")[number % 2]
        epload.load(model, f"{folder}/model.safetensors", readers=readers, progress=False, verify=True)
        problems += [f"{number}: {text}" for text in wrong(model)]
        # ... what is saved of a model that torch has sharded itself ...
        epload.save(parallelize(reference(1), how), f"{folder}/{number}")
        saved = load_file(f"{folder}/{number}/model.safetensors")
        problems += [f"{number}: saved {name}" for name in differing(saved, reference(1))]
        # ... and what a state dict is filled with.
        state = parallelize(reference(2), how)
        source = {"model": dict(reference(0).state_dict())}
        epload.load_state({"model": dict(state.state_dict())}, source, progress=False)
        problems += [f"{number}: state: {text}" for text in wrong(state)]
    return problems


@pytest.mark.parametrize(("world", "cases"), [(2, ["fsdp", "fsdp"]), (4, ["hsdp", "submesh", "flat", "with tp"])])
def test_loads_and_saves_go_by_the_groups(world: int, cases: list[str], tmp_path: Path) -> None:
    save_file(reference().state_dict(), tmp_path / "model.safetensors")
    all_fine(ranks.run(world, load_and_save, cases, str(tmp_path)))


@on_ranks(2)
def test_optimizer_states(rank: int, tmp_path: Path) -> list[str]:
    """A model and its optimizer, whose states are not FSDP's own tensors."""
    model = parallelize(reference(), "fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(X).square().sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": {"state": optimizer_state["state"]}}
    flat = {n: t for n, t in dcp._nested_dict.flatten_state_dict(state)[0].items() if isinstance(t, Tensor)}
    epload.save(state, f"{tmp_path}/state")
    problems = [f"saved {name}" for name in differing(load_file(f"{tmp_path}/state/model.safetensors"), flat)]
    before = {name: local_of(tensor).clone() for name, tensor in flat.items()}
    for tensor in flat.values():
        local_of(tensor).detach().zero_()
    epload.load_state(state, f"{tmp_path}/state", progress=False)
    problems += [f"loaded {name}" for name, value in before.items() if not torch.equal(local_of(flat[name]), value)]
    return problems if sum(isinstance(t, DTensor) for t in flat.values()) >= 18 else [f"{len(flat)} tensors"]


def receive(rank: int, meeting: Meeting) -> list[str]:
    model = parallelize(reference(9), "fsdp")
    with receiving(meeting, model) as receiver:
        take(receiver)
    return wrong(model, 5)


def test_syncs() -> None:
    assert run([Job(2, send_model, (partial(parallelize, reference(5), "fsdp"),)), Job(2, receive)]) == [
        [[""], [""]],
        [[], []],
    ]


def refusals(rank: int, cases: list[str], folder: str) -> list[str]:
    texts = []
    for how in cases:
        model = parallelize(reference(1), how)
        before = [local_of(p).clone() for p in model.parameters()]
        source = dict(reference().state_dict())
        texts.append(error_of(lambda: epload.load(model, source, progress=False, timeout=30)))  # noqa: B023
        texts.append(error_of(lambda: epload.save(model, f"{folder}/saved", timeout=30)))  # noqa: B023
        assert all(map(torch.equal, before, map(local_of, model.parameters())))
    assert not Path(folder, "saved").exists()
    return texts


@pytest.mark.parametrize(("world", "cases"), [(2, ["tp"]), (4, ["fsdp over reversed tp", "tp on one node"])])
def test_tensor_parallelism_on_such_a_mesh_is_refused(world: int, cases: list[str], tmp_path: Path) -> None:
    texts = ranks.run(world, refusals, cases, str(tmp_path))
    assert texts == [texts[0]] * world
    for text in texts[0]:
        assert re.search("(?s)ModelMismatch.*up.weight is sharded over axis.*ascending order", text)


def others(rank: int) -> list[str]:
    """An outer shard, and an entry of a state dict that fits neither order, as torch cuts the padding by coordinate."""
    experts = nn.ParameterDict({"experts": nn.Parameter(torch.zeros(2, 3))})
    options = epload.LoadOptions(outer_shards=[epload.OuterShard("experts", named([1, 0], "ep"))])
    whole = {"experts": torch.arange(12.0).view(4, 3)}
    state = {"weight": distribute_tensor(torch.arange(5.0), named([1, 0], "tp"), [Shard(0)], src_data_rank=None)}
    return [
        error_of(lambda: epload.load(experts, whole, progress=False, timeout=30, options=options)),
        error_of(lambda: epload.load_state(state, {"weight": torch.arange(5.0)}, progress=False, timeout=30)),
    ]


def test_shards_that_fit_neither_order_are_refused() -> None:
    (outer, entry), there = ranks.run(2, others)
    assert there == [outer, entry]
    assert re.match("(?s)ValueError.*ascending order", outer)
    assert re.match(r"(?s)ModelMismatch.*weight is sharded over axis 0 \(tp\)", entry)
