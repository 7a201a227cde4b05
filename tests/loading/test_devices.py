"""``device=``: where plain tensors on meta go, and what is refused before anything moves. And loads, saves and syncs of a caller
whose default device is not CPU, as set by ``torch.set_default_device``, and loads of one in inference mode."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import epload
from epload import HierarchicalLoader
from epload.integrations.dcp import StorageReader
from epload.transfer.device_pipe import DevicePipe
from support import fakedev
from support.accelerator import DEVICE
from support.failures import error_of
from support.jobs import Job, Meeting, run
from support.models import on_meta
from support.on_ranks import on_ranks
from support.small_model import Net, meta_net, state_for, wrong

pytestmark = pytest.mark.usefixtures("fake_device")
OTHER = f"{fakedev.NAME}:1"
load = partial(epload.load, progress=False)
setup = partial(fakedev.setup, "nccl")


def refused(kind: type[Exception], part: str, model: nn.Module, device: Any) -> None:
    """The load fails, and does not change the model."""
    before = [tensor.detach().clone() for tensor in model.state_dict().values()]
    text = error_of(partial(load, model, state_for(2), device=device))
    assert text.startswith(kind.__name__), (device, text)
    assert part in text, (device, text)
    for a, b in zip(before, model.state_dict().values(), strict=True):
        assert a.device == b.device, device
        assert a.is_meta or torch.equal(a, b), device


def test_what_is_no_device_here() -> None:
    for kind, part, device in (
        (TypeError, "torch.device or its name, such as 'cuda:0', got 0", 0),
        (ValueError, "expected device to be the name of a device, such as 'cuda:0', got 'gpu'", "gpu"),
        (ValueError, "device='mps' asks for mps, but torch finds ", "mps"),
        (ValueError, "device='meta' asks for meta, but torch finds ", torch.device("meta")),
    ):
        refused(kind, part, on_meta(Net), device)
    for device in ("cpu", torch.device("cpu", 0), None):
        model = on_meta(Net)
        epload.load(model, state_for(1), device=device)
        assert wrong(model, state_for(1)) == []


# ---- on ranks with an accelerator ----


@on_ranks(2, setup=fakedev.setup)
def test_where_tensors_on_meta_go(rank: int) -> None:
    own, state = (DEVICE, OTHER)[rank], state_for(1)
    for device, where in ((own, own), (torch.device(own), own), (fakedev.NAME, DEVICE), ("cpu", "cpu"), (None, "cpu")):
        model = on_meta(Net)
        load(model, state, device=device)
        assert wrong(model, state, where=where) == []
    sharded = meta_net(where=DEVICE)
    load(sharded, state, device=DEVICE)
    assert wrong(sharded, state, where=DEVICE) == []
    dist.group.WORLD.bound_device_id = torch.device(DEVICE)
    model = on_meta(Net)
    load(model, state)
    assert wrong(model, state, where=DEVICE) == []


@on_ranks(2, setup=fakedev.setup)
def test_another_device_than_the_models_is_refused(rank: int) -> None:
    partly = on_meta(Net)
    partly.table = torch.zeros(5, 3)
    there = f"expected device='{DEVICE}' to be that of the model's tensors that have storage or a mesh, but "
    on_mesh = " is on a mesh of cpu; leave out device=, or move the model first"
    refused(ValueError, there + "table is on cpu;", partly, DEVICE)
    refused(ValueError, there, meta_net(), DEVICE)
    refused(ValueError, on_mesh, meta_net(), DEVICE)
    refused(ValueError, f"is on a mesh of {DEVICE};", meta_net(where=DEVICE), "cpu")
    refused(ValueError, f"of {DEVICE} to {OTHER}, got '{fakedev.NAME}:2'", on_meta(Net), f"{fakedev.NAME}:2")
    refused(ValueError, there, partly, DEVICE if rank == 1 else "cpu")  # the same error on every rank
    refused(epload.ManifestMismatch, f"device={fakedev.NAME} ", on_meta(Net), DEVICE if rank == 1 else "cpu")
    with HierarchicalLoader(progress=False) as loader:  # which keeps what it has read of the model
        model = on_meta(Net)
        for _ in range(2):
            loader.load(model, state_for(1), device=DEVICE)
        for device in ("cpu", OTHER):
            with pytest.raises(ValueError, match="is on " + DEVICE):
                loader.load(model, state_for(2), device=device)
    assert wrong(model, state_for(1), where=DEVICE) == []


def without_cpu_backend() -> str:
    fakedev.setup()
    return f"{fakedev.NAME}:fakeccl"


@on_ranks(2, setup=without_cpu_backend)
def test_a_group_for_accelerators_alone_says_where(rank: int) -> None:
    for device, where in ((None, DEVICE), ("cpu", "cpu")):
        model = on_meta(Net)
        load(model, state_for(1), device=device)
        assert wrong(model, state_for(1), where=where) == []


@on_ranks(1, setup=setup)
def test_what_cannot_be_made_while_a_load_is_planned_is_made_in_it(rank: int) -> None:
    """A first load makes what it needs on a device while it is planned, in another thread. Where that fails, it tries again."""
    made_by: list[str] = []
    make: Callable[..., None] = DevicePipe.__init__

    def recorded(self: DevicePipe, *args: Any) -> None:
        made_by.append(threading.current_thread().name)
        if len(made_by) == 1:
            raise RuntimeError("no memory")
        make(self, *args)

    model, values = nn.Linear(1000, 70, bias=False, device=DEVICE), torch.arange(70_000.0).view(70, 1000)
    with mock.patch.object(DevicePipe, "__init__", recorded), HierarchicalLoader(progress=False) as loader:
        for _ in range(2):
            nn.init.zeros_(model.weight)
            loader.load(model, {"weight": values})
            assert torch.equal(model.weight.cpu(), values)
    assert made_by == ["epload-pipe", "MainThread"]


# ---- default devices, and inference mode ----


def state(number: int) -> dict[str, Tensor]:
    a, b = torch.arange(3000.0, device="cpu") + number, torch.arange(50_000.0, device="cpu") - number
    return {"a": a, "b": b.view(50, 1000)}


def save_states(folder: Path, *parameters: str) -> None:
    for number in range(3):
        save_file(state(number), folder / f"{number}.safetensors")
    dcp.save(state(1), checkpoint_id=folder / "dcp", no_dist=True)


class Model(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        for name, tensor in state(0).items():
            self.register_parameter(name, nn.Parameter(torch.zeros_like(tensor, device=device)))


def check(found: dict[str, Tensor], number: int, what: str) -> None:
    for name, tensor in state(number).items():
        assert torch.equal(found[name].detach().cpu(), tensor.to(found[name].dtype)), f"{what}: {name}"


def loads(folder: Path, device: str) -> None:
    for number, readers in enumerate(["every", "one", "per_node"]):
        for what, source in (("file", folder / f"{number}.safetensors"), ("dict", state(number))):
            model = Model(device)
            load(model, source, readers=readers)
            check(model.state_dict(), number, f"{readers} from a {what}")


@pytest.mark.parametrize("device", ["cpu", DEVICE])
@on_ranks(2, save_states, setup=setup)
def test_loads_in_inference_mode(rank: int, tmp_path: Path, device: str) -> None:
    with torch.inference_mode():
        loads(tmp_path, device)


@pytest.mark.parametrize(("default", "device"), [(DEVICE, "cpu"), ("meta", DEVICE)])
@on_ranks(2, save_states, setup=setup)
def test_loads_and_saves(rank: int, tmp_path: Path, default: str, device: str) -> None:
    torch.set_default_device(default)
    loads(tmp_path, device)
    with torch.device("meta"):
        model = Model("meta")
        load(model, tmp_path / "1.safetensors")
    check(model.state_dict(), 1, "from meta")
    loaded = {name: torch.zeros_like(tensor, device=device) for name, tensor in state(2).items()}
    epload.load_state(loaded, tmp_path / "2.safetensors", progress=False)
    check(loaded, 2, "state")
    with closing(epload.Checkpoint.open(tmp_path / "dcp")) as opened:
        assert {*opened.manifest.names} == {*state(1)}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "1.safetensors"), no_dist=True)
    check(loaded, 1, "by DCP")
    epload.save(model, tmp_path / "saved")
    epload.save_async(model, tmp_path / "saved-later").wait()
    if rank == 0:
        epload.convert(tmp_path / "saved", tmp_path / "converted", dtype=torch.bfloat16)
        for name in ("saved", "saved-later", "converted"):
            check(load_file(next((tmp_path / name).glob("*.safetensors"))), 1, name)
    assert torch.get_default_device() == torch.device(default)


def send(rank: int, meeting: Meeting) -> None:
    torch.set_default_device(DEVICE)
    model = Model(DEVICE)
    with epload.WeightSender(model, ("127.0.0.1", 0), receivers=3, timeout=60) as sender:
        meeting.say("address", sender.address)
        for number in (1, 2):
            model.load_state_dict(state(number))
            sender.send_weights(number)


def receive(rank: int, meeting: Meeting, stage: str) -> None:
    """``stage``: "none" for an engine, whose functions make tensors on the default device, as those of users do."""
    torch.set_default_device(DEVICE)
    model = Model(DEVICE)

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        assert torch.zeros(1).device == torch.device(DEVICE)
        for name, tensor in weights:
            model.get_parameter(name).detach().copy_(tensor)

    target = epload.EngineModel(model, load_weights) if stage == "none" else model
    with epload.WeightReceiver(target, meeting.hear("address"), timeout=60, stage=stage) as receiver:
        for number in (1, 2):
            receiver.receive_weights(number)
            if stage != "none":
                receiver.commit()
    check(model.state_dict(), 2, stage)


def test_syncs() -> None:
    run([Job(1, send, setup=setup), *(Job(1, receive, (stage,), setup=setup) for stage in ("none", "host", "device"))])
