"""A job that reloads at every step for weeks: loads take bounded memory and leave nothing behind, also those that are refused."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from epload import HierarchicalLoader, LoadError, Topology
from measure import PeakMemory
from support import ranks
from support.accelerator import run_on
from support.checks import all_fine
from support.small_model import BUCKET, NODES, meta_net, state_for, wrong

WARM, LOADS = 8, 12


def threads(at_most: int, seconds: float) -> int:
    """Counts them, again until there are few enough, as the system lists a thread a little longer than Python."""
    until = time.monotonic() + seconds
    while (number := len(os.listdir("/proc/self/task"))) > at_most and time.monotonic() < until:
        time.sleep(0.02)
    return number


def resources(before: dict[str, int]) -> dict[str, int]:
    """Counts the resources of this process."""
    assert dist.group.WORLD is not None
    gc.collect()
    sys._clear_type_cache()  # it keeps names of attributes, more and more until it is full
    return {
        "threads": threads(before["threads"], 30.0) if before else threads(0, 0.1),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "groups": len(dist.distributed_c10d._world.pg_names),
        "keys of the store": dist.group.WORLD.get_group_store().num_keys(),
        "blocks of Python's memory": sys.getallocatedblocks(),
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
    }


def repeated(rank: int, device: str, ways: list[dict[str, Any]], refused: bool, anew: bool, folder: Path) -> list[str]:
    topology = Topology.from_nodes(NODES)
    model = meta_net(where=device)
    # A rank posts heartbeats only in loads that last a second: its key is there from the start, so that it is no more after them.
    topology.control.store.set(f"heartbeat/{rank}", "{}")

    def made() -> list[HierarchicalLoader]:
        return [HierarchicalLoader(topology, bucket_bytes=BUCKET, **options) for options in ways]

    loaders = made()
    loaders[0].load(model, folder / "0.safetensors")

    def loads(count: int, before: dict[str, int]) -> dict[str, int]:
        for turn in range(count):
            for loader in made() if anew else loaders:
                loader.load(model, folder / f"{turn % 2}.safetensors")
                if refused:
                    with pytest.raises(LoadError, match="missing"):
                        loader.load(model, folder / "short.safetensors")
        dist.barrier()  # keys are counted while nobody writes
        counts = resources(before)
        dist.barrier()
        return counts

    before = loads(WARM, {})
    after = loads(LOADS, before)
    # The last two vary: allocators and interpreters keep some of what was freed.
    problems = [
        f"{what}: {after[what] - number} more, of {number}, after {LOADS} loads"
        for what, number in before.items()
        if after[what] - number >= (LOADS if what in ("blocks of Python's memory", "mappings") else 1)
    ]
    return problems + wrong(model, state_for(1), where=device)


@pytest.mark.parametrize(
    ("place", "ways", "refused", "anew"),
    [
        ("cpu", [{"timeout": 60}, {"readers": "partitioned", "algorithm": "striped", "timeout": 90}], True, False),
        ("cpu", [{"readers": "one", "verify": True}, {}], False, True), ("nccl", [{}], True, False),
        ("hccl", [{"readers": "partitioned", "algorithm": "striped", "verify": True}], False, False),
    ],
)  # fmt: skip
def test_loads_leave_nothing_behind(place: str, ways: Any, refused: bool, anew: bool, tmp_path: Path) -> None:
    """``refused``: each load is followed by one that is refused. ``anew``: each is of a new loader, as ``epload.load``'s are."""
    short = state_for(0)
    short.popitem()
    for name, state in {"0": state_for(0), "1": state_for(1), "short": short}.items():
        save_file(state, tmp_path / f"{name}.safetensors")
    all_fine(run_on(place, 4, repeated, ways, refused, anew, tmp_path))


LARGE_BUCKET = 8 << 20
LAYERS, WIDTH = 96, 768  # 226 MB of float32


def load_and_watch(rank: int, path: str) -> None:
    """Compares the most memory above the start with this rank's shards and two buckets."""
    for readers in ("one", "per_node"):
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        for layer in model:
            fully_shard(layer)
        topology = Topology.from_nodes(NODES)
        loader = HierarchicalLoader(topology, readers=readers, bucket_bytes=LARGE_BUCKET, progress=False)
        with PeakMemory() as memory:
            report = loader.load(model, path)
        shards = sum(p.to_local().nbytes for p in model.parameters())
        assert shards == LAYERS * WIDTH * WIDTH  # a quarter of 4 bytes an element
        assert report.peak_staging <= 2 * LARGE_BUCKET
        assert memory.above <= shards + 2 * LARGE_BUCKET + (100 << 20)
        loader.close()
        del model
        gc.collect()


def test_transformers_43749_45649_ms_swift_9980_pytorch_149640_peak_memory_is_shards_and_two_buckets(
    tmp_path: Path,
) -> None:
    state = {f"{i}.weight": torch.full((WIDTH, WIDTH), float(i)) for i in range(LAYERS)}
    save_file(state, tmp_path / "model.safetensors")
    ranks.run(4, load_and_watch, str(tmp_path))
