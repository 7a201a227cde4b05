"""Models on a device are saved through its pipe."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import epload
from support import fakedev, ranks
from support.accelerator import DEVICE
from support.checks import all_fine
from support.synced_models import build, check, write

pytestmark = pytest.mark.usefixtures("fake_device")


def save(rank: int, folder: str) -> None:
    model = build("fsdp", dist.get_world_size(), where=DEVICE)
    write(model, 1)
    epload.save(model, f"{folder}/now")
    pending = epload.save_async(model, f"{folder}/later")
    write(model, 2)
    pending.wait()
    epload.save(model, f"{folder}/changes", base=f"{folder}/now")
    for name, version in (("now", 1), ("later", 1), ("changes", 2)):
        again = build("tp1", dist.get_world_size(), where=DEVICE if name == "changes" else "cpu")
        epload.load(again, f"{folder}/{name}", progress=False)
        check(again, version)


def test_models_on_a_device(tmp_path: Path) -> None:
    ranks.run(2, save, str(tmp_path), setup=partial(fakedev.setup, "hccl"))


def same_files(rank: int, folder: str) -> list[str]:
    """What a model on a device writes is what it writes on CPU, where regions are packed first; each layout, and converted."""
    problems = []
    for kind in ("plain", "fsdp", "tp0", "tp1"):
        for dtype in (None, torch.bfloat16):
            for where in ("cpu", DEVICE):
                model = build(kind, dist.get_world_size(), where=where)
                write(model, 3)
                path = f"{folder}/{kind}-{dtype}-{where[:3]}"
                epload.save(model, path, dtype=dtype, max_shard_bytes=20_000)
            dist.barrier()
            one, other = (Path(f"{folder}/{kind}-{dtype}-{where}") for where in ("cpu", DEVICE[:3]))
            names = sorted(each.name for each in one.iterdir())
            if names != sorted(each.name for each in other.iterdir()):
                problems.append(f"{kind}: other files")
            problems += [
                f"{kind}, {dtype}: {name} differs"
                for name in names
                if (one / name).read_bytes() != (other / name).read_bytes()
            ]
    return problems


def test_a_model_on_a_device_writes_the_same_files(tmp_path: Path) -> None:
    all_fine(ranks.run(2, same_files, str(tmp_path), setup=partial(fakedev.setup, "nccl")))
