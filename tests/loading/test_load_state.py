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
from torch.distributed.tensor import DTensor

import epload
from support import ranks
from support.checks import all_fine


def build(axes: tuple[int, ...], foreach: bool, fused: bool, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.BatchNorm1d(3))
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=("replicate", "shard")[-len(axes) :])
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed, foreach=foreach, fused=fused)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What training depends on, on this rank."""
    states = get_state_dict(model, optimizer)
    flat, _ = dcp._nested_dict.flatten_state_dict({"model": states[0], "optimizer": states[1]})
    local = {name: each.to_local() if isinstance(each, DTensor) else each for name, each in flat.items()}
    return {name: each.clone() if isinstance(each, Tensor) else each for name, each in local.items()}


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    assert found.keys() == expected.keys()
    return [
        name
        for name, each in expected.items()
        if not (torch.equal(found[name], each) if isinstance(each, Tensor) else found[name] == each)
    ]


def resume(rank: int, folder: str, axes: tuple[int, ...], foreach: bool, fused: bool, readers: str) -> list[str]:
    model, optimizer = build(axes, foreach, fused, seed=1)
    train(model, optimizer, range(2))
    states = get_state_dict(model, optimizer)
    extra = {"epoch": 4, "names": ["a", "b"], "nothing": None, "generator": torch.get_rng_state()}
    dcp.save({"model": states[0], "optimizer": states[1], "extra": extra}, checkpoint_id=folder)
    again, another = build(axes, foreach, fused, seed=2)
    model_state, optimizer_state = get_state_dict(again, another)
    rng = torch.zeros_like(extra["generator"])
    state = {
        "model": model_state, "optimizer": optimizer_state,
        "extra": {"epoch": 0, "names": [], "nothing": 1, "generator": rng},
    }  # fmt: skip
    report = epload.load_state(state, folder, readers=readers, progress=False)
    set_state_dict(again, another, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    problems = differing(values(again, another), values(model, optimizer))
    for trained, by in ((model, optimizer), (again, another)):
        train(trained, by, range(2, 5))
    problems += [
        f"after three more steps: {name}" for name in differing(values(again, another), values(model, optimizer))
    ]
    found = state["extra"]
    assert found.pop("generator") is rng, "filled in place"
    assert torch.equal(rng, extra.pop("generator"))
    assert found == extra
    assert report.missing_keys == report.unexpected_keys == []
    return problems


@pytest.mark.parametrize(
    ("axes", "readers", "foreach", "fused"),
    [((4,), "auto", False, False), ((2, 2), "one", True, False), ((4,), "partitioned", False, True)],
)
def test_training_goes_on(axes: tuple[int, ...], readers: str, foreach: bool, fused: bool, tmp_path: Path) -> None:
    all_fine(ranks.run(4, resume, str(tmp_path / "step"), axes, foreach, fused, readers))


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def mistakes(rank: int, folder: str) -> list[str]:
    saved = {"w": torch.ones(3), "epoch": 4, "harmful": Harmful()}
    dcp.save(saved, checkpoint_id=folder)
    source = {"a": {"w": torch.ones(3), "lr": 0.5}}
    found = []
    for state, checkpoint, options in (
        ({"w": torch.zeros(3), "epoch": 1, "loss": 2.0}, folder, {}),
        ({"w": torch.zeros(3), "harmful": 1}, folder, {"strict": False}),
        ({"w": torch.zeros(3), **({"epoch": 1} if rank else {})}, folder, {}),
        ({"w": torch.zeros(3, device="meta")}, folder, {}),
        ({"w": torch.zeros(4)}, folder, {"strict": False}),
        (nn.Linear(2, 2), folder, {}),
        ({"a": {"w": torch.zeros(3), "lr": 1.0}}, source if rank == 0 else {}, {"readers": "one"}),
        (
            {"a": {"w": torch.zeros(3), "lr": 1.0}, "b": 3},
            source if rank == 0 else {},
            {"readers": "one", "strict": False},
        ),
    ):
        try:
            report = epload.load_state(state, checkpoint, progress=False, **options)  # type: ignore[arg-type]
            found.append(f"{state} {report.missing_keys}")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
            if isinstance(state, dict) and not state["w"].is_meta:
                assert not state["w"].any(), "nothing has been changed"
    return found


def test_mistakes_and_dicts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = ranks.run(2, mistakes, str(tmp_path / "c"))
    assert first == second
    for text, start in zip(
        first,
        (
            "ModelMismatch: the checkpoint has no value for loss",
            "CheckpointError: the value of harmful cannot be loaded without executing",
            "ValueError: ranks 0 and 1 pass state dicts with different values besides tensors: epoch",
            "ValueError: w is on meta",
            "w has shape [3] in the checkpoint but [4] in the model",
            "TypeError: expected an nn.Module or a dict of tensors, got Linear",
            "{'a': {'w': tensor([1., 1., 1.]), 'lr': 0.5}} []",
            "{'a': {'w': tensor([1., 1., 1.]), 'lr': 0.5}, 'b': 3} ['b']",
        ),
        strict=True,
    ):
        assert start in text, text
    assert "executed" not in capfd.readouterr().out


def other_world(rank: int, folder: str) -> list[str]:
    """Three ranks read what four saved."""
    model, optimizer = build((dist.get_world_size(),), True, False, seed=2)
    states = get_state_dict(model, optimizer)
    state, same = ({"model": states[0], "optimizer": states[1]} for _ in range(2))
    reference = {name: each.clone() if isinstance(each, Tensor) else each for name, each in
                 dcp._nested_dict.flatten_state_dict(same)[0].items()}  # fmt: skip
    nested = dcp._nested_dict.unflatten_state_dict(reference, dcp._nested_dict.flatten_state_dict(same)[1])
    dcp.load(nested, checkpoint_id=folder)
    epload.load_state(state, folder, progress=False)
    found, expected = (dcp._nested_dict.flatten_state_dict(each)[0] for each in (state, nested))
    return differing(
        *({n: e.to_local() if isinstance(e, DTensor) else e for n, e in each.items()} for each in (found, expected))
    )


def save_for_others(rank: int, folder: str) -> None:
    model, optimizer = build((dist.get_world_size(),), True, False, seed=1)
    train(model, optimizer, range(2))
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)


def test_another_number_of_ranks_reads_as_dcp_does(tmp_path: Path) -> None:
    ranks.run(4, save_for_others, str(tmp_path / "c"))
    all_fine(ranks.run(3, other_world, str(tmp_path / "c")))
