"""Headers that are checked on the device: a bucket that aborts the transfer, and what comes after it, never reaches a tensor,
whether or not all ranks can check there, and all ranks move the same buckets. On a fake accelerator, by the kernels' code."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from epload import Checkpoint, HierarchicalLoader, Manifest, Topology
from epload.core.pieces import Piece
from epload.native import region_tables
from epload.staging import device
from epload.transport import sinks
from epload.transport.engine import Engine
from epload.transport.framing import Framing
from epload.transport.movers import Collective
from support import fakedev, ranks
from support.accelerator import DEVICE, NODES
from support.checks import all_fine
from support.failures import error_of

pytestmark = pytest.mark.usefixtures("fake_device")

ROWS, BUCKETS = 300, 7
ROW_BUCKET = 64 + 4 * ROWS
"""Bytes; a tensor a bucket."""
WHO = ("all guard", "some guard", "a tensor on CPU", "none guards")


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
        self.interrupted = False
        """Whether the transfer was ended from outside, by another rank that has ended its own already."""

    @contextmanager
    def counted(self) -> Iterator[None]:
        real_move, real_abandon = Collective.move, Engine.abandon

        def move(mover: Collective, wave: Any) -> None:
            self.numbers.extend(wave.numbers)
            real_move(mover, wave)

        def abandon(engine: Engine) -> None:
            self.interrupted = True
            real_abandon(engine)

        with mock.patch.object(Collective, "move", move), mock.patch.object(Engine, "abandon", abandon):
            yield


class Scene:
    """A loader over two nodes of two ranks, and a model that each rank keeps whole."""

    def __init__(self, readers: str, algorithm: str, who: str) -> None:
        guards = {"all guard": True, "none guards": False, "some guard": dist.get_rank() in (0, 3)}.get(who, True)
        if not guards:
            mock.patch.object(region_tables, "can_guard", return_value=False).start()
            mock.patch.object(sinks, "can_guard", return_value=False).start()
        self.loader = HierarchicalLoader(
            Topology.from_nodes(NODES[4]), readers=readers, algorithm=algorithm, bucket_bytes=ROW_BUCKET
        )
        self.readers = readers
        self.model = Rows().to(DEVICE)
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


def _aborted(rank: int, readers: str, algorithm: str, who: str) -> tuple[list[int | None], list[str]]:
    """For each bucket that fails, how many buckets move; None if the transfer is interrupted."""
    scene, problems, all_moved = Scene(readers, algorithm, who), [], []
    problems += [f"first load: {text}"] if (text := scene.load(1)) else []
    for failing in range(BUCKETS):
        moved = Moved()
        with moved.counted():
            text = scene.load(2 + failing, failing)
        case = f"bucket {failing}"
        reader = 2 * (failing % 2) if readers == "partitioned" else 0
        if f"rank {reader} could not read bucket {failing} (" not in text or "the disk is on fire" not in text:
            problems.append(f"{case}: {text}")
        all_moved.append(None if moved.interrupted else len(moved.numbers))
        # A reader that hears of the failure before it reads an earlier bucket aborts at that.
        first = len(moved.numbers) - 2
        early = readers != "one" or moved.interrupted
        if moved.numbers != [*range(len(moved.numbers))] or first > failing or (not early and first < min(failing, 5)):
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


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize(
    ("readers", "algorithm"), [("one", "two_level"), ("one", "striped"), ("one", "flat"), ("partitioned", "two_level")]
)
def test_all_ranks_end_at_one_bucket_and_none_unpacks_it(readers: str, algorithm: str, who: str) -> None:
    found = ranks.run(4, _aborted, readers, algorithm, who, setup=fakedev.setup)
    all_fine([problems for _, problems in found])
    for counts in zip(*(moved for moved, _ in found), strict=True):
        assert len({*counts} - {None}) == 1, found


def _not_sticky(rank: int) -> list[bool]:
    """What the bucket after an aborted one would do to a rank whose device forgets."""
    scene, made = Scene("partitioned", "two_level", "all guard"), []
    scene.load(1)

    def forgetful(expected: Tensor, stopped: Tensor, flag: Tensor) -> region_tables.Guard:
        made.append(torch.zeros_like(stopped))
        return region_tables.Guard(expected, made[-1], flag)

    with mock.patch.object(sinks, "Guard", forgetful):
        scene.load(2, 3, after=0.5)  # the next has been read by then
    return [scene.holds(number, 1) for number in range(BUCKETS)]


def test_what_comes_after_an_aborted_bucket_is_refused_too() -> None:
    """The next one is another reader's, and in order: nothing but the memory of the first keeps it out."""
    found = ranks.run(4, _not_sticky, setup=fakedev.setup)
    for rank in (1, 3):
        assert found[rank][3], "the aborted bucket itself"
        assert not found[rank][4], "this test shows nothing"


def _ahead(rank: int, who: str) -> tuple[int, int]:
    """How many buckets a receiver moves while its stream stands still, and its device buffers."""
    scene = Scene("one", "two_level", who)
    scene.load(1)
    staging = scene.loader._resources.device.staging
    assert staging is not None
    ahead, real = [0], Collective.move

    def move(self: Collective, wave: Any) -> None:
        if wave.index == 0 and rank == 3:
            fakedev.hold(staging.stream)
        real(self, wave)
        ahead[0] += 1

    def poll(event: torch.Event, check: Any) -> None:
        if rank == 3 and not event.query():  # the host is where it waits
            until = time.monotonic() + 0.2
            while time.monotonic() < until and not event.query():
                time.sleep(0.01)
            seen.append(ahead[0])
            fakedev.release(staging.stream)
        waits(event, check)

    seen: list[int] = []
    waits = device.wait_for
    with mock.patch.object(Collective, "move", move), mock.patch.object(device, "wait_for", poll):
        text = scene.load(2)
    assert not text, text
    assert all(scene.holds(number, 2) for number in range(BUCKETS))
    return (seen or [0])[0], len(staging.buckets)


@pytest.mark.parametrize(("who", "expected"), [("all guard", (2, 3)), ("none guards", (1, 2))])
def test_the_host_looks_two_buckets_later(who: str, expected: tuple[int, int]) -> None:
    assert ranks.run(4, _ahead, who, setup=fakedev.setup)[3] == expected


OFFSETS = {"magic": 0, "index": 8, "status": 12, "fingerprint": 33}
"""In a header."""


def _out_of_order(rank: int, case: str) -> list[str]:
    scene, problems = Scene("one", "two_level", "all guard"), []
    scene.load(1)
    real = Framing.expected

    def expected(self: Framing, number: int) -> Tensor:
        header = real(self, number)
        if number == 3 and rank == 3:
            header[OFFSETS[case]] ^= 2
        return header

    with mock.patch.object(Framing, "expected", expected):
        text = scene.load(2)
    if "rank 3: fakedev:0 found the header of bucket" not in text or "memory of the device changes" not in text:
        problems.append(text)
    if rank == 3:
        problems += [f"{number} was unpacked" for number in range(3, BUCKETS) if not scene.holds(number, 1)]
    problems += [text] if (text := scene.load(3)) else []
    return problems + [f"{number}" for number in range(BUCKETS) if not scene.holds(number, 3)]


@pytest.mark.parametrize("case", OFFSETS)
def test_a_bucket_that_the_device_refuses_for_no_reason_is_an_error(case: str) -> None:
    """The host finds every header in order: a load that says nothing would leave old weights."""
    all_fine(ranks.run(4, _out_of_order, case, setup=fakedev.setup))
