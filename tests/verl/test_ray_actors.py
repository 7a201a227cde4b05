"""Ranks that are Ray actors: the environment is set by hand, groups are made inside the actors, and one actor is killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

import epload
from support.small_model import meta_net, state_for, wrong

EXAMPLES = Path(__file__).parents[2] / "examples"
WORLD, VICTIM = 4, 2
TIMEOUT = 60.0


class Held(epload.Checkpoint):
    """A state dict that cannot be read until a file is there. Another file says that reading has begun."""

    def __init__(self, state: dict[str, Tensor], folder: Path) -> None:
        self._inner = epload.Checkpoint.open(state)
        self._folder = folder

    @property
    def manifest(self) -> epload.Manifest:
        return self._inner.manifest

    def fill(self, bucket: Tensor, pieces: Sequence[epload.Piece]) -> None:
        (self._folder / "reading").touch()
        wait_for(self._folder / "killed")
        self._inner.fill(bucket, pieces)


def wait_for(path: Path, exists: bool = True) -> None:
    until = time.monotonic() + TIMEOUT
    while path.exists() != exists:
        assert time.monotonic() < until, f"{path} did not {'appear' if exists else 'go'}"
        time.sleep(0.02)


@ray.remote(num_cpus=0)
class Rank:
    def address(self) -> tuple[str, int]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()

    def join(self, rank: int, host: str, port: int) -> int:
        """Returns the process."""
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
        dist.init_process_group("gloo")
        return os.getpid()

    def load(self, path: Path) -> list[str]:
        """What is wrong, bit for bit, in this rank's shards."""
        model = meta_net()
        for readers in ("every", "one", "partitioned"):
            epload.load(model, path, readers=readers, timeout=TIMEOUT, progress=False)
            if problems := wrong(model, state_for(1)):
                return problems
            for parameter in model.parameters():
                parameter.data.zero_()
        return [] if wrong(model, state_for(1)) else ["a zeroed model passes"]

    def load_held(self, folder: Path) -> None:
        source = Held(state_for(1), folder) if dist.get_rank() == 0 else None
        epload.load(meta_net(), source, readers="one", timeout=TIMEOUT, progress=False)


def test_actors_load_bit_for_bit_and_all_hear_of_a_killed_one(cluster: str, tmp_path: Path) -> None:
    save_file(state_for(1), tmp_path / "model.safetensors")
    actors: list[Any] = [Rank.remote() for _ in range(WORLD)]
    host, port = ray.get(actors[0].address.remote(), timeout=TIMEOUT)
    joining = [actor.join.remote(rank, host, port) for rank, actor in enumerate(actors)]
    processes = ray.get(joining, timeout=TIMEOUT)
    assert ray.get([actor.load.remote(tmp_path) for actor in actors], timeout=TIMEOUT) == [[]] * WORLD

    loads = [actor.load_held.remote(tmp_path) for actor in actors]
    wait_for(tmp_path / "reading")
    ray.kill(actors[VICTIM])
    wait_for(Path(f"/proc/{processes[VICTIM]}"), exists=False)
    killed = time.monotonic()
    (tmp_path / "killed").touch()
    texts = set()
    for rank, load in enumerate(loads):
        if rank != VICTIM:
            with pytest.raises(epload.LoadError) as caught:  # Ray's error is one of both classes
                ray.get(load, timeout=TIMEOUT)
            texts.add(str(caught.value.cause))
    assert time.monotonic() - killed < TIMEOUT / 2
    assert len(texts) == 1
    assert f"rank {VICTIM} has exited" in texts.pop()


def test_the_example_runs(cluster: str, tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_ADDRESS": cluster, "OMP_NUM_THREADS": "1"}
    for script, argument in (("tiny.py", ""), ("ray_actors.py", "moe")):
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / script), str(tmp_path / argument)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=2 * TIMEOUT,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "loaded 69 tensors" in done.stdout
    assert "loss " in done.stdout
