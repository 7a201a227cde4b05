"""A rank that is stopped for a while in the middle of a load: the others wait in bounded memory, and the load is right."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from epload import HierarchicalLoader, Topology
from epload.planning import schedule
from epload.planning.waves import Wave
from epload.transfer.engine import Engine
from epload.transfer.shared_memory import BUFFERS
from measure import PeakMemory
from support.on_ranks import on_ranks

NODES = [[0, 1], [2, 3]]
BUCKET = 4 << 20
LAYERS, WIDTH = 72, 768  # 170 MB of float32
STOP_AT = 12  # waves that the rank has unpacked when it stops
SECONDS = 1.5  # for which it is stopped once all others have come to a halt or the load is over
SLACK = 100 << 20  # for sockets, threads, the manifest


def waves_unpacked(folder: Path) -> list[int]:
    return [(folder / f"waves-{rank}").stat().st_size for rank in range(4)]


@contextmanager
def stopping(rank: int, victim: int, folder: Path) -> Iterator[None]:
    """The victim stops itself when it comes to wave STOP_AT; every rank writes a byte for each wave."""
    check = Engine._check

    def noted(self: Engine, wave: Wave) -> bool:
        if threading.current_thread() is threading.main_thread():  # unpacking, not relaying
            os.truncate(folder / f"waves-{rank}", wave.index)
            if rank == victim and wave.index == STOP_AT:
                os.kill(os.getpid(), signal.SIGSTOP)
        return check(self, wave)

    with mock.patch.object(Engine, "_check", noted):
        yield


def wake(victim: int, folder: Path, seen: list[list[int]]) -> None:
    """Runs next to another rank's load: lets the victim go on when the others have not moved for a while."""
    pid = int((folder / f"pid-{victim}").read_text())
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        time.sleep(0.01)
    before: list[int] = []
    while before != waves_unpacked(folder) or min(before) < STOP_AT:
        before = waves_unpacked(folder)
        time.sleep(SECONDS)
    seen.append(before)
    os.kill(pid, signal.SIGCONT)


def save_layers(tmp_path: Path, *_: Any) -> None:
    save_file({f"{i}.weight": torch.full((WIDTH, WIDTH), i + 1.0) for i in range(LAYERS)}, tmp_path / "model.safetensors")


@pytest.mark.parametrize(("readers", "victim"), [("one", 0), ("partitioned", 1)])
@on_ranks(4, save_layers)
def test_others_wait_for_a_stopped_rank(rank: int, tmp_path: Path, readers: str, victim: int) -> None:
    schedule.MIN_PART_BYTES = 1 << 20  # four readers share a wave
    (tmp_path / f"pid-{rank}").write_text(str(os.getpid()))
    (tmp_path / f"waves-{rank}").touch()
    dist.barrier()
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    for layer in (*model, model):
        fully_shard(layer)
    topology = Topology.from_nodes(NODES)
    loader = HierarchicalLoader(topology, readers=readers, bucket_bytes=BUCKET, timeout=60, progress=False)
    seen: list[list[int]] = []
    waker = threading.Thread(target=wake, args=(victim, tmp_path, seen))
    if rank == (victim + 1) % 4:
        waker.start()
    with PeakMemory() as memory, stopping(rank, victim, tmp_path):
        loader.load(model, tmp_path / "model.safetensors")
    if rank == (victim + 1) % 4:
        waker.join()
        (waves,) = seen
        neighbors = next(node for node in NODES if victim in node)
        assert waves[victim] == STOP_AT
        assert all(waves[other] < STOP_AT + BUFFERS for other in neighbors), "the other rank of its node did not wait"
        assert all(STOP_AT <= count <= STOP_AT + 3 * BUFFERS for count in waves), f"other nodes did not wait: {waves}"
    shards = sum(parameter.to_local().nbytes for parameter in model.parameters())
    assert memory.above <= shards + BUFFERS * BUCKET + SLACK
    assert all((parameter.to_local() == i + 1).all() for i, parameter in enumerate(model.parameters()))
