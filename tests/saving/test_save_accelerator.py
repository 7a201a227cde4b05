"""Models on a device are saved through host memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

import epload
from support import fakedev, ranks
from support.accelerator import DEVICE, SEMANTICS
from support.synced_models import build, check, write

pytestmark = pytest.mark.usefixtures("fake_device")


def save(rank: int, folder: str) -> None:
    model = build("fsdp", dist.get_world_size(), where=DEVICE)
    write(model, 1)
    epload.save(model, f"{folder}/now")
    pending = epload.save_async(model, f"{folder}/later")
    write(model, 2)
    pending.wait()
    for name in ("now", "later"):
        again = build("tp1", dist.get_world_size())
        epload.load(again, f"{folder}/{name}", progress=False)
        check(again, 1)


@SEMANTICS
def test_models_on_a_device(semantics: str, tmp_path: Path) -> None:
    ranks.run(2, save, str(tmp_path), setup=partial(fakedev.setup, semantics))
