"""Engines that join late get the version that others have from these, while the trainer does something else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

import epload
from epload.sync import handing_on
from epload.transfer.shards import Shards
from support import jobs
from support.jobs import Job, Meeting
from support.small_syncs import kill_self, many_waves
from support.synced_models import build, check, write

BF16, FP32 = torch.bfloat16, torch.float32


class Outcome(NamedTuple):
    """Describes how an engine's rank came by a version."""

    version: int
    from_engines: bool
    receivers: int


def send(
    rank: int, meeting: Meeting, world: int, receivers: int, joining: int, options: dict[str, Any],
    gather_seconds: float = 0.1, joined: tuple[int, ...] | None = None,
) -> list[int]:  # fmt: skip
    """Sends a version to those that are there, and another one once all that join have that; returns the numbers of receivers.

    Args:
        joining: ranks that join after the first version.
        joined: numbers of the ranks that have it before the second is sent; all that join if None.
    """
    with many_waves(), mock.patch.object(handing_on, "_GATHER_SECONDS", gather_seconds):
        model = build("fsdp" if world > 1 else "plain", world)
        counts = []
        with epload.WeightSender(model, ("127.0.0.1", 0), receivers=receivers, timeout=30, **options) as sender:
            if rank == 0:
                meeting.say("address", sender.address)
            for version in (1, 2):
                write(model, version)
                report = sender.send_weights(version)
                assert report is not None
                counts.append(report.receivers)
                meeting.say(f"sent-{version}")
                if version == 1:
                    write(model, -1)  # nobody reads it now
                    for number in range(joining) if joined is None else joined:
                        meeting.hear(f"joined-{number}")
    return counts


@contextmanager
def slow_packing(call: Any = lambda: None) -> Iterator[None]:
    """Packing a bucket calls something first."""
    pack = Shards.pack

    def slow(shards: Shards, number: int, buffer: Tensor) -> None:
        if threading.current_thread().name != "MainThread":
            call()
        pack(shards, number, buffer)

    with mock.patch.object(Shards, "pack", slow):
        yield


def receive(
    rank: int, meeting: Meeting, world: int, layout: str, late: int | None = None, stage: str = "host",
    dtype: torch.dtype = FP32, verify: bool = False, versions: tuple[int, ...] = (1, 2), act: str = "", node: str = "",
) -> list[Outcome]:  # fmt: skip
    """Receives versions.

    Args:
        late: number of the first rank if the engine joins after the first version.
        act: what happens in the middle of a version that this rank hands on.
    """

    def acting() -> None:
        meeting.say(f"hands-on-{node}")
        if act == "die":
            kill_self()
        if act == "next":
            meeting.hear("sent-2")

    with many_waves(), slow_packing(acting) if act else nullcontext():
        model, outcomes = build(layout, world, dtype), []
        address = meeting.hear("address")
        if late is not None:
            meeting.hear("sent-1")
        with epload.WeightReceiver(model, address, timeout=30, stage=stage, verify=verify, node=node) as receiver:
            for version in versions:
                report = receiver.receive_weights()
                receiver.commit()
                assert (receiver.version, receiver.partially_updated) == (version, False)
                check(model, version)
                outcomes.append(Outcome(version, report.from_engines, report.receivers))
                if version == 1 and late is not None:
                    meeting.say(f"joined-{late + rank}")
                if act:
                    meeting.hear("sent-2")
    return outcomes


@pytest.mark.parametrize(
    ("stage", "options", "dtype"),
    [
        ("host", {}, FP32),
        ("none", {"delta": "always"}, FP32),
        ("device", {"verify": True}, FP32),
        ("host", {"delta": "always", "verify": True}, BF16),
    ],
)
def test_an_engine_that_joins_gets_the_version_of_the_others(
    stage: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    verify = bool(options.get("verify"))
    sent, first, second = jobs.run(
        [
            Job(2, send, (2, 2, 2, options)),
            Job(2, receive, (2, "tp0", None, "host", dtype, verify)),
            Job(2, receive, (2, "tp1", 0, stage, dtype, verify)),
        ]
    )
    assert sent == [[2, 4]] * 2
    assert first == [[Outcome(1, False, 2), Outcome(2, False, 4)]] * 2
    assert second == [[Outcome(1, True, 2), Outcome(2, False, 4)]] * 2


def test_engines_that_join_together_get_it_in_one_go_and_hand_it_on() -> None:
    """A fourth one gets it from all of them, also from those that have it from others."""
    sent, first, *joined = jobs.run(
        [
            Job(1, send, (1, 1, 4, {}, 2.0)),
            Job(1, receive, (1, "plain")),
            *(Job(1, receive, (1, "plain", number)) for number in range(3)),
            Job(1, joins_after_others, ()),
        ]
    )
    assert sent == [[1, 5]]
    assert first == [[Outcome(1, False, 1), Outcome(2, False, 5)]]
    assert joined[:3] == [[[Outcome(1, True, 3), Outcome(2, False, 5)]]] * 3
    assert joined[3] == [4]


def joins_after_others(rank: int, meeting: Meeting) -> int:
    for number in range(3):
        meeting.hear(f"joined-{number}")
    with many_waves():
        model = build("plain", 1)
        with epload.WeightReceiver(model, meeting.hear("address"), timeout=30) as receiver:
            report = receiver.receive_weights()
            receiver.commit()
            check(model, 1)
            meeting.say("joined-3")
            receiver.receive_weights(2)
            receiver.commit()
            check(model, 2)
            return report.senders


def test_an_engine_waits_for_the_sender_if_others_have_rounded_the_weights() -> None:
    sent, _, second = jobs.run(
        [
            Job(1, send, (1, 1, 1, {}, 0.1, ())),
            Job(1, receive, (1, "plain", None, "host", BF16)),
            Job(1, receive, (1, "plain", 0, "host", FP32, False, (2,))),
        ]
    )
    assert second == [[Outcome(2, False, 2)]]
    assert sent == [[1, 2]]
