"""Loads of which one bucket cannot be read, into a model on a device: which buckets move, and what reaches the tensors."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from epload import Checkpoint, HierarchicalLoader, Manifest, Topology
from epload.core.pieces import Piece
from epload.transfer.engine import Engine
from epload.transfer.movers import Collective
from support.accelerator import NODES
from support.checks import all_fine
from support.failures import error_of

ROWS, BUCKETS = 300, 7
ROW_BUCKET = 64 + 4 * ROWS
"""Bytes; a tensor a bucket."""
WHO = ("every rank", "a tensor on CPU")


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.zeros(ROWS)) for _ in range(BUCKETS)])


def row(number: int, salt: int) -> Tensor:
    return torch.arange(float(ROWS)) + 10_000 * number + 100_000 * salt


def state_for(salt: int) -> dict[str, Tensor]:
    return {f"rows.{i}": row(i, salt) for i in range(BUCKETS)}


class Failing(Checkpoint):
    """Of which one tensor cannot be read."""

    def __init__(self, salt: int, failing: int, after: float = 0.0) -> None:
        """``after``: seconds."""
        self._inner = Checkpoint.from_state_dict(state_for(salt))
        self._failing = failing
        self._after = after

    @property
    def manifest(self) -> Manifest:
        return self._inner.manifest

    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        self._inner.fill(bucket, pieces)
        if self._failing in [piece.tensor for piece in pieces]:
            time.sleep(self._after)
            raise OSError(5, "the disk is on fire")


class Moved:
    """The buckets that this rank moves."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.error = ""
        """What ended the transfer on this rank."""

    @property
    def interrupted(self) -> bool:
        """Whether that was another rank, which has ended its own already."""
        return "another rank failed" in self.error

    @contextmanager
    def counted(self) -> Iterator[None]:
        real_move, real_run = Collective.move, Engine.run

        def move(mover: Collective, wave: Any) -> None:
            self.numbers.extend(wave.numbers)
            real_move(mover, wave)

        def run(engine: Engine, bar: Any) -> None:
            try:
                real_run(engine, bar)
            except BaseException as error:
                self.error = str(error)
                raise

        with mock.patch.object(Collective, "move", move), mock.patch.object(Engine, "run", run):
            yield


class Scene:
    """A loader over two nodes of two ranks, and a model that each rank keeps whole."""

    def __init__(self, readers: str, algorithm: str, who: str, device: str, nodes: list[list[int]] = NODES[4]) -> None:
        self.loader = HierarchicalLoader(
            Topology.from_nodes(nodes), readers=readers, algorithm=algorithm, bucket_bytes=ROW_BUCKET
        )
        self.readers = readers
        self.model = Rows().to(device)
        if who == "a tensor on CPU" and dist.get_rank() in (1, 2):
            for i in (2, 3):
                self.model.rows[i] = nn.Parameter(torch.zeros(ROWS))

    def load(self, salt: int, failing: int = BUCKETS, after: float = 0.0) -> str:
        """The error of the load."""
        reads = self.readers != "one" or dist.get_rank() == 0
        source = Failing(salt, failing, after) if reads else None
        text = error_of(lambda: self.loader.load(self.model, source))
        torch.accelerator.synchronize()
        return text

    def holds(self, number: int, salt: int) -> bool:
        return torch.equal(self.model.rows[number].detach().cpu(), row(number, salt))


def at_each_bucket(
    rank: int, readers: str, algorithm: str, who: str, device: str
) -> tuple[list[int | None], list[str]]:
    """For each bucket that fails, how many buckets move; None if the transfer is interrupted. And what was wrong."""
    scene, problems, all_moved = Scene(readers, algorithm, who, device), [], []
    problems += [f"first load: {text}"] if (text := scene.load(1)) else []
    for failing in range(BUCKETS):
        moved = Moved()
        with moved.counted():
            text = scene.load(2 + failing, failing)
        case = f"bucket {failing}"
        reader = 2 * (failing % 2) if readers == "partitioned" else 0
        if f"rank {reader} could not read bucket {failing} (" not in text or "the disk is on fire" not in text:
            problems.append(f"{case}: {text}")
        if not moved.interrupted and "could not read bucket" not in moved.error:
            problems.append(f"{case}: ended by {moved.error}")
        all_moved.append(None if moved.interrupted else len(moved.numbers))
        # A reader that hears of the failure before it reads an earlier bucket aborts at that.
        first = len(moved.numbers) - 1
        early = readers != "one" or moved.interrupted
        if moved.numbers != [*range(len(moved.numbers))] or first > failing or (not early and first < failing):
            problems.append(f"{case}: moved {moved.numbers}")
        for number in range(BUCKETS):
            kept, taken = scene.holds(number, 1), scene.holds(number, 2 + failing)
            # A reader that has failed takes nothing more, while others may still unpack what came before.
            if not (kept or (taken and number < failing)):
                problems.append(f"{case}: {number} holds {scene.model.rows[number][:3]}")
            if not taken and number < first and rank not in (0, 2):
                problems.append(f"{case}: {number} was not unpacked")
        problems += [f"{case}, after it: {text}"] if (text := scene.load(1)) else []
        problems += [f"{case}, after it: {number}" for number in range(BUCKETS) if not scene.holds(number, 1)]
    return all_moved, problems


def none_differs(found: Sequence[tuple[list[int | None], list[str]]]) -> None:
    """Of all ranks."""
    all_fine([problems for _, problems in found])
    for counts in zip(*(moved for moved, _ in found), strict=True):
        assert len({*counts} - {None}) == 1, found
