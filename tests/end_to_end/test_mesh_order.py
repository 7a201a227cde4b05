"""Meshes that do not list their ranks in ascending order. torch's process groups sort their ranks, so that a rank's index in a
group is not its coordinate in the mesh. torch's own ``full_tensor()`` and logits say which shard each rank has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import epload
from epload.model.flat_state import FlatState
from support import ranks
from support.jobs import Job, Meeting, run

WIDTH, HIDDEN = 7, 12  # FSDP's shards of the first dim are uneven, those of tensor parallelism even
X = torch.arange(2.0 * WIDTH).view(2, WIDTH) / 13


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.down(self.up(x).relu()))
        return y


def reference(version: int = 0) -> Net:
    """Has the same values on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(version)
        model = Net()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
    return model


def named(order: Any, *names: str) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(order), mesh_dim_names=names)


def fsdp(model: Net, mesh: DeviceMesh) -> None:
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def reversed_fsdp(model: Net) -> None:
    fsdp(model, named([1, 0], "fsdp"))


def hsdp(model: Net) -> None:
    fsdp(model, named([[3, 2], [1, 0]], "replicate", "shard"))


def submesh(model: Net) -> None:
    fsdp(model, named([[2, 3], [0, 1]], "fsdp", "other")["fsdp"])


def flattened(model: Net) -> None:
    fsdp(model, named([[3, 1], [2, 0]], "dp", "cp")["dp", "cp"]._flatten("dp_cp"))


