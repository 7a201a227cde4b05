"""State dicts as targets: training that is resumed goes on bit for bit as it would have."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import epload
from epload.loading import values
from support import ranks
from support.checks import local_of
from support.findings import differing_values, must_be_refused_by_all
from support.on_ranks import on_ranks

Training = tuple[nn.Module, torch.optim.Optimizer]


def build(axes: tuple[int, ...], seed: int, **options: bool) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.BatchNorm1d(3))
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=("replicate", "shard")[-len(axes) :])
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * seed, **options)


def train(training: Training, steps: range) -> None:
    model, optimizer = training
    for step in steps:
        inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(training: Training) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(*training), strict=True))


def resume(rank: int, folder: str, axes: tuple[int, ...], options: dict[str, bool], readers: str) -> None:
    first, again = build(axes, 1, **options), build(axes, 2, **options)
    train(first, range(2))
    extra = {"epoch": 4, "names": ["a", "b"], "nothing": None, "generator": torch.get_rng_state()}
    dcp.save({**state_of(first), "extra": extra}, checkpoint_id=folder)
    rng = torch.zeros_like(extra["generator"])
    state = {**state_of(again), "extra": {"epoch": 0, "names": [], "nothing": 1, "generator": rng}}
    report = epload.load_state(state, folder, readers=readers, progress=False)
    set_state_dict(*again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert differing_values(state_of(again), state_of(first)) == []
    for training in (first, again):
        train(training, range(2, 5))
    assert differing_values(state_of(again), state_of(first)) == [], "after three more steps"
    assert state["extra"].pop("generator") is rng, "filled in place"
    assert torch.equal(rng, extra.pop("generator"))
    assert state["extra"] == extra
    assert report.missing_keys == report.unexpected_keys == []


@pytest.mark.parametrize(
    ("axes", "readers", "options"),
    [((4,), "auto", {"foreach": False}), ((2, 2), "one", {"foreach": True}), ((4,), "partitioned", {"fused": True})],
)
def test_training_goes_on(axes: tuple[int, ...], readers: str, options: dict[str, bool], tmp_path: Path) -> None:
    ranks.run(4, resume, str(tmp_path / "step"), axes, options, readers)
    if readers == "auto":
        ranks.run(3, other_world, str(tmp_path / "step"))


def other_world(rank: int, folder: str) -> None:
    """Three ranks read what four saved, as DCP does."""
    ours, theirs = (state_of(build((dist.get_world_size(),), 2)) for _ in range(2))
    dcp.load(theirs, checkpoint_id=folder)
    epload.load_state(ours, folder, strict=False, progress=False)
    assert differing_values(ours, theirs) == []


class Harmful:
    def __reduce__(self) -> Any:
        return pytest.fail, ("executed",)


@on_ranks(2)
def test_mistakes_and_dicts(rank: int, tmp_path: Path) -> None:
    folder, zeros = str(tmp_path / "c"), torch.zeros(3)
    dcp.save({"w": torch.ones(3), "epoch": 4, "harmful": Harmful()}, checkpoint_id=folder)
    cases: list[tuple[Any, str, dict[str, Any]]] = [
        ({"w": zeros, "epoch": 1, "loss": 2.0}, "ModelMismatch: the checkpoint has no value for loss", {}),
        (
            {"w": zeros, "harmful": 1}, "CheckpointError: the value of harmful cannot be loaded without executing",
            {"strict": False},
        ),
        (
            {"w": zeros, **({"epoch": 1} if rank else {})},
            "ValueError: ranks 0 and 1 pass state dicts with different values besides tensors: epoch", {},
        ),
        ({"w": torch.zeros(3, device="meta")}, "ValueError: w is on meta", {}),
        ({"w": torch.zeros(4)}, "w has shape [3], but [4] in the model", {"strict": False}),
        (nn.Linear(2, 2), "TypeError: expected a dict of tensors, got Linear, a module: pass it to epload.load", {}),
    ]  # fmt: skip
    for state, text, options in cases:
        must_be_refused_by_all(partial(epload.load_state, state, folder, progress=False, **options), text)
    assert not zeros.any(), "nothing has been changed"
    source = {"a": {"w": torch.ones(3), "lr": 0.5}} if rank == 0 else {}
    for more, options in ({}, {}), ({"b": 3}, {"strict": False}):
        state = {"a": {"w": torch.zeros(3), "lr": 1.0}, **more}
        report = epload.load_state(state, source, readers="one", progress=False, **options)
        assert differing_values(state, {"a": {"w": torch.ones(3), "lr": 0.5}, **more}) == []
        assert report.missing_keys == [*more]


class OneRow(nn.Module):
    """A row that two names share: the second of two ranks has no element of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.other = (nn.Linear(4, 1, bias=False) for _ in range(3))
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x) + self.other(x)


@on_ranks(2)
def test_tied_tensors_of_which_a_rank_has_nothing(rank: int, tmp_path: Path) -> None:
    model = fully_shard(OneRow())
    state = state_of((model, torch.optim.AdamW(model.parameters())))
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    values = {name: local_of(tensor).clone() for name, tensor in state["model"].items()}
    for tensor in state["model"].values():
        local_of(tensor).zero_()
    epload.load_state(state, tmp_path / "dcp", progress=False)
    assert all(torch.equal(local_of(tensor), values[name]) for name, tensor in state["model"].items())
    epload.save(state["model"], tmp_path / "saved")


def test_keys_that_are_no_strings(tmp_path: Path) -> None:
    """An optimizer's own state dict has such keys. torch saves them under their strings."""
    model, data = nn.Linear(3, 2), torch.ones(2, 3)
    optimizers = [torch.optim.LBFGS(model.parameters(), max_iter=steps) for steps in (3, 1)]
    for optimizer in optimizers:
        optimizer.step(lambda: model(data).sum())
    saved, state = (optimizer.state_dict() for optimizer in optimizers)
    dcp.save(saved, checkpoint_id=tmp_path / "step")
    for source in (tmp_path / "step", saved):
        epload.load_state(state, source, strict=False, progress=False)
        assert list(state["state"]) == list(saved["state"]) == [0]
        assert state["state"][0]["n_iter"] == saved["state"][0]["n_iter"]
        assert state["param_groups"][0]["max_iter"] == 3
    nested = {"k": {0: "old", "x": "old"}}
    epload.load_state(nested, {"k": {0: "new", "x": "new"}}, progress=False)
    assert nested == {"k": {0: "new", "x": "new"}}


def test_a_link_that_leads_elsewhere_during_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and tensors are of one checkpoint."""
    for step in (1, 2):
        dcp.save({"w": torch.full((2,), float(step)), "step": step}, checkpoint_id=tmp_path / str(step), no_dist=True)
    link = tmp_path / "latest"
    link.symlink_to("1")
    read = values.read_objects

    def flipped(*args: Any) -> Any:
        contents = read(*args)
        link.unlink()
        link.symlink_to("2")
        return contents

    monkeypatch.setattr(values, "read_objects", flipped)
    state: dict[str, Any] = {"w": torch.zeros(2), "step": 0}
    epload.load_state(state, link, progress=False)
    assert (state["w"].tolist(), state["step"]) == ([1, 1], 1)


@on_ranks(2)
def test_a_dict_on_the_rank_that_reads(rank: int) -> None:
    full = {"w": torch.arange(4.0), "step": 3}
    state: dict[str, Any] = {"w": torch.zeros(4), "step": 0}
    epload.load_state(state, full if rank == 0 else None, progress=False)
    assert torch.equal(state["w"], full["w"])
    assert state["step"] == 3
