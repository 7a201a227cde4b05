"""Loads, saves and syncs of a caller whose default device is not CPU, as set by ``torch.set_default_device``."""

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
    return {
        "a": torch.arange(3000.0, device="cpu") + number,
        "b": torch.arange(50_000.0, device="cpu").view(50, 1000) - number,
    }


class Model(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        for name, tensor in state(0).items():
            self.register_parameter(name, nn.Parameter(torch.zeros_like(tensor, device=device)))


def wrong(model: nn.Module, number: int, what: str) -> list[str]:
    found = {name: tensor.detach().cpu() for name, tensor in model.named_parameters()}
    return [f"{what}: {name}" for name, tensor in state(number).items() if not torch.equal(found[name], tensor)]


def everything(rank: int, folder: Path, default: str, device: str) -> list[str]:
    problems = []
    torch.set_default_device(default)
    for number, readers in enumerate(["every", "one", "per_node"]):
        for what, source in (("file", folder / f"{number}.safetensors"), ("dict", state(number))):
            model = Model(device)
            epload.load(model, source, readers=readers, progress=False)
            problems += wrong(model, number, f"{readers} from a {what}")
    with torch.device("meta"):
        model = Model("meta")
        epload.load(model, folder / "1.safetensors", progress=False)
    problems += wrong(model, 1, "from meta")
    loaded = {name: torch.zeros_like(tensor, device=device) for name, tensor in state(2).items()}
    epload.load_state(loaded, folder / "2.safetensors", progress=False)
    problems += [f"state: {name}" for name, tensor in state(2).items() if not torch.equal(loaded[name].cpu(), tensor)]
    model = Model(device)
    epload.load(model, folder / "0.safetensors", progress=False)
    epload.save(model, folder / "saved")
    epload.save_async(model, folder / "saved-later").wait()
    if rank == 0:
        epload.convert(folder / "saved", folder / "converted", dtype=torch.bfloat16)
        for name in ("saved", "saved-later", "converted"):
            found = load_file(next((folder / name).glob("*.safetensors")))
            expected = {key: tensor.to(found[key].dtype) for key, tensor in state(0).items()}
            problems += [
                f"{name}: {key}" for key, tensor in expected.items() if not torch.equal(found[key].cpu(), tensor)
            ]
    if torch.get_default_device() != torch.device(default):
        problems.append(f"the default device is {torch.get_default_device()}")
    return problems


@pytest.mark.parametrize(("default", "device"), [(DEVICE, "cpu"), ("meta", DEVICE)])
def test_loads_and_saves(default: str, device: str, tmp_path: Path) -> None:
    for number in range(3):
        save_file(state(number), tmp_path / f"{number}.safetensors")
    all_fine(ranks.run(2, everything, tmp_path, default, device, setup=setup))


def send(rank: int, meeting: Meeting) -> None:
    torch.set_default_device(DEVICE)
    model = Model(DEVICE)
    with epload.WeightSender(model, ("127.0.0.1", 0), receivers=4, timeout=60) as sender:
        meeting.say("address", sender.address)
        for number in (1, 2):
            with torch.no_grad():
                for name, tensor in state(number).items():
                    model.get_parameter(name).copy_(tensor)
            sender.send_weights(number)


class Asks(epload.EngineModel):
    """An engine whose functions make tensors on the default device, as those of users do."""

    def finish(self) -> None:
        self.made_on = torch.zeros(1).device


def receive_into_an_engine(rank: int, meeting: Meeting) -> list[str]:
    torch.set_default_device(DEVICE)
    model = Model(DEVICE)

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            model.get_parameter(name).detach().copy_(tensor)

    target = Asks(model, load_weights)
    with epload.WeightReceiver(target, meeting.hear("address"), timeout=60, stage="none") as receiver:
        for number in (1, 2):
            receiver.receive_weights(number)
    return wrong(model, 2, "engine") + [f"made on {target.made_on}"] * (target.made_on != torch.device(DEVICE))


def receive(rank: int, meeting: Meeting, stage: str) -> list[str]:
    torch.set_default_device(DEVICE)
    problems = []
    model = Model(DEVICE)
    target: nn.Module | None = model if stage else None
    with epload.WeightReceiver(target, meeting.hear("address"), timeout=60, stage=stage or "host") as receiver:
        for number in (1, 2):
            receiver.receive_weights(number)
            if stage:
                receiver.commit()
                problems += wrong(model, number, stage)
            else:
                found = dict(receiver.tensors())
                problems += [
                    f"full: {key}" for key, tensor in state(number).items() if not torch.equal(found[key], tensor)
                ]
    return problems


def test_syncs() -> None:
    jobs = [
        Job(1, send, setup=setup),
        Job(1, receive_into_an_engine, setup=setup),
        *(Job(1, receive, (stage,), setup=setup) for stage in ("host", "device", "")),
    ]
    all_fine([problems for job in run(jobs)[1:] for problems in job])