def tp(model: Net, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fsdp_over_tp(model: Net) -> None:
    """Only FSDP's axis is in another order."""
    mesh = named([[2, 3], [0, 1]], "fsdp", "tp")
    tp(model, mesh["tp"])
    fsdp(model, mesh["fsdp"])


Parallelize = Callable[[Net], None]
CASES: list[tuple[int, Parallelize]] = [
    (2, reversed_fsdp), (4, hsdp), (4, submesh), (4, flattened), (4, fsdp_over_tp),
]  # fmt: skip


def meta_model(parallelize: Parallelize) -> Net:
    with torch.device("meta"):
        model = Net()
    parallelize(model)
    return model


def wrong(model: Net, version: int = 0) -> list[str]:
    """Differences from what torch itself says that the model holds and computes."""
    expected = reference(version)
    logits = model(X)
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    problems = [] if torch.allclose(logits, expected(X), atol=1e-5) else ["logits"]
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    state = model.state_dict()
    for name, value in expected.state_dict().items():
        tensor = state[name]
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not torch.equal(full, value):
            problems.append(name)
    return problems


def load_and_save(rank: int, parallelize: Parallelize, readers: str, folder: str) -> list[str]:
    # What is loaded ...
    model = meta_model(parallelize)
    epload.load(model, f"{folder}/model.safetensors", readers=readers, progress=False, verify=True)
    problems = wrong(model)
    # ... what is saved of a model that torch has sharded itself ...
    sharded = reference(1)
    parallelize(sharded)
    epload.save(sharded, f"{folder}/saved")
    saved = load_file(f"{folder}/saved/model.safetensors")
    problems += [f"saved {n}" for n, value in reference(1).state_dict().items() if not torch.equal(saved[n], value)]
    # ... and what a state dict is filled with.
    state = {"model": reference(2)}
    parallelize(state["model"])
    tensors = dict(state["model"].state_dict())
    epload.load_state({"model": tensors}, {"model": dict(reference(0).state_dict())}, progress=False)
    problems += [f"state: {each}" for each in wrong(state["model"])]
    return problems


@pytest.mark.parametrize(
    ("world", "parallelize", "readers"), [(*case, ("every", "one")[i % 2]) for i, case in enumerate(CASES)]
)
def test_loads_and_saves_go_by_the_groups(world: int, parallelize: Parallelize, readers: str, tmp_path: Path) -> None:
    save_file(reference().state_dict(), tmp_path / "model.safetensors")
    assert ranks.run(world, load_and_save, parallelize, readers, str(tmp_path)) == [[]] * world


def resume(rank: int, folder: str) -> list[str]:
    """A model and its optimizer, whose states are not FSDP's own tensors."""
    model = reference()
    reversed_fsdp(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(X).square().sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": {"state": optimizer_state["state"]}}
    full = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
        for name, tensor in FlatState(state)._buffers.items()
        if tensor is not None
    }
    epload.save(state, f"{folder}/state")
    saved = load_file(f"{folder}/state/model.safetensors")
    assert saved.keys() == full.keys()
    problems = [f"saved {name}" for name, value in full.items() if not torch.equal(saved[name], value)]
    tensors = [tensor for tensor in FlatState(state)._buffers.values() if isinstance(tensor, DTensor)]
    before = [tensor.to_local().clone() for tensor in tensors]
    for tensor in tensors:
        tensor.to_local().zero_()
    epload.load_state(state, f"{folder}/state", progress=False)
    problems += ["loaded" for old, new in zip(before, tensors, strict=True) if not torch.equal(old, new.to_local())]
    return problems if len(tensors) >= 18 else [f"{len(tensors)} tensors"]


def test_optimizer_states(tmp_path: Path) -> None:
    assert ranks.run(2, resume, str(tmp_path)) == [[], []]


# ---- syncs ----


def send(rank: int, meeting: Meeting) -> list[str]:
    model = reference(5)
    reversed_fsdp(model)
    with epload.WeightSender(model, ("127.0.0.1", 0), receivers=1, timeout=60) as sender:
        if rank == 0:
            meeting.say("address", sender.address)
        sender.send_weights(1)
        meeting.hear("done")
    return []


def receive(rank: int, meeting: Meeting) -> list[str]:
    model = reference(9)
    submesh_of_two = named([1, 0], "fsdp")
    fsdp(model, submesh_of_two)
    with epload.WeightReceiver(model, meeting.hear("address"), timeout=60) as receiver:
        receiver.receive_weights()
        receiver.commit()
        if rank == 0:
            meeting.say("done")
    return wrong(model, 5)


def test_syncs() -> None:
    assert run([Job(2, send), Job(2, receive)]) == [[[], []], [[], []]]


# ---- where torch itself has two orders ----


def reversed_tp(model: Net) -> None:
    tp(model, named([1, 0], "tp"))


def fsdp_over_reversed_tp(model: Net) -> None:
    mesh = named([[1, 0], [3, 2]], "fsdp", "tp")
    tp(model, mesh["tp"])
    fsdp(model, mesh["fsdp"])


def reversed_tp_on_one_node(model: Net) -> None:
    mesh = named([[0, 1], [3, 2]], "fsdp", "tp")
    tp(model, mesh["tp"])


def refusals(rank: int, parallelize: Parallelize, folder: str) -> list[str]:
    model = reference(1)
    parallelize(model)
    before = [(p.to_local() if isinstance(p, DTensor) else p).clone() for p in model.parameters()]
    texts = []
    for action in (
        lambda: epload.load(model, dict(reference().state_dict()), progress=False, timeout=30),
        lambda: epload.save(model, f"{folder}/saved", timeout=30),
    ):
        try:
            action()
            texts.append("no error")
        except epload.ModelMismatch as error:
            texts.append(str(error))
    after = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    assert all(map(torch.equal, before, after))
    assert not Path(folder, "saved").exists()
    return texts


@pytest.mark.parametrize(
    ("world", "parallelize"), [(2, reversed_tp), (4, fsdp_over_reversed_tp), (4, reversed_tp_on_one_node)]
)
def test_tensor_parallelism_on_such_a_mesh_is_refused(world: int, parallelize: Parallelize, tmp_path: Path) -> None:
    texts = ranks.run(world, refusals, parallelize, str(tmp_path))
    assert texts == [texts[0]] * world
    for text in texts[0]:
        assert "up.weight is sharded over axis" in text
        assert "ascending order" in text


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(2, 3))


def outer_shard(rank: int) -> str:
    model = Expert()
    shard = epload.OuterShard("experts", named([1, 0], "ep"))
    try:
        epload.load(
            model,
            {"experts": torch.arange(12.0).view(4, 3)},
            progress=False,
            timeout=30,
            options=epload.LoadOptions(outer_shards=[shard]),
        )
    except ValueError as error:
        return str(error)
    return f"loaded {model.experts.tolist()}"


def test_an_outer_shard_on_such_a_mesh_is_refused() -> None:
    texts = ranks.run(2, outer_shard)
    assert texts == [texts[0]] * 2
    assert "ascending order" in texts[0]


def uneven_entry(rank: int) -> str:
    """torch cuts the padding by coordinate, so that neither order describes the shards."""
    mesh = named([1, 0], "tp")
    state = {"weight": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)], src_data_rank=None)}
    try:
        epload.load_state(state, {"weight": torch.arange(5.0)}, progress=False, timeout=30)
    except epload.ModelMismatch as error:
        return str(error)
    return f"loaded {state['weight'].to_local().tolist()}"


def test_an_entry_of_a_state_dict_that_fits_neither_order_is_refused() -> None:
    texts = ranks.run(2, uneven_entry)
    assert texts == [texts[0]] * 2
    assert "weight is sharded over axis 0 (tp)" in texts[0]
