"""Models on a device, on either side or on both: they go through host memory."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

import epload
from support import fakedev
from support.accelerator import DEVICE, SEMANTICS
from support.jobs import Job, Meeting, run
from support.synced_models import build, check, values, write

pytestmark = pytest.mark.usefixtures("fake_device")


def send(rank: int, meeting: Meeting, layout: str, world: int, where: str, receivers: int, verify: str) -> None:
    model = build(layout, world, where=where)
    with epload.WeightSender(model, ("127.0.0.1", 0), receivers=receivers, timeout=60, verify=verify) as sender:
        if rank == 0:
            meeting.say("address", sender.address)
        for version in (1, 2):
            write(model, version)
            sender.send_weights(version)


def receive(rank: int, meeting: Meeting, layout: str, world: int, where: str, stage: str, verify: str) -> None:
    model = build(layout, world, torch.bfloat16, where)
    with epload.WeightReceiver(model, meeting.hear("address"), timeout=60, stage=stage, verify=verify) as receiver:
        for version in (1, 2):
            receiver.receive_weights(version)
            receiver.commit()
            check(model, version)


@SEMANTICS
@pytest.mark.parametrize(
    ("trainer", "engine", "stage", "verify"),
    [
        (("fsdp", 2, DEVICE), ("tp1", 2, DEVICE), "host", "full"),
        (("plain", 1, DEVICE), ("tp0", 2, "cpu"), "none", "buckets"),
        (("tp0", 2, "cpu"), ("plain", 1, DEVICE), "none", "full"),
    ],
    ids=["both", "trainer", "engine"],
)
def test_models_on_a_device(trainer: Any, engine: Any, stage: str, verify: str, semantics: str) -> None:
    setup = partial(fakedev.setup, semantics)
    (layout, world, where), (theirs, count, there) = trainer, engine
    run(
        [
            Job(world, send, (layout, world, where, count, verify), setup=setup),
            Job(count, receive, (theirs, count, there, stage, verify), setup=setup),
        ]
    )


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


def receive_late(rank: int, meeting: Meeting) -> bool:
    model = build("plain", 1)
    with epload.WeightReceiver(model, meeting.hear("address"), timeout=60) as receiver:
        receiver.receive_weights()
        receiver.commit()
    return torch.equal(model.big.detach(), values("big", 1))


def test_what_the_caller_has_queued_comes_before() -> None:
    setup = partial(fakedev.setup, "nccl")
    _, received = run([Job(1, send_late, setup=setup), Job(1, receive_late, setup=setup)])
    assert received == [True]
