"""``device=``: where plain tensors on meta go, and what is refused before anything moves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import epload
from epload import HierarchicalLoader, ManifestMismatch
from support import fakedev, ranks
from support.accelerator import DEVICE
from support.checks import all_fine
from support.on_ranks import on_ranks
from support.small_model import Net, meta_net, state_for, wrong

OTHER = f"{fakedev.NAME}:1"


def plain() -> nn.Module:
    with torch.device("meta"):
        return Net()


def refused(kind: type[Exception], part: str, model: nn.Module, device: object) -> list[str]:
    """Returns what is wrong if a load does not fail, or changes the model."""
    before = [tensor.detach().clone() for tensor in model.state_dict().values()]
    try:
        epload.load(model, state_for(2), device=device, progress=False)  # type: ignore[arg-type]
    except Exception as error:
        after = model.state_dict().values()
        same = all(
            a.device == b.device and (a.is_meta or torch.equal(a, b)) for a, b in zip(before, after, strict=True)
        )
        return [] if type(error) is kind and part in str(error) and same else [f"{device}: {same} {error!r}"]
    return [f"{device}: no error"]


def test_what_is_no_device_here() -> None:
    for kind, part, device in (
        (TypeError, "torch.device or its name, such as 'cuda:0', got 0", 0),
        (ValueError, "expected device to be the name of a device, such as 'cuda:0', got 'gpu'", "gpu"),
        (ValueError, "device='mps' asks for mps, but torch finds ", "mps"),
        (ValueError, "device='meta' asks for meta, but torch finds ", torch.device("meta")),
    ):
        assert refused(kind, part, plain(), device) == []
    for device in ("cpu", torch.device("cpu", 0), None):
        model = plain()
        epload.load(model, state_for(1), device=device)
        assert wrong(model, state_for(1)) == []


# ---- on ranks with an accelerator ----


def loaded(rank: int) -> list[str]:
    own, state = (DEVICE, OTHER)[rank], state_for(1)
    problems = []
    for device, where in ((own, own), (torch.device(own), own), (fakedev.NAME, DEVICE), ("cpu", "cpu"), (None, "cpu")):
        model = plain()
        epload.load(model, state, device=device, progress=False)
        problems += wrong(model, state, where=where)
    sharded = meta_net(where=DEVICE)
    epload.load(sharded, state, device=DEVICE, progress=False)
    problems += wrong(sharded, state, where=DEVICE)
    dist.group.WORLD.bound_device_id = torch.device(DEVICE)
    model = plain()
    epload.load(model, state, progress=False)
    return problems + wrong(model, state, where=DEVICE)


def rejected(rank: int) -> list[str]:
    partly = plain()
    partly.table = torch.zeros(5, 3)
    there = f"expected device='{DEVICE}' to be that of the model's tensors that have storage or a mesh, but "
    on_mesh = " is on a mesh of cpu; leave out device=, or move the model first"
    problems = refused(ValueError, there + "table is on cpu;", partly, DEVICE)
    problems += refused(ValueError, there, meta_net(), DEVICE) + refused(ValueError, on_mesh, meta_net(), DEVICE)
    problems += refused(ValueError, f"is on a mesh of {DEVICE};", meta_net(where=DEVICE), "cpu")
    problems += refused(ValueError, f"of {DEVICE} to {OTHER}, got '{fakedev.NAME}:2'", plain(), f"{fakedev.NAME}:2")
    problems += refused(ValueError, there, partly, DEVICE if rank == 1 else "cpu")  # the same error on every rank
    problems += refused(ManifestMismatch, f"device={fakedev.NAME} ", plain(), DEVICE if rank == 1 else "cpu")
    with HierarchicalLoader(progress=False) as loader:  # which keeps what it has read of the model
        model = plain()
        for _ in range(2):
            loader.load(model, state_for(1), device=DEVICE)
        with pytest.raises(ValueError, match="is on " + DEVICE):
            loader.load(model, state_for(2), device="cpu")
        with pytest.raises(ValueError, match="is on " + DEVICE):
            loader.load(model, state_for(2), device=OTHER)
    return problems + wrong(model, state_for(1), where=DEVICE)


@pytest.mark.parametrize("function", [loaded, rejected])
@pytest.mark.usefixtures("fake_device")
def test_on_an_accelerator(function: object) -> None:
    all_fine(ranks.run(2, function, setup=fakedev.setup))


def without_cpu_backend() -> str:
    fakedev.setup()
    return f"{fakedev.NAME}:fakeccl"


@pytest.mark.usefixtures("fake_device")
@on_ranks(2, setup=without_cpu_backend)
def test_a_group_for_accelerators_alone_says_where(rank: int) -> None:
    for device, where in ((None, DEVICE), ("cpu", "cpu")):
        model = plain()
        epload.load(model, state_for(1), device=device, progress=False)
        assert wrong(model, state_for(1), where=where) == []
