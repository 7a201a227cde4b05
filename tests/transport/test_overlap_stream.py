"""``overlap_stream``: what crosses nodes on one stream, what moves inside them on another. On a fake accelerator: the result is
that of one stream, the two run at the same time, and each wait between them is needed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from epload import HierarchicalLoader, LoadError, Topology
from epload.staging.device import DeviceStaging
from epload.transport.movers import Collective
from support import fakedev, ranks
from support.accelerator import DEVICE, NODES, SEMANTICS, WAYS, for_readers, meta_net, wrong
from support.checks import all_fine
from support.failures import error_of
from support.small_model import BUCKET, Net, state_for

pytestmark = pytest.mark.usefixtures("fake_device")

ROWS, BUCKETS = 500, 7
ROW_BUCKET = 64 + 4 * ROWS
"""Bytes; a tensor a bucket."""


def _every_way(rank: int, folder: Path) -> list[str]:
    problems = []
    topology = Topology.from_nodes(NODES[dist.get_world_size()])
    stream, inside = torch.Stream(DEVICE), torch.Stream(DEVICE)
    for readers, algorithm in WAYS:
        for given in (None, stream):
            loader = HierarchicalLoader(
                topology, readers=readers, algorithm=algorithm, bucket_bytes=BUCKET, stream=given, overlap_stream=inside
            )
            case, model = f"{readers} {algorithm}", meta_net()
            report = loader.load(model, folder / "one.safetensors")
            problems += [f"{case}: {text}" for text in wrong(model, state_for(1))]
            loader.load(model, for_readers(state_for(2), readers))
            problems += [f"{case}, reload: {text}" for text in wrong(model, state_for(2))]
            if not report.stream.endswith(f"; inside nodes {inside.stream_id}, the caller's"):
                problems.append(f"{case}: {report.stream}")
    return problems


@SEMANTICS
@pytest.mark.parametrize("world", [1, 3, 4])
def test_the_model_has_its_shards(world: int, semantics: str, tmp_path: Path) -> None:
    save_file(state_for(1), tmp_path / "one.safetensors")
    all_fine(ranks.run(world, _every_way, tmp_path, setup=partial(fakedev.setup, semantics)))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.zeros(ROWS)) for _ in range(BUCKETS)])


def rows_for(salt: int) -> dict[str, Tensor]:
    return {f"rows.{i}": torch.arange(float(ROWS)) + 10_000 * (i + salt) for i in range(BUCKETS)}


class Scene:
    """Loads over two nodes of two ranks."""

    def __init__(self, algorithm: str) -> None:
        self.stream, self.inside = torch.Stream(DEVICE), torch.Stream(DEVICE)
        self.loader = HierarchicalLoader(
            Topology.from_nodes(NODES[4]), readers="one", algorithm=algorithm, bucket_bytes=ROW_BUCKET,
            stream=self.stream, overlap_stream=self.inside,
        )  # fmt: skip
        self.model = Rows().to(DEVICE)
        self.load(0)
        self.moved = 0
        """Buckets whose broadcasts are queued on this rank."""

    def load(self, salt: int) -> bool:
        """Whether the model is right afterwards."""
        self.moved = 0
        try:
            self.loader.load(self.model, rows_for(salt) if dist.get_rank() == 0 else None)
        except LoadError:  # a header of another bucket
            return False
        torch.accelerator.synchronize()
        return all(torch.equal(p.detach().cpu(), rows_for(salt)[f"rows.{i}"]) for i, p in enumerate(self.model.rows))

    @contextmanager
    def held(self, stream: torch.Stream, until: Callable[[], bool], seconds: float) -> Iterator[None]:
        """From the first bucket of a load on, a stream stands still until that is so, or that much time is over."""
        real = Collective.move

        def release() -> None:
            end = time.monotonic() + seconds
            while time.monotonic() < end and not until():
                time.sleep(0.0005)
            time.sleep(0.002)
            fakedev.release(stream)

        releasing = threading.Thread(target=release)

        def move(mover: Collective, wave: object) -> None:
            if self.moved == 0:
                fakedev.hold(stream)
                releasing.start()
            real(mover, wave)  # type: ignore[arg-type]
            self.moved += 1

        try:
            with mock.patch.object(Collective, "move", move):
                yield
        finally:
            releasing.join()


def _where(rank: int, semantics: str, algorithm: str) -> list[str]:
    scene, problems = Scene(algorithm), []
    with fakedev.traced() as seen:
        if not scene.load(1):
            problems.append("a wrong weight")
    on = Counter((stream, name) for _, stream, name in seen)
    if semantics == "nccl":
        crosses = rank in (0, 2) or algorithm == "striped"
        expected = BUCKETS if crosses else 0
        if sum(on[scene.stream.stream_id, name] for name in ("broadcast", "allgather")) != expected:
            problems.append(f"{on}: not {expected} steps between nodes")
        if sum(on[scene.inside.stream_id, name] for name in ("broadcast", "allgather")) != BUCKETS:
            problems.append(f"{on}: not {BUCKETS} steps inside the node")
    unpacked = {stream for (stream, name) in on if name in ("copy", "region copy")}
    return problems + [f"unpacked on {unpacked}"] * (unpacked != {scene.inside.stream_id})


@SEMANTICS
@pytest.mark.parametrize("algorithm", ["two_level", "striped"])
def test_each_step_is_on_its_stream(algorithm: str, semantics: str) -> None:
    all_fine(ranks.run(4, _where, semantics, algorithm, setup=partial(fakedev.setup, semantics)))


def _at_once(rank: int) -> list[str]:
    """A leader receives a bucket while the one before is not yet spread in its node."""
    scene, ahead = Scene("two_level"), []
    if rank != 2:
        return ["a wrong weight"] * (not scene.load(1))

    def until() -> bool:
        if scene.moved == 2 and scene.stream.query() and not scene.inside.query():
            ahead.append(scene.moved)
        return bool(ahead)

    with scene.held(scene.inside, until, 20):
        right = scene.load(1)
    return ["a wrong weight"] * (not right) + [f"not ahead after {scene.moved}"] * (not ahead)


def test_nodes_are_crossed_while_the_bucket_before_is_spread() -> None:
    all_fine(ranks.run(4, _at_once, setup=fakedev.setup))


RULES = {
    # Its leader spreads what it has not received.
    "hand_over": ("two_level", 2),
    # What a rank of the source's node still has to send is overwritten with the next bucket of the same buffer.
    "wait_for_each_other": ("striped", 1),
}
ROUNDS = 10


def _rounds(rank: int, rule: str) -> list[bool]:
    algorithm, held_on = RULES[rule]
    scene = Scene(algorithm)

    def rounds(broken: bool) -> list[bool]:
        found = []
        for salt in range(ROUNDS):
            if rank != held_on:
                found.append(scene.load(salt + 1 + 100 * broken))
                continue
            seconds = 20 if broken else 0.02

            def until() -> bool:
                if rule == "hand_over":
                    return scene.moved >= 1 and scene.inside.query()
                return scene.moved >= 6  # so that the fourth bucket, in the buffer of the first, has been unpacked

            with scene.held(scene.stream, until, seconds):
                found.append(scene.load(salt + 1 + 100 * broken))
        return found

    right = rounds(broken=False)
    owner = Collective if rule == "hand_over" else DeviceStaging
    with mock.patch.object(owner, rule) if rank == held_on else mock.MagicMock():
        wrong_somewhere = rounds(broken=True)
    assert all(right), right
    return wrong_somewhere


@pytest.mark.parametrize("rule", RULES)
def test_each_wait_is_needed(rule: str) -> None:
    found = ranks.run(4, _rounds, rule, setup=fakedev.setup)
    assert [all(right) for right in zip(*found, strict=True)] == [False] * ROUNDS, found


def _refused(rank: int) -> list[str]:
    problems = []
    for model, stream, text in (
        (Net(), torch.Stream(DEVICE), "stream=None for a model on cpu"),
        (Net().to(DEVICE), torch.Stream(f"{fakedev.NAME}:1"), f"a stream of {DEVICE}"),
    ):
        error = error_of(lambda m=model, s=stream: HierarchicalLoader(overlap_stream=s).load(m, state_for(1)))  # type: ignore[misc]
        problems += [error] * (not error.startswith("ValueError") or text not in error)
    return problems


def test_a_stream_of_another_device_is_refused() -> None:
    all_fine(ranks.run(1, _refused, setup=fakedev.setup))
