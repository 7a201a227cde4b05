"""Models on devices: from one to the other over their backend if all ranks of both jobs have theirs there, else through host
memory. Their memory cannot be opened by other processes; see test_sync_pulls for where it can."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import epload
from epload.planning.waves import Wave
from epload.ranks.groups import Group
from epload.sync.device_route import DeviceRoute
from epload.sync.devices import DeviceAccess, link_obstacle
from epload.sync.transfer import LocalBuckets
from support import fakedev
from support.accelerator import DEVICE
from support.device_syncs import CCL, move_to_cpu, receive_late, send_late, send_versions
from support.jobs import Job, Meeting, run
from support.small_syncs import many_waves
from support.synced_models import build, check, write

pytestmark = pytest.mark.usefixtures("fake_device")


FSDP, TP = ("fsdp", 2, None, DEVICE), ("tp1", 2, None, DEVICE)


def send(
    rank: int, meeting: Meeting, layout: str, world: int, nodes: Any, where: str, receivers: int, options: Any
) -> list[str]:
    """Returns the transport of each version."""
    model = build(layout, world, where=where)
    topology = epload.Topology.from_nodes(nodes) if nodes else None
    transports = []
    with (
        many_waves(lease_seconds=10),
        epload.WeightSender(
            model, ("127.0.0.1", 0), receivers=receivers, topology=topology, timeout=60, **options
        ) as sender,
    ):
        if rank == 0:
            meeting.say("address", sender.address)
        for version in (1, 2, 3):
            write(model, version)
            report = sender.send_weights(version)
            assert report is not None
            transports.append(report.transport)
    return transports


def receive(
    rank: int, meeting: Meeting, layout: str, world: int, nodes: Any, where: str, stage: str, options: Any
) -> list[str]:
    model = build(layout, world, torch.bfloat16, where)
    topology = epload.Topology.from_nodes(nodes) if nodes else None
    transports = []
    with (
        many_waves(lease_seconds=10),
        epload.WeightReceiver(
            model, meeting.hear("address"), topology=topology, timeout=60, stage=stage, **options
        ) as receiver,
    ):
        for version in (1, 2, 3):
            report = receiver.receive_weights(version)
            receiver.commit()
            check(model, version)
            transports.append(report.transport)
    return transports


@pytest.mark.parametrize(
    ("trainer", "engines", "verify", "options", "transport", "semantics"),
    [
        (FSDP, [(*TP, "host")], True, {}, CCL, "hccl"),
        (("fsdp", 3, [[0, 1], [2]], DEVICE), [("tp0", 4, [[0, 1], [2, 3]], DEVICE, "none")], True, {}, CCL, "nccl"),
        (("tp1", 2, [[0], [1]], DEVICE), [("fsdp", 3, [[0, 1], [2]], DEVICE, "host")], False, {}, CCL, "nccl"),
        (FSDP, [(*TP, "host"), ("plain", 1, None, DEVICE, "none")], True, {}, CCL, "hccl"),
        (FSDP, [(*TP, "none")], True, {"transport": "host"}, "host", "nccl"),
        (FSDP, [(*TP, "host")], True, {"snapshot": "host"}, "host", "hccl"),
        (("plain", 1, None, DEVICE), [("tp0", 2, None, "cpu", "none")], True, {}, "host", "nccl"),
        (FSDP, [("plain", 1, None, DEVICE, "none"), ("plain", 1, None, "cpu", "host")], False, {}, "host", "nccl"),
    ],
    ids=["host", "nodes in place", "nodes", "engines that differ", "host transport", "snapshot", "trainer", "one on CPU"],
)  # fmt: skip
def test_models_on_a_device(
    trainer: Any, engines: list[Any], verify: bool, options: Any, transport: str, semantics: str
) -> None:
    setup = partial(fakedev.setup, semantics, shares=False)
    layout, world, nodes, where = trainer
    receivers = sum(count for _, count, *_ in engines)
    jobs = [Job(world, send, (layout, world, nodes, where, receivers, {"verify": verify, **options}), setup=setup)]
    for theirs, count, their_nodes, there, stage in engines:
        args = theirs, count, their_nodes, there, stage, {"verify": verify}
        jobs.append(Job(count, receive, args, setup=setup))
    transports = [found for job in run(jobs) for found in job]
    assert transports == [[transport] * 3] * (world + receivers)


@pytest.mark.parametrize(
    ("kinds", "places", "expected"),
    [
        (["cuda nccl 2.27.5", "cuda nccl 2.27.5"], ["GPU-1", "GPU-2"], ""),
        (["cuda nccl 2.27.5", "cuda nccl 2.27.5"], ["GPU-1", "GPU-1"], "ranks 0 and 1 use one device"),
        (["cuda nccl 2.27.5", "cuda nccl 2.27.5"], ["", ""], ""),
        (["cuda nccl 2.27.5", "cuda nccl 2.26.2"], ["", ""], "rank 0 has cuda nccl 2.27.5, rank 1 cuda nccl 2.26.2"),
        (["cuda nccl 2.27.5", ""], ["GPU-1", ""], "rank 1 has tensors elsewhere"),
        (["", ""], ["", ""], "rank 0 has tensors elsewhere"),
    ],
    ids=["two GPUs", "one GPU", "not known", "two versions", "GPU and CPU", "CPU"],
)
def test_which_ranks_reach_each_other_from_their_devices(kinds: list[str], places: list[str], expected: str) -> None:
    found = link_obstacle(
        [DeviceAccess("nccl" if kind else "", kind, at) for kind, at in zip(kinds, places, strict=True)]
    )
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


def never_connects(rank: int, meeting: Meeting, dies: bool) -> tuple[bool, bool]:
    """Fails while the other member of its first group waits for it. Returns whether it raised, and whether it is torn."""
    model = build("plain", 1, where=DEVICE)
    make = Group.make

    def fails(self: Group, *args: Any, **options: Any) -> None:
        if args[-1] is None:
            return make(self, *args, **options)
        time.sleep(1)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("no communicator")

    with many_waves(), epload.WeightReceiver(model, meeting.hear("address"), timeout=12, stage="none") as receiver:
        with mock.patch.object(Group, "make", fails), pytest.raises(epload.LoadError):
            receiver.receive_weights()
        return receiver.torn, receiver.version is None


@pytest.mark.parametrize(("dies", "semantics"), [(True, "nccl"), (False, "hccl")], ids=["dies", "raises"])
def test_a_rank_that_does_not_come_to_a_communicator_is_an_error(dies: bool, semantics: str) -> None:
    """And nothing is torn."""
    setup = partial(fakedev.setup, semantics, lazy=True, shares=False)
    sent, received = run(
        [
            Job(1, partial(send_versions, versions=1, waves=many_waves), setup=setup),
            Job(1, never_connects, (dies,), dying=(0,) if dies else (), setup=setup),
        ]
    )
    text, _, seconds, _ = sent[0][0]
    assert "rank 1 has exited" in text if dies else "no communicator" in text
    assert seconds < 8
    if not dies:
        assert received == [(False, True)]


def receive_flipped(rank: int, meeting: Meeting) -> str:
    copy = LocalBuckets._keep

    def flips(place: torch.Tensor, bucket: torch.Tensor) -> None:
        copy(place, bucket)
        place[200] ^= 0x40

    model = build("plain", 1, where=DEVICE)
    with (
        many_waves(),
        mock.patch.object(LocalBuckets, "_keep", staticmethod(flips)),
        epload.WeightReceiver(model, meeting.hear("address"), timeout=30, verify=True) as receiver,
    ):
        try:
            receiver.receive_weights()
        except epload.LoadError as error:
            return str(error)
        return ""


def test_a_bit_that_changes_on_its_way_into_host_memory_is_found() -> None:
    setup = partial(fakedev.setup, "nccl", shares=False)
    sends = partial(send_versions, versions=1, verify=True, waves=many_waves)
    sent, received = run([Job(1, sends, setup=setup), Job(1, receive_flipped, setup=setup)])
    assert "its checksum is not" in received[0]
    assert sent[0][0].error == received[0]


def receive_moved(rank: int, meeting: Meeting, moves: bool, stage: str) -> list[Any]:
    model = build("plain", 1, where=DEVICE)
    found = []
    with many_waves(), epload.WeightReceiver(model, meeting.hear("address"), timeout=20, stage=stage) as receiver:
        for version in (1, 2, 3):
            if moves and version == 2:
                move_to_cpu(model)
            try:
                report = receiver.receive_weights()
                receiver.commit()
                check(model, version)
                found.append(report.transport)
            except epload.LoadError:
                assert not receiver.torn
                found.append("failed")
    return found


def test_a_trainer_that_moves_to_another_device() -> None:
    setup = partial(fakedev.setup, "nccl", shares=False)
    send_moved = partial(send_versions, before_second=move_to_cpu, waves=many_waves)
    jobs = [Job(1, send_moved, setup=setup), Job(1, receive_moved, (False, "none"), setup=setup)]
    (sent,), (received,) = run(jobs)
    assert [version.transport for version in sent] == received == [CCL, "host", "host"]


@pytest.mark.parametrize("stage", ["host", "none"])
def test_an_engine_that_moves_to_another_device(stage: str) -> None:
    setup = partial(fakedev.setup, "nccl", shares=False)
    jobs = [
        Job(1, partial(send_versions, waves=many_waves), setup=setup),
        Job(1, receive_moved, (True, stage), setup=setup),
    ]
    (sent,), (received,) = run(jobs)
    if stage == "host":  # which leaves the device out
        assert [version.transport for version in sent] == received == [CCL] * 3
    else:
        assert "no longer all on" in sent[1].error
        assert received == [CCL, "failed", "host"]
        assert sent[2].transport == "host"


@contextmanager
def slow(stream: str) -> Iterator[None]:
    """Whatever a wave has to do on a stream waits for a while, however soon the other streams are done."""
    move, timers = DeviceRoute.move, []

    def moved(self: DeviceRoute, wave: Wave) -> None:
        held = getattr(self._staging, stream)
        fakedev.hold(held)
        timers.append(threading.Timer(0.15, fakedev.release, [held]))
        timers[-1].start()
        move(self, wave)

    with mock.patch.object(DeviceRoute, "move", moved):
        yield
    for timer in timers:
        timer.join()


def send_slowly(rank: int, meeting: Meeting, stream: str, *args: Any) -> list[str]:
    with slow(stream):
        return send(rank, meeting, *args)


def receive_slowly(rank: int, meeting: Meeting, stream: str, *args: Any) -> list[str]:
    with slow(stream):
        return receive(rank, meeting, *args)


@pytest.mark.parametrize(
    ("slow_job", "stream", "stage"),
    [
        ("trainer", "entry", "host"), ("trainer", "spread", "none"), ("trainer", "local", "host"),
        ("engine", "entry", "none"), ("engine", "spread", "host"), ("engine", "local", "none"),
    ],
)  # fmt: skip
def test_no_stream_overtakes_another(slow_job: str, stream: str, stage: str) -> None:
    setup = partial(fakedev.setup, "nccl", shares=False)
    nodes = [[0, 1], [2]]
    # A checksum would make the host wait for the stream.
    sends: list[Any] = [send, ("fsdp", 2, None, DEVICE, 3, {})]
    receives: list[Any] = [receive, ("tp0", 3, nodes, DEVICE, stage, {})]
    if slow_job == "trainer":
        sends = [send_slowly, (stream, *sends[1])]
    else:
        receives = [receive_slowly, (stream, *receives[1])]
    sent, received = run([Job(2, *sends, setup=setup), Job(3, *receives, setup=setup)])
    assert sent + received == [[CCL] * 3] * 5


@pytest.mark.parametrize(("where", "stage"), [("cpu", "host"), (DEVICE, "none")])
def test_what_the_caller_has_queued_comes_before(where: str, stage: str) -> None:
    setup = partial(fakedev.setup, "nccl", shares=False)
    _, received = run([Job(1, send_late, setup=setup), Job(1, receive_late, (where, stage), setup=setup)])
    assert received == [True]
