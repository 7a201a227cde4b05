"""Loads of which one bucket cannot be read, into a model on a device: what reaches the tensors."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from epload import HierarchicalLoader, Topology
from support.accelerator import NODES
from support.failures import Filling, error_of

ROWS, BUCKETS = 300, 7
ROW_BUCKET = 64 + 4 * ROWS
"""Bytes; a tensor a bucket."""
WHO = ("every rank", "a tensor on CPU")


def row(number: int, salt: int) -> Tensor:
    return torch.arange(float(ROWS)) + 10_000 * number + 100_000 * salt


class FailingRow(Filling):
    """A state of which one tensor cannot be read, after some seconds."""

    def __init__(self, salt: int, failing: int, after: float = 0.0) -> None:
        super().__init__({f"{i}": row(i, salt) for i in range(BUCKETS)})
        self._failing, self._after = failing, after

    def fill(self, bucket: Tensor, pieces: Any) -> None:
        super().fill(bucket, pieces)
        if self._failing in [piece.tensor for piece in pieces]:
            time.sleep(self._after)
            raise OSError(5, "the disk is on fire")


class Scene:
    """A loader over two nodes of two ranks, and a model that each rank keeps whole."""

    def __init__(self, readers: str, algorithm: str, who: str, device: str, nodes: list[list[int]] = NODES[4]) -> None:
        self.loader = HierarchicalLoader(
            Topology.from_nodes(nodes), readers=readers, algorithm=algorithm, bucket_bytes=ROW_BUCKET
        )
        self.readers = readers
        self.rows = nn.ParameterList([nn.Parameter(torch.zeros(ROWS)) for _ in range(BUCKETS)]).to(device)
        if who == "a tensor on CPU" and dist.get_rank() in (1, 2):
            for i in (2, 3):
                self.rows[i] = nn.Parameter(torch.zeros(ROWS))

    def load(self, salt: int, failing: int = BUCKETS, after: float = 0.0) -> str:
        """Returns the error of the load."""
        reads = self.readers != "one" or dist.get_rank() == 0
        source = FailingRow(salt, failing, after) if reads else None
        text = error_of(lambda: self.loader.load(self.rows, source))
        torch.accelerator.synchronize()
        return text

    def holds(self, number: int, salt: int) -> bool:
        return torch.equal(self.rows[number].detach().cpu(), row(number, salt))


def at_each_bucket(rank: int, readers: str, algorithm: str, who: str, device: str) -> list[str]:
    """Returns what is wrong when one bucket after another fails."""
    scene, problems = Scene(readers, algorithm, who, device), []
    problems += [f"first load: {text}"] if (text := scene.load(1)) else []
    for failing in range(BUCKETS):
        text = scene.load(2 + failing, failing)
        case = f"bucket {failing}"
        reader = 2 * (failing % 2) if readers == "partitioned" else 0
        if f"rank {reader} could not read bucket {failing} (" not in text or "the disk is on fire" not in text:
            problems.append(f"{case}: {text}")
        for number in range(BUCKETS):
            if not (scene.holds(number, 1) or (number < failing and scene.holds(number, 2 + failing))):
                problems.append(f"{case}: {number} holds {scene.rows[number][:3]}")
        problems += [f"{case}, after it: {text}"] if (text := scene.load(1)) else []
        problems += [f"{case}, after it: {number}" for number in range(BUCKETS) if not scene.holds(number, 1)]
    return problems
