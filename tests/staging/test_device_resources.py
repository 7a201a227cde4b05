"""A loader makes what it keeps on a device while the load is planned."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from epload.staging import device_resources
from epload.staging.device import StagingNeeds
from epload.staging.device_pipe import DevicePipe
from epload.staging.device_resources import DeviceResources
from support import fakedev, ranks
from support.checks import all_fine

pytestmark = pytest.mark.usefixtures("fake_device")


def prepares(rank: int) -> list[str]:
    device = torch.device("fakedev:1")
    torch.accelerator.set_device_index(device)
    made: list[Any] = []
    of = DevicePipe.of
    wrong = []

    def counted(*args: Any) -> DevicePipe:
        made.append(of(*args))
        return made[-1]

    resources = DeviceResources(None)
    with mock.patch.object(device_resources.DevicePipe, "of", counted):
        resources.prepare(device, 1)
        resources.prepare(device, 1)
        staging = resources.reserve(StagingNeeds(device, 4096, 1))
        resources.prepare(device, 1)
    if [*map(id, made)] != [id(staging.pipe)] * 2:
        wrong.append(f"expected one pipe, made once by the thread and taken once, got {made}")
    if fakedev.contexts() != [1]:
        wrong.append(f"contexts on {fakedev.contexts()}")
    with mock.patch.object(device_resources.DevicePipe, "of", side_effect=RuntimeError("no memory")):
        resources.forget()
        resources.prepare(device, 1)
        try:
            resources.reserve(StagingNeeds(device, 4096, 1))
            wrong.append("an error of the pipe is lost")
        except RuntimeError as error:
            wrong += [str(error)] * ("no memory" not in str(error))
    resources.prepare(device, 1)
    resources.forget()
    if resources.staging is not None:
        wrong.append("staging is kept")
    return wrong


def test_a_pipe_is_made_beforehand() -> None:
    all_fine(ranks.run(1, prepares, setup=partial(fakedev.setup, "nccl")))
