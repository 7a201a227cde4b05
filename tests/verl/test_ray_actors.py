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

import ray
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

import epload
from support.failures import Failure, outcome
from support.small_model import meta_net, state_for, wrong

EXAMPLES = Path(__file__).parents[2] / "examples"
WORLD, VICTIM = 4, 2
TIMEOUT = 60.0


class Held(epload.Checkpoint):
    """A state dict that cannot be read until a file is there. Another file says that reading has begun."""

    def __init__(self, state: dict[str, Tensor], folder: Path) -> None:
        self._inner = epload.Checkpoint.from_state_dict(state)
        self._folder = folder

    @property
    def manifest(self) -> epload.Manifest:
        return self._inner.manifest

    def fill(self, bucket: Tensor, pieces: Sequence[epload.Piece]) -> None:
        (self._folder / "reading").touch()
        wait_for(self._folder / "killed")
        self._inner.fill(bucket, pieces)


def wait_for(path: Path) -> None:
    until = time.monotonic() + TIMEOUT
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not appear"
        time.sleep(0.02)


@ray.remote(num_cpus=0)
class Rank:
    def address(self) -> tuple[str, int]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()

    def join(self, rank: int, host: str, port: int) -> None:
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
        dist.init_process_group("gloo")

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

    def load_held(self, folder: Path) -> tuple[Failure, float]:
        """How the load has failed, and when."""
        source = Held(state_for(1), folder) if dist.get_rank() == 0 else None
        failure = outcome(lambda: epload.load(meta_net(), source, readers="one", timeout=TIMEOUT, progress=False))
        return failure, time.monotonic()


def test_actors_load_bit_for_bit_and_all_hear_of_a_killed_one(cluster: str, tmp_path: Path) -> None:
    save_file(state_for(1), tmp_path / "model.safetensors")
    actors: list[Any] = [Rank.remote() for _ in range(WORLD)]
    host, port = ray.get(actors[0].address.remote(), timeout=TIMEOUT)
    ray.get([actor.join.remote(rank, host, port) for rank, actor in enumerate(actors)], timeout=TIMEOUT)
    assert ray.get([actor.load.remote(tmp_path) for actor in actors], timeout=TIMEOUT) == [[]] * WORLD

    loads = [actor.load_held.remote(tmp_path) for actor in actors]
    wait_for(tmp_path / "reading")
    killed = time.monotonic()
    ray.kill(actors[VICTIM])
    (tmp_path / "killed").touch()
    others = [load for rank, load in enumerate(loads) if rank != VICTIM]
    failures = ray.get(others, timeout=TIMEOUT)
    texts = {failure for failure, _ in failures}
    assert len(texts) == 1, texts
    kind, text = texts.pop()
    assert kind == "LoadError"
    assert f"rank {VICTIM} " in text
    assert "exited" in text or "ended" in text, text
    assert all(ended - killed < TIMEOUT / 2 for _, ended in failures)


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
