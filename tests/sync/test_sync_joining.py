"""Engines that join late get the version that others have from these, while the trainer does something else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
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
from support.small_syncs import kill_self, many_waves, outcome
from support.synced_models import build, check, write

BF16, FP32 = torch.bfloat16, torch.float32


class Outcome(NamedTuple):
    """Describes how an engine's rank came by a version."""

    version: int
    from_engines: bool
    receivers: int


def send(
    rank: int, meeting: Meeting, world: int, receivers: int, joining: int, options: dict[str, Any],
    seconds: tuple[tuple[str, float], ...] = (), joined: tuple[int, ...] | None = None,
) -> list[int]:  # fmt: skip
    """Sends a version to those that are there, and another one once all that join have that; returns the numbers of receivers.

    Args:
        joining: ranks that join after the first version.
        seconds: names and values of waits of the thread that brings engines together.
        joined: numbers of the ranks that have it before the second is sent; all that join if None.
    """
    patched = mock.patch.multiple(handing_on, **dict(seconds)) if seconds else nullcontext()
    with many_waves(), patched:
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
def calling(before_packing: Callable[[], None]) -> Iterator[None]:
    """``before_packing``: called before a receiver packs a bucket."""
    pack = Shards.pack

    def call(shards: Shards, number: int, buffer: Tensor) -> None:
        before_packing()
        pack(shards, number, buffer)

    with mock.patch.object(Shards, "pack", call):
        yield


def receive(
    rank: int, meeting: Meeting, world: int, layout: str, late: int | None = None, stage: str = "host",
    dtype: torch.dtype = FP32, verify: bool = False, versions: tuple[int, ...] = (1, 2), dies: bool = False,
    together: int = 0, pause: float = 0.0,
) -> list[Outcome]:  # fmt: skip
    """Receives versions.

    Args:
        late: number of the first rank if the engine joins after the first version.
        dies: whether this rank does as it hands on a version.
        together: engines of one rank that ask for the first version at the same time.
        pause: seconds until this rank asks for the next version.
    """
    with many_waves(), calling(kill_self) if dies else nullcontext():
        model, outcomes = build(layout, world, dtype), []
        address = meeting.hear("address")
        if late is not None:
            meeting.hear("sent-1")
        with epload.WeightReceiver(model, address, timeout=30, stage=stage, verify=verify) as receiver:
            meeting.say(f"there-{late}")
            for number in range(together):
                meeting.hear(f"there-{number}")
            for version in versions:
                report = receiver.receive_weights()
                receiver.commit()
                assert (receiver.version, receiver.partially_updated) == (version, False)
                check(model, version)
                outcomes.append(Outcome(version, report.from_engines, report.receivers))
                if version == 1 and late is not None:
                    meeting.say(f"joined-{late + rank}")
                time.sleep(pause)
                if dies:
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


def test_the_next_version_waits_for_an_engine_that_has_just_joined() -> None:
    """Also if the thread that brought it together with others has not seen yet that it has the version."""
    sent, _, joined = jobs.run(
        [
            Job(1, send, (1, 1, 1, {}, (("_POLL_SECONDS", 2.0),))),
            Job(1, receive, (1, "plain")),
            Job(1, partial(receive, pause=0.5), (1, "plain", 0)),
        ]
    )
    assert sent == [[1, 2]]
    assert joined == [[Outcome(1, True, 1), Outcome(2, False, 2)]]


