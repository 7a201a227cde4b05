"""A job that reloads at every step for weeks: loads leave nothing behind, neither those that fill a model nor those refused."""

from __future__ import annotations

import gc
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import save_file

from epload import HierarchicalLoader, LoadError, Topology
from support import fakedev, ranks
from support.checks import all_fine
from support.small_model import BUCKET, NODES, meta_net, state_for, wrong

WARM, LOADS = 10, 20
WAYS: dict[str, list[dict[str, Any]]] = {
    "auto": [{}],
    "one, proven": [{"readers": "one", "verify": True}],
    "partitioned, striped, checked": [{"readers": "partitioned", "algorithm": "striped", "verify": True}],
    "two timeouts": [{"timeout": 60}, {"timeout": 90}],
}


def threads() -> int:
    time.sleep(0.02)  # the system lists a thread a little longer than Python
    return len(os.listdir("/proc/self/task"))


def resources() -> dict[str, int]:
    """What this process holds."""
    assert dist.group.WORLD is not None
    gc.collect()
    sys._clear_type_cache()  # it keeps names of attributes, more and more until it is full
    return {
        "threads": min(threads() for _ in range(5)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "groups": len(dist.distributed_c10d._world.pg_names),
        "keys of the store": dist.group.WORLD.get_group_store().num_keys(),
        "blocks of Python's memory": sys.getallocatedblocks(),
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
    }


def repeated(
    rank: int, way: str, folder: Path, refused: bool = False, anew: bool = False, where: str = "cpu"
) -> list[str]:
    topology = Topology.from_nodes(NODES)
    model = meta_net(where=where)

    def made() -> list[HierarchicalLoader]:
        return [HierarchicalLoader(topology, bucket_bytes=BUCKET, **options) for options in WAYS[way]]

    loaders = made()
    loaders[0].load(model, folder / "0.safetensors")

    def loads(count: int) -> dict[str, int]:
        for turn in range(count):
            for loader in made() if anew else loaders:
                loader.load(model, folder / f"{turn % 2}.safetensors")
                if refused:
                    with pytest.raises(LoadError, match="missing"):
                        loader.load(model, folder / "short.safetensors")
        dist.barrier()  # keys are counted while nobody writes
        found = resources()
        dist.barrier()
        return found

    before, after = loads(WARM), loads(LOADS)
    # The last two vary: allocators and interpreters keep some of what was freed.
    problems = [
        f"{what}: {after[what] - number} more, of {number}, after {LOADS} loads"
        for what, number in before.items()
        if after[what] - number >= (LOADS if what in ("blocks of Python's memory", "mappings") else 1)
    ]
    return problems + wrong(model, state_for(1), where=where)


def write(folder: Path) -> None:
    for number in (0, 1):
        save_file(state_for(number), folder / f"{number}.safetensors")
    short = state_for(0)
    short.popitem()
    save_file(short, folder / "short.safetensors")


@pytest.mark.parametrize(
    ("way", "refused", "anew"),
    [
        ("partitioned, striped, checked", False, False),
        ("two timeouts", True, False),
        ("one, proven", False, True),
        ("auto", True, True),
    ],
)
def test_loads_leave_nothing_behind(way: str, refused: bool, anew: bool, tmp_path: Path) -> None:
    """``refused``: each load is followed by one that is refused. ``anew``: each is of a new loader, as ``epload.load``'s are."""
    write(tmp_path)
    all_fine(ranks.run(4, repeated, way, tmp_path, refused, anew))


@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize(
    ("way", "semantics"),
    [("auto", "nccl"), ("partitioned, striped, checked", "hccl")],
)
def test_loads_into_a_model_on_a_device_leave_nothing_behind(way: str, semantics: str, tmp_path: Path) -> None:
    write(tmp_path)
    setup = partial(fakedev.setup, semantics)
    all_fine(ranks.run(4, repeated, way, tmp_path, False, False, f"{fakedev.NAME}:0", setup=setup))
