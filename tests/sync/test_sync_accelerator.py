"""Models on devices: from one to the other if all ranks of both jobs have theirs there, else through host memory."""

from __future__ import annotations

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
from epload.sync.device_route import Broadcasts, connects
from support import fakedev
from support.accelerator import DEVICE, SEMANTICS
from support.jobs import Job, Meeting, run
from support.small_syncs import many_waves
from support.synced_models import build, check, values, write

pytestmark = pytest.mark.usefixtures("fake_device")


CCL = "fakeccl"
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


@SEMANTICS
@pytest.mark.parametrize(
    ("trainer", "engines", "verify", "options", "transport"),
    [
        (FSDP, [(*TP, "host")], "full", {}, CCL),
        (FSDP, [(*TP, "none")], "full", {}, CCL),
        (("fsdp", 3, [[0, 1], [2]], DEVICE), [("tp0", 4, [[0, 1], [2, 3]], DEVICE, "none")], "buckets", {}, CCL),
        (("tp1", 2, [[0], [1]], DEVICE), [("fsdp", 3, [[0, 1], [2]], DEVICE, "host")], "off", {}, CCL),
        (FSDP, [(*TP, "host"), ("plain", 1, None, DEVICE, "none")], "buckets", {}, CCL),
        (FSDP, [(*TP, "none")], "full", {"transport": "host"}, "host"),
        (FSDP, [(*TP, "host")], "full", {"snapshot": "host"}, "host"),
        (("plain", 1, None, DEVICE), [("tp0", 2, None, "cpu", "none")], "buckets", {}, "host"),
        (("tp0", 2, None, "cpu"), [("plain", 1, None, DEVICE, "none")], "full", {}, "host"),
        (FSDP, [("plain", 1, None, DEVICE, "none"), ("plain", 1, None, "cpu", "host")], "off", {}, "host"),
    ],
    ids=[
        "host", "none", "nodes in place", "nodes", "engines that differ", "host transport", "snapshot", "trainer", "engine",
        "one engine on CPU",
    ],
)  # fmt: skip
def test_models_on_a_device(
    trainer: Any, engines: list[Any], verify: str, options: Any, transport: str, semantics: str
) -> None:
    setup = partial(fakedev.setup, semantics)
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
        (["cuda nccl", "cuda nccl"], ["GPU-1", "GPU-2"], True),
        (["cuda nccl", "cuda nccl"], ["GPU-1", "GPU-1"], False),
        (["cuda nccl", "cuda nccl"], ["", ""], True),
        (["cuda nccl", "npu hccl"], ["", ""], False),
        (["cuda nccl", ""], ["GPU-1", ""], False),
        (["", ""], ["", ""], False),
    ],
    ids=["two GPUs", "one GPU", "not known", "GPU and NPU", "GPU and CPU", "CPU"],
)
def test_which_ranks_reach_each_other_from_their_devices(kinds: list[str], places: list[str], expected: bool) -> None:
    assert connects(kinds, places) == expected


@contextmanager
def slow(stream: str) -> Iterator[None]:
    """Whatever a wave has to do on a stream waits for a while, however soon the other streams are done."""
    move, timers = Broadcasts.move, []

    def moved(self: Broadcasts, wave: Wave) -> None:
        held = getattr(self._route.staging, stream)
        fakedev.hold(held)
        timers.append(threading.Timer(0.15, fakedev.release, [held]))
        timers[-1].start()
        move(self, wave)

    with mock.patch.object(Broadcasts, "move", moved):
        yield
    for timer in timers:
        timer.join()


def send_slowly(rank: int, meeting: Meeting, stream: str, *args: Any) -> list[str]:
    with slow(stream):
        return send(rank, meeting, *args)


def receive_slowly(rank: int, meeting: Meeting, stream: str, *args: Any) -> list[str]:
    with slow(stream):
        return receive(rank, meeting, *args)


@pytest.mark.parametrize("stage", ["host", "none"])
@pytest.mark.parametrize("stream", ["entry", "spread", "local"])
@pytest.mark.parametrize("slow_job", ["trainer", "engine"])
def test_no_stream_overtakes_another(slow_job: str, stream: str, stage: str) -> None:
    setup = partial(fakedev.setup, "nccl")
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


def send_late(rank: int, meeting: Meeting) -> None:
    """The weights are still being written on the caller's stream when they are sent."""
    model = build("plain", 1, where=DEVICE)
    with epload.WeightSender(model, ("127.0.0.1", 0), receivers=1, timeout=60) as sender:
        meeting.say("address", sender.address)
        caller = torch.Stream(DEVICE)
        full = values("big", 1).to(DEVICE)
        with caller:
            fakedev.hold(caller)
            with torch.no_grad():
                model.big.copy_(full)
            opener = threading.Thread(target=lambda: (time.sleep(0.5), fakedev.release(caller)))
            opener.start()
            sender.send_weights(1)
        opener.join()


def receive_late(rank: int, meeting: Meeting, where: str, stage: str) -> bool:
    """What the caller has queued reads the weights before they are replaced."""
    model = build("plain", 1, where=where)
    with epload.WeightReceiver(model, meeting.hear("address"), timeout=60, stage=stage) as receiver:
        if where == "cpu":
            receiver.receive_weights()
            receiver.commit()
            return torch.equal(model.big.detach(), values("big", 1))
        caller = torch.Stream(where)
        with caller:
            fakedev.hold(caller)
            seen = model.big.detach().clone()
            opener = threading.Thread(target=lambda: (time.sleep(1), fakedev.release(caller)))
            opener.start()
            receiver.receive_weights()
            receiver.commit()
            found = model.big.detach().clone()
        opener.join()
        caller.synchronize()
        return not seen.cpu().any() and torch.equal(found.cpu(), values("big", 1))


@pytest.mark.parametrize(("where", "stage"), [("cpu", "host"), (DEVICE, "host"), (DEVICE, "none")])
def test_what_the_caller_has_queued_comes_before(where: str, stage: str) -> None:
    setup = partial(fakedev.setup, "nccl")
    _, received = run([Job(1, send_late, setup=setup), Job(1, receive_late, (where, stage), setup=setup)])
    assert received == [True]