def test_engines_that_join_together_get_it_in_one_go_and_hand_it_on() -> None:
    """A fourth one gets it from all of them, also from those that have it from others."""
    sent, first, *joined = jobs.run(
        [
            Job(1, send, (1, 1, 4, {}, (("_GATHER_SECONDS", 2.0),))),
            Job(1, receive, (1, "plain")),
            *(Job(1, partial(receive, together=3), (1, "plain", number)) for number in range(3)),
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


def keep_sending(rank: int, meeting: Meeting) -> int:
    """Sends versions until an engine that joins late takes part; returns the last."""
    with many_waves():
        model, version, receivers = build("plain", 1), 0, 0
        with epload.WeightSender(model, ("127.0.0.1", 0), receivers=1, timeout=30) as sender:
            meeting.say("address", sender.address)
            while receivers < 2:
                version += 1
                write(model, version)
                report = sender.send_weights(version)
                assert report is not None
                receivers = report.receivers
                if version == 1:
                    meeting.say("sent-1")
                    meeting.hear("joining")
        return version


def keep_receiving(rank: int, meeting: Meeting, dtype: torch.dtype, late: bool, stage: str = "host") -> list[bool]:
    with many_waves():
        model, reports = build("plain", 1, dtype), []
        address = meeting.hear("address")
        if late:
            meeting.hear("sent-1")
        with epload.WeightReceiver(model, address, timeout=30, stage=stage) as receiver:
            if late:
                meeting.say("joining")
            while True:
                reports.append(receiver.receive_weights())
                receiver.commit()
                assert receiver.version is not None
                check(model, receiver.version)
                if reports[-1].receivers == 2:
                    return [report.from_engines for report in reports]


def test_an_engine_takes_part_soon_if_no_engine_can_hand_a_version_on() -> None:
    """Versions are open for a moment only, which the engine that joins must not miss."""
    versions, _, joined = jobs.run(
        [Job(1, keep_sending), Job(1, keep_receiving, (FP32, False, "none")), Job(1, keep_receiving, (FP32, True))]
    )
    assert joined == [[False]]
    assert versions[0] < 20


def fail_first(rank: int, meeting: Meeting) -> list[str]:
    with many_waves():
        model = build("plain", 1)
        with epload.WeightSender(model, ("127.0.0.1", 0), receivers=1, timeout=30) as sender:
            meeting.say("address", sender.address)
            errors = []
            for version in (1, 2):
                write(model, version)
                errors.append(outcome(partial(sender.send_weights, version)))
            meeting.say("sent-2")
            meeting.hear("joined")
    return errors


def fails_first(rank: int, meeting: Meeting) -> None:
    with many_waves():
        model = build("plain", 1)
        with epload.WeightReceiver(model, meeting.hear("address"), timeout=30) as receiver:
            assert "expected version 99" in outcome(partial(receiver.receive_weights, 99))
            receiver.receive_weights(2)
            meeting.hear("joined")


def joins_after_a_failure(rank: int, meeting: Meeting) -> bool:
    with many_waves():
        model, address = build("plain", 1), meeting.hear("address")
        meeting.hear("sent-2")
        with epload.WeightReceiver(model, address, timeout=30) as receiver:
            report = receiver.receive_weights(2)
            receiver.commit()
            check(model, 2)
            meeting.say("joined")
            return report.from_engines


def test_an_engine_that_has_failed_once_hands_on_the_next_version() -> None:
    (errors,), _, joined = jobs.run([Job(1, fail_first), Job(1, fails_first), Job(1, joins_after_a_failure)])
    assert [bool(error) for error in errors] == [True, False]
    assert joined == [True]


def test_an_engine_waits_for_the_sender_if_others_have_rounded_the_weights() -> None:
    """Others have in bfloat16 not what the sender has in float32."""
    _, _, joined = jobs.run(
        [Job(1, keep_sending), Job(1, keep_receiving, (BF16, False)), Job(1, keep_receiving, (FP32, True))]
    )
    assert joined == [[False]]


def test_a_rank_that_dies_while_it_hands_a_version_on_is_replaced() -> None:
    sent, _, left, joined = jobs.run(
        [
            Job(1, send, (1, 2, 1, {})),
            Job(1, receive, (1, "plain", None, "host", FP32, False, (1,), True), dying=(0,)),
            Job(1, receive, (1, "plain")),
            Job(1, receive, (1, "plain", 0)),
        ]
    )
    assert sent == [[2, 2]]
    assert left == [[Outcome(1, False, 2), Outcome(2, False, 2)]]
    assert joined == [[Outcome(1, True, 1), Outcome(2, False, 2)]]


def send_meanwhile(rank: int, meeting: Meeting) -> None:
    """Sends a version while the one before is handed on."""
    with many_waves():
        model = build("plain", 1)
        with epload.WeightSender(model, ("127.0.0.1", 0), receivers=1, timeout=30) as sender:
            meeting.say("address", sender.address)
            for version, event in ((1, "handing on"), (2, "joined")):
                write(model, version)
                report = sender.send_weights(version)
                assert report is not None
                assert report.receivers == 1
                meeting.say(f"sent-{version}")
                meeting.hear(event)


def hold(rank: int, meeting: Meeting) -> None:
    def wait_for_next() -> None:
        meeting.say("handing on")
        meeting.hear("sent-2")

    with many_waves(), calling(wait_for_next):
        model = build("plain", 1)
        with epload.WeightReceiver(model, meeting.hear("address"), timeout=30) as receiver:
            for version in (1, 2):
                receiver.receive_weights(version)
                receiver.commit()
                check(model, version)
            meeting.hear("joined")


def join(rank: int, meeting: Meeting) -> None:
    with many_waves():
        model = build("plain", 1)
        address = meeting.hear("address")
        meeting.hear("sent-1")
        with epload.WeightReceiver(model, address, timeout=30) as receiver:
            report = receiver.receive_weights()
            assert (report.version, report.from_engines) == (2, True)
            receiver.commit()
            check(model, 2)
            meeting.say("joined")


def test_the_next_version_does_not_wait_for_one_that_is_handed_on() -> None:
    """The engine that joins gets the next version, and not a mixture of both."""
    jobs.run([Job(1, send_meanwhile), Job(1, hold), Job(1, join)])
