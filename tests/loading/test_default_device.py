"""Loads, saves and syncs of a caller whose default device is not CPU, as set by ``torch.set_default_device``, and loads of one in
inference mode."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import epload
from support import fakedev, ranks
from support.accelerator import DEVICE
from support.checks import all_fine
from support.jobs import Job, Meeting, run

pytestmark = pytest.mark.usefixtures("fake_device")

setup = partial(fakedev.setup, "nccl")


def state(number: int) -> dict[str, Tensor]:
    a, b = torch.arange(3000.0, device="cpu") + number, torch.arange(50_000.0, device="cpu") - number
    return {"a": a, "b": b.view(50, 1000)}


class Model(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        for name, tensor in state(0).items():
            self.register_parameter(name, nn.Parameter(torch.zeros_like(tensor, device=device)))


def wrong(found: dict[str, Tensor], number: int, what: str) -> list[str]:
    return [
        f"{what}: {name}"
        for name, tensor in state(number).items()
        if not torch.equal(found[name].detach().cpu(), tensor.to(found[name].dtype))
    ]


def loads(folder: Path, device: str) -> list[str]:
    problems = []
    for number, readers in enumerate(["every", "one", "per_node"]):
        for what, source in (("file", folder / f"{number}.safetensors"), ("dict", state(number))):
            model = Model(device)
            epload.load(model, source, readers=readers, progress=False)
            problems += wrong(model.state_dict(), number, f"{readers} from a {what}")
    return problems


def in_inference_mode(rank: int, folder: Path, device: str) -> list[str]:
    with torch.inference_mode():
        return loads(folder, device)


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_loads_in_inference_mode(device: str, tmp_path: Path) -> None:
    for number in range(3):
        save_file(state(number), tmp_path / f"{number}.safetensors")
    all_fine(ranks.run(2, in_inference_mode, tmp_path, device, setup=setup))


def everything(rank: int, folder: Path, default: str, device: str) -> None:
    torch.set_default_device(default)
    assert loads(folder, device) == []
    with torch.device("meta"):
        model = Model("meta")
        epload.load(model, folder / "1.safetensors", progress=False)
    assert wrong(model.state_dict(), 1, "from meta") == []
    loaded = {name: torch.zeros_like(tensor, device=device) for name, tensor in state(2).items()}
    epload.load_state(loaded, folder / "2.safetensors", progress=False)
    assert wrong(loaded, 2, "state") == []
    epload.save(model, folder / "saved")
    epload.save_async(model, folder / "saved-later").wait()
    if rank == 0:
        epload.convert(folder / "saved", folder / "converted", dtype=torch.bfloat16)
        for name in ("saved", "saved-later", "converted"):
            assert wrong(load_file(next((folder / name).glob("*.safetensors"))), 1, name) == []
    assert torch.get_default_device() == torch.device(default), f"the default device is {torch.get_default_device()}"


@pytest.mark.parametrize(("default", "device"), [(DEVICE, "cpu"), ("meta", DEVICE)])
def test_loads_and_saves(default: str, device: str, tmp_path: Path) -> None:
    for number in range(3):
        save_file(state(number), tmp_path / f"{number}.safetensors")
    ranks.run(2, everything, tmp_path, default, device, setup=setup)


def send(rank: int, meeting: Meeting) -> None:
    torch.set_default_device(DEVICE)
    model = Model(DEVICE)
    with epload.WeightSender(model, ("127.0.0.1", 0), receivers=3, timeout=60) as sender:
        meeting.say("address", sender.address)
        for number in (1, 2):
            model.load_state_dict(state(number))
            sender.send_weights(number)


def receive(rank: int, meeting: Meeting, stage: str) -> list[str]:
    """``stage``: "none" for an engine, whose functions make tensors on the default device, as those of users do."""
    torch.set_default_device(DEVICE)
    model = Model(DEVICE)
    made_on = []

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        made_on.append(torch.zeros(1).device)
        for name, tensor in weights:
            model.get_parameter(name).detach().copy_(tensor)

    target = epload.EngineModel(model, load_weights) if stage == "none" else model
    with epload.WeightReceiver(target, meeting.hear("address"), timeout=60, stage=stage) as receiver:
        for number in (1, 2):
            receiver.receive_weights(number)
            if stage != "none":
                receiver.commit()
    problems = wrong(model.state_dict(), 2, stage)
    return problems + [f"made on {device}" for device in made_on if device != torch.device(DEVICE)]


def test_syncs() -> None:
    receivers = [Job(1, receive, (stage,), setup=setup) for stage in ("none", "host", "device")]
    all_fine([problems for job in run([Job(1, send, setup=setup), *receivers])[1:] for problems in job])
