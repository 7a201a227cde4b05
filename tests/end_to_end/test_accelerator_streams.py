"""The streams of a load into a device: what is queued where, that each wait is needed, and that readers do not wait.

On a fake asynchronous accelerator.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from epload import Checkpoint, HierarchicalLoader, Manifest, Topology
from epload.core.pieces import Piece
from epload.transfer.device import DeviceStaging
from support import fakedev, ranks
from support.accelerator import (
    DEVICE,
    NODES,
    SEMANTICS,
    for_readers,
    meta_net,
    wrong,
)
from support.checks import all_fine
from support.small_model import BUCKET, state_for

pytestmark = pytest.mark.usefixtures("fake_device")


def _traced(rank: int, semantics: str) -> list[str]:
    """Broadcasts and unpacking of every bucket on the one stream, host to device on others; two communicators a rank."""
    problems = []
    topology = Topology.from_nodes(NODES[4])
    streams = (None, torch.Stream(DEVICE), torch.accelerator.current_stream(DEVICE))
    for stream, readers in zip(streams, ("one", "partitioned", "one"), strict=True):
        loader = HierarchicalLoader(
            topology, readers=readers, algorithm="two_level", bucket_bytes=BUCKET, stream=stream
        )
        model = meta_net()
        loader.load(model, for_readers(state_for(1), readers))
        with fakedev.traced() as seen:
            report = loader.load(model, for_readers(state_for(2), readers))
        problems += wrong(model, state_for(2))
        staging = loader._resources.device.staging
        assert staging is not None
        ours = staging.stream.stream_id
        if stream is not None and ours != stream.stream_id:
            problems.append(f"on stream {ours}, given {stream.stream_id}")
        theirs = {s.stream_id for s in fakedev.group_streams()}
        where: dict[str, Counter[int]] = {}
        for _, on, what in seen:
            where.setdefault(what, Counter())[on] += 1
        sent = where["broadcast"]
        groups = 2 if rank in (0, 2) else 1
        if sent.total() != groups * report.buckets or sent.total() != report.transport_steps:
            problems.append(f"{sent} broadcasts for {report.buckets} buckets, reported {report.transport_steps}")
        if not set(sent) <= (theirs if semantics == "hccl" else {ours}):
            problems.append(f"broadcasts on {sent}, not {ours}")
        mine = {"one": {0: report.buckets}, "partitioned": {0: -(-report.buckets // 2), 2: report.buckets // 2}}
        unpacked = set(where["region copy" if semantics == "nccl" else "copy"])
        to_device = where.get("copy to device", Counter())
        if rank not in mine[readers] and unpacked != {ours}:
            problems.append(f"unpacked on {unpacked}, not {ours}")
        if ours in to_device or (to_device.total() < 2 * mine[readers].get(rank, 0)):  # header and data of each bucket
            problems.append(f"host to device on {to_device}, with {ours} for what follows")
        if rank not in mine[readers] and to_device:
            problems.append(f"{to_device} copies to the device of a rank that reads nothing")
        headers = where.get("copy to host", Counter())
        if headers != +Counter({ours: report.buckets - mine[readers].get(rank, 0)}):
            problems.append(f"copies to host: {headers}")
        if len(topology.groups.names) != groups:
            problems.append(f"{len(topology.groups.names)} communicators")
    return problems


@SEMANTICS
def test_all_work_is_on_one_stream_but_the_copies_to_the_device(semantics: str) -> None:
    all_fine(ranks.run(4, _traced, semantics, setup=partial(fakedev.setup, semantics)))


ROWS = 2000
BUCKETS_OF_ROWS = 6
ROW_BUCKET = 64 + 4 * ROWS
"""Bytes; a tensor a bucket."""


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.zeros(ROWS)) for _ in range(BUCKETS_OF_ROWS)])


class Counting(Checkpoint):
    """Says how many buckets have been read."""

    def __init__(self, salt: int) -> None:
        self.state = {f"rows.{i}": torch.arange(float(ROWS)) + 10_000 * (i + salt) for i in range(BUCKETS_OF_ROWS)}
        self._inner = Checkpoint.from_state_dict(self.state)
        self.read = 0

    @property
    def manifest(self) -> Manifest:
        return self._inner.manifest

    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        self._inner.fill(bucket, pieces)
        self.read += 1


class Scene:
    """Loads on one rank with a stream held, arranged so that a missing wait shows, and always does."""

    def __init__(self) -> None:
        self.given = torch.Stream(DEVICE)
        self.loader = HierarchicalLoader(readers="one", bucket_bytes=ROW_BUCKET, stream=self.given)
        self.model = Rows().to(DEVICE)
        self.loader.load(self.model, Counting(0))
        torch.accelerator.synchronize()
        staging = self.loader._resources.device.staging
        assert staging is not None
        self.staging = staging
        self.unpacked = 0
        """Buckets of this load whose unpacking has been queued."""

    def _note(self, staging: DeviceStaging, bucket: int) -> None:
        self._unpacked(staging, bucket)
        self.unpacked += 1

    _unpacked = staticmethod(DeviceStaging.used)

    def load(self, stream: torch.Stream, salt: int, harm: Callable[[Counting], bool]) -> bool:
        """Releases the stream once the harm a missing wait does is done, or the load is where it has to wait."""
        source = Counting(salt)

        def release() -> None:
            until = time.monotonic() + (20 if broken else 0.01)
            while time.monotonic() < until and not harm(source):
                time.sleep(0.0005)
            time.sleep(0.002)
            fakedev.release(stream)

        broken = self.broken
        self.unpacked = 0
        fakedev.hold(stream)
        releasing = threading.Thread(target=release)
        releasing.start()
        with mock.patch.object(DeviceStaging, "used", lambda staging, bucket: self._note(staging, bucket)):
            self.loader.load(self.model, source)
        releasing.join()
        torch.accelerator.synchronize()
        return all(torch.equal(p.detach().cpu(), source.state[f"rows.{i}"]) for i, p in enumerate(self.model.rows))

    broken = False

    def wait_until_used(self, salt: int) -> bool:
        """A device buffer is filled again while what was in it is not unpacked."""
        return self.load(
            self.given, salt, lambda source: source.read == BUCKETS_OF_ROWS and self.staging.copies.query()
        )

    def wait_until_filled(self, salt: int) -> bool:
        """A device buffer is unpacked while filling it has not begun."""
        return self.load(self.staging.copies, salt, lambda source: self.unpacked >= 1 and self.given.query())

    def enter(self, salt: int) -> bool:
        """The caller has yet to write to the tensors when the load is called."""
        caller = torch.Stream(DEVICE)
        with caller:
            fakedev.hold(caller)
            with torch.no_grad():
                for p in self.model.rows:
                    p.fill_(-1.0)
            return self.load(caller, salt, lambda source: self.unpacked == BUCKETS_OF_ROWS and self.given.query())

    def leave(self, salt: int) -> bool:
        """The caller reads the tensors as soon as the load has returned, and overwrites them. Two buckets, so that the host does
        not wait."""
        model = nn.ParameterList(list(self.model.rows)[:2])
        state = {f"{i}": torch.arange(float(ROWS)) + 10_000 * (i + salt) for i in range(2)}
        caller = torch.Stream(DEVICE)
        with caller, torch.no_grad(), fakedev.holding(self.given):
            self.loader.load(model, state)
            read = [p.detach().clone() for p in model]
            for p in model:
                p.fill_(7.0)
            until = time.monotonic() + (20 if self.broken else 0.01)
            while not caller.query() and time.monotonic() < until:
                time.sleep(0.0005)
        torch.accelerator.synchronize()
        return all(torch.equal(r.cpu(), state[f"{i}"]) for i, r in enumerate(read))


RULES = ("wait_until_used", "wait_until_filled", "enter", "leave")
BROKEN_ROUNDS, RIGHT_ROUNDS = 5, 20


def _rounds(rank: int, rule: str) -> tuple[list[bool], list[bool]]:
    scene = Scene()
    right = [getattr(scene, rule)(salt) for salt in range(RIGHT_ROUNDS)]
    scene.broken = True
    with mock.patch.object(DeviceStaging, rule):
        return [getattr(scene, rule)(salt) for salt in range(100, 100 + BROKEN_ROUNDS)], right


@pytest.mark.parametrize("rule", RULES)
def test_each_wait_is_needed(rule: str) -> None:
    [(broken, right)] = ranks.run(1, _rounds, rule, setup=fakedev.setup)
    assert right == [True] * RIGHT_ROUNDS
    assert broken == [False] * BROKEN_ROUNDS


def _host_does_not_wait(rank: int) -> list[str]:
    """A reader queues all of two buckets on a stream that does not move, and so is not held up by others."""
    topology = Topology.from_nodes([[0, 1]])
    stream = torch.Stream(DEVICE)
    options = {"readers": "one", "algorithm": "two_level"}
    loader = HierarchicalLoader(topology, bucket_bytes=64 + 4 * ROWS * 3, stream=stream, **options)
    model = Rows().to(DEVICE)
    loader.load(model, Counting(0).state if rank == 0 else None)
    torch.accelerator.synchronize()
    staging, problems = loader._resources.device.staging, []
    assert staging is not None
    source = Counting(5)
    moved = []
    if rank == 0:
        real = DeviceStaging.used

        def note(self: DeviceStaging, bucket: int) -> None:
            real(self, bucket)
            moved.append(bucket)
            if moved == [0, 1]:
                problems.extend(["the stream was idle"] * stream.query())
                fakedev.release(stream)

        settle = loader.topology.control.settle

        def settle_and_hold(what: str, *args: Any, **options: Any) -> Any:
            answer = settle(what, *args, **options)
            if what == "opening the checkpoint":
                fakedev.hold(stream)
            return answer

        with (
            mock.patch.object(DeviceStaging, "used", note),
            mock.patch.object(loader.topology.control, "settle", settle_and_hold),
        ):
            loader.load(model, source)
    else:
        loader.load(model, None)
    if rank == 0 and moved != [0, 1]:
        problems.append(f"queued {moved}")
    torch.accelerator.synchronize()
    return problems + [
        f"row {i} differs"
        for i, p in enumerate(model.rows)
        if not torch.equal(p.detach().cpu(), source.state[f"rows.{i}"])
    ]


def test_a_reader_queues_its_buckets_without_waiting() -> None:
    all_fine(ranks.run(2, _host_does_not_wait, setup=partial(fakedev.setup, "hccl"), limit=60))


def _late_values(rank: int, readers: str) -> list[str]:
    """The caller has yet to write the tensors of a dict on the device when the load is called."""
    loader = HierarchicalLoader(Topology.from_nodes([[0], [1]]), readers=readers, bucket_bytes=ROW_BUCKET)
    model, problems = Rows().to(DEVICE), []
    for salt in range(3):
        state = {f"rows.{i}": torch.zeros(ROWS, device=DEVICE) for i in range(BUCKETS_OF_ROWS)}
        torch.accelerator.synchronize()
        caller = torch.accelerator.current_stream(DEVICE)
        fakedev.hold(caller)
        for i, value in enumerate(state.values()):
            value.fill_(10.0 * salt + i + 1)
        threading.Timer(0.3, fakedev.release, [caller]).start()
        loader.load(model, state if readers != "one" or rank == 0 else None)
        torch.accelerator.synchronize()
        problems += [
            f"{salt}: row {i} holds {p[:2].tolist()}"
            for i, p in enumerate(model.rows)
            if not torch.equal(p.detach().cpu(), torch.full((ROWS,), 10.0 * salt + i + 1))
        ]
    return problems


@pytest.mark.parametrize("readers", ["partitioned", "every"])
def test_a_dict_on_the_device_is_read_after_what_the_caller_has_queued(readers: str) -> None:
    all_fine(ranks.run(2, _late_values, readers, setup=fakedev.setup))
