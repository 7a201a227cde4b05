"""State dicts as targets: training that is resumed goes on bit for bit as it would have."""

from __future__ import annotations

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
from support import ranks
from support.checks import all_fine, local_of

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


def differing(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Returns the names of what differs on this rank between two nested state dicts."""
    a, b = (dcp._nested_dict.flatten_state_dict(state)[0] for state in (left, right))
    assert a.keys() == b.keys()

    def same(x: Any, y: Any) -> bool:
        return torch.equal(local_of(x), local_of(y)) if isinstance(x, Tensor) else bool(x == y)

    return [name for name in a if not same(a[name], b[name])]


def resume(rank: int, folder: str, axes: tuple[int, ...], options: dict[str, bool], readers: str) -> None:
    first, again = build(axes, 1, **options), build(axes, 2, **options)
    train(first, range(2))
    extra = {"epoch": 4, "names": ["a", "b"], "nothing": None, "generator": torch.get_rng_state()}
    dcp.save({**state_of(first), "extra": extra}, checkpoint_id=folder)
    rng = torch.zeros_like(extra["generator"])
    state = {**state_of(again), "extra": {"epoch": 0, "names": [], "nothing": 1, "generator": rng}}
    report = epload.load_state(state, folder, readers=readers, progress=False)
    set_state_dict(*again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert differing(state_of(again), state_of(first)) == []
    for training in (first, again):
        train(training, range(2, 5))
    assert differing(state_of(again), state_of(first)) == [], "after three more steps"
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
        all_fine(ranks.run(3, other_world, str(tmp_path / "step")))


def other_world(rank: int, folder: str) -> list[str]:
    """Three ranks read what four saved, as DCP does."""
    ours, theirs = (state_of(build((dist.get_world_size(),), 2)) for _ in range(2))
    dcp.load(theirs, checkpoint_id=folder)
    epload.load_state(ours, folder, strict=False, progress=False)
    return differing(ours, theirs)


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def mistakes(rank: int, folder: str) -> list[str]:
    dcp.save({"w": torch.ones(3), "epoch": 4, "harmful": Harmful()}, checkpoint_id=folder)
    source = {"a": {"w": torch.ones(3), "lr": 0.5}} if rank == 0 else {}
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        ({"w": torch.zeros(3), "epoch": 1, "loss": 2.0}, folder, {}),
        ({"w": torch.zeros(3), "harmful": 1}, folder, {"strict": False}),
        ({"w": torch.zeros(3), **({"epoch": 1} if rank else {})}, folder, {}),
        ({"w": torch.zeros(3, device="meta")}, folder, {}),
        ({"w": torch.zeros(4)}, folder, {"strict": False}),
        (nn.Linear(2, 2), folder, {}),
        ({"a": {"w": torch.zeros(3), "lr": 1.0}}, source, {"readers": "one"}),
        ({"a": {"w": torch.zeros(3), "lr": 1.0}, "b": 3}, source, {"readers": "one", "strict": False}),
    ]
    texts = []
    for state, checkpoint, options in cases:
        try:
            report = epload.load_state(state, checkpoint, progress=False, **options)
            texts.append(f"{state} {report.missing_keys}")
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
            if isinstance(state, dict) and not state["w"].is_meta:
                assert not state["w"].any(), "nothing has been changed"
    return texts


def test_mistakes_and_dicts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = ranks.run(2, mistakes, str(tmp_path / "c"))
    assert first == second
    expected = (
        "ModelMismatch: the checkpoint has no value for loss",
        "CheckpointError: the value of harmful cannot be loaded without executing",
        "ValueError: ranks 0 and 1 pass state dicts with different values besides tensors: epoch",
        "ValueError: w is on meta",
        "w has shape [3], but [4] in the model",
        "TypeError: expected a dict of tensors, got Linear, a module: pass it to epload.load",
        "{'a': {'w': tensor([1., 1., 1.]), 'lr': 0.5}} []",
        "{'a': {'w': tensor([1., 1., 1.]), 'lr': 0.5}, 'b': 3} ['b']",
    )
    for text, start in zip(first, expected, strict=True):
        assert start in text, text
    assert "executed" not in capfd.readouterr().out


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
