"""A first load makes what it needs on a device while it is planned."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import epload
from epload.transfer.device_pipe import DevicePipe
from support import fakedev, ranks
from support.accelerator import DEVICE

pytestmark = pytest.mark.usefixtures("fake_device")
VALUES = torch.arange(70_000.0).view(70, 1000)
make = DevicePipe.__init__


def prepares(rank: int, path: str, fails: bool) -> list[str]:
    """Loads twice. Returns the thread in which each pipe of the device was made."""
    made_by: list[str] = []

    def recorded(self: DevicePipe, *args: Any) -> None:
        made_by.append(threading.current_thread().name)
        if fails and len(made_by) == 1:
            raise RuntimeError("no memory")
        make(self, *args)

    model = nn.Linear(1000, 70, bias=False, device=DEVICE)
    with mock.patch.object(DevicePipe, "__init__", recorded), epload.HierarchicalLoader(progress=False) as loader:
        for _ in range(2):
            with torch.no_grad():
                model.weight.zero_()
            loader.load(model, path)
            assert torch.equal(model.weight.cpu(), VALUES)
    return made_by


@pytest.mark.parametrize(("fails", "expected"), [(False, ["epload-pipe"]), (True, ["epload-pipe", "MainThread"])])
def test_a_pipe_is_made_while_a_load_is_planned(fails: bool, expected: list[str], tmp_path: Path) -> None:
    save_file({"weight": VALUES}, tmp_path / "model.safetensors")
    setup = partial(fakedev.setup, "nccl")
    assert ranks.run(1, prepares, str(tmp_path / "model.safetensors"), fails, setup=setup) == [expected]
