"""Engines that join late get the version that others have from these, while the trainer does something else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from epload.ranks.messages import read_if_set
from epload.sync import handing_on
from epload.sync.handing_on import WAITING, Holder, Offers
from epload.sync.participants import SenderRendezvous
from epload.transfer.shards import Shards
from support import jobs
from support.jobs import Job, Meeting
from support.small_syncs import attempt, kill_self, many_waves, outcome, receiving, sending, take
from support.synced_models import build, check, write

BF16, FP32 = torch.bfloat16, torch.float32
Outcome = tuple[int, bool, int]
"""A version, whether it came from engines, and the receivers that got it at once."""


def send(
    rank: int, meeting: Meeting, world: int, receivers: int, events: dict[int, tuple[str, ...]],
    within: Callable[[], AbstractContextManager[Any]] = nullcontext, **options: Any,
) -> list[int | str]:  # fmt: skip
    """Sends two versions, and waits for ``events`` after each; returns the numbers of receivers, or the error."""
    with many_waves(), within():
        model = build("fsdp" if world > 1 else "plain", world)
        outcomes: list[int | str] = []
        with sending(meeting, model, receivers, timeout=30, **options) as sender:
            for version in (1, 2):
                write(model, version)
                text, report = attempt(partial(sender.send_weights, version))
                outcomes.append(text or report.receivers)
                meeting.say(f"sent-{version}")
                write(model, -1)  # nobody reads it now
                for event in events.get(version, ()):
                    meeting.hear(event)
    return outcomes


def joined(*numbers: int) -> dict[int, tuple[str, ...]]:
    """Returns the events after the first version: these ranks have it."""
    return {1: tuple(f"joined-{number}" for number in numbers)}


@contextmanager
def calling(before_packing: Callable[[bool], None]) -> Iterator[None]:
    """A receiver learns that it holds a version once it hands none on any more.

    Args:
        before_packing: called before it packs a bucket, with True if that is the last one.
    """
    pack, hold = Shards.pack, Holder.hold

    def call(shards: Shards, number: int, buffer: Tensor) -> None:
        before_packing(number == len(shards._plan.buckets) - 1)
        pack(shards, number, buffer)

    def hold_later(holder: Holder, *args: Any) -> None:
        while holder._generation is not None:
            time.sleep(0.01)
        hold(holder, *args)

    with mock.patch.object(Shards, "pack", call), mock.patch.object(Holder, "hold", hold_later):
        yield


def receive(
    rank: int, meeting: Meeting, layout: str, number: int | None = None, after: str = "sent-1", stage: str = "host",
    dtype: torch.dtype = FP32, verify: bool = False, versions: tuple[int, ...] = (1, 2),
    packing: Callable[[Meeting, bool], None] | None = None, until: str = "", together: int = 0, pause: float = 0.0,
    senders: int = 0,
) -> list[Outcome]:  # fmt: skip
    """Receives versions; an engine with a ``number``, that of its first rank, joins ``after`` events, and says who has a version.
    ``packing`` is called before a rank packs a bucket that it hands on. It asks ``together`` with so many others, and leaves
    after the event ``until``. ``senders``: ranks from which it gets its first version, if known."""
    with many_waves(), calling(partial(packing, meeting)) if packing is not None else nullcontext():
        model, outcomes = build(layout, 1 if layout == "plain" else 2, dtype), []
        for event in after.split() if number is not None else ():
            meeting.hear(event)
        with receiving(meeting, model, timeout=30, stage=stage, verify=verify) as receiver:
            meeting.say(f"there-{number}")
            for other in range(together):
                meeting.hear(f"there-{other}")
            for version in versions:
                report = take(receiver)
                assert (receiver.version, receiver.partially_updated) == (version, False)
                check(model, version)
                outcomes.append((version, report.from_engines, report.receivers))
                if version == versions[0] and number is not None:
                    assert senders in (0, report.senders)
                    meeting.say(f"joined-{number + rank}")
                time.sleep(pause)
            if until:
                meeting.hear(until)
    return outcomes


@pytest.mark.parametrize(
    ("stage", "options", "dtype"),
    [
        ("host", {}, FP32), ("none", {"delta": "always"}, FP32), ("device", {"verify": True}, FP32),
        ("host", {"delta": "always", "verify": True}, BF16),
    ],
)  # fmt: skip
def test_an_engine_that_joins_gets_the_version(stage: str, options: dict[str, Any], dtype: Any) -> None:
    receives = partial(receive, dtype=dtype, verify=bool(options.get("verify")))
    sent, first, second = jobs.run(
        [
            Job(2, partial(send, **options), (2, 2, joined(0, 1))),
            Job(2, receives, ("tp0",)),
            Job(2, partial(receives, stage=stage), ("tp1", 0)),
        ]
    )
    assert sent == [[2, 4]] * 2
    assert first == [[(1, False, 2), (2, False, 4)]] * 2
    assert second == [[(1, True, 2), (2, False, 4)]] * 2


def test_the_next_version_waits_for_an_engine_that_has_just_joined() -> None:
    """Also if the thread that brought it together with others has not seen yet that it has the version."""
    sent, _, late = jobs.run(
        [
            Job(1, partial(send, within=partial(mock.patch, "epload.sync.handing_on._POLL_SECONDS", 2.0)), (1, 1, joined(0))),
            Job(1, receive, ("plain",)),
            Job(1, partial(receive, pause=0.5), ("plain", 0)),
        ]
    )
    assert sent == [[1, 2]]
    assert late == [[(1, True, 1), (2, False, 2)]]


@contextmanager
def bringing_three_together() -> Iterator[None]:
    """The first engines to which a version is handed on are three, and all that are called answer, however long it takes."""
    gather, calls = Offers._gather, list[str]()

    def gather_three(self: Offers, rendezvous: SenderRendezvous, *args: Any) -> Any:
        while not calls and len(rendezvous.ready_engines()[1]) < 3:
            time.sleep(0.01)
        calls.append("")
        return gather(self, rendezvous, *args)

    with mock.patch.object(handing_on, "_ANSWER_SECONDS", 30.0), mock.patch.object(Offers, "_gather", gather_three):
        yield


def test_engines_that_join_together_get_it_in_one_go_and_hand_it_on() -> None:
    """A fourth one gets it from all of them, also from those that have it from others."""
    sent, first, *late = jobs.run(
        [
            Job(1, partial(send, within=bringing_three_together), (1, 1, joined(0, 1, 2, 3))),
            Job(1, receive, ("plain",)),
            *(Job(1, partial(receive, together=3), ("plain", number)) for number in range(3)),
            Job(1, partial(receive, after="joined-0 joined-1 joined-2", senders=4), ("plain", 3)),
        ]
    )
    assert sent == [[1, 5]]
    assert first == [[(1, False, 1), (2, False, 5)]]
    assert late == [[[(1, True, 3), (2, False, 5)]]] * 3 + [[[(1, True, 1), (2, False, 5)]]]


def send_once_one_waits(rank: int, meeting: Meeting) -> int:
    """Sends a version, and the next once an engine waits for it. Returns the receivers of that."""
    model = build("plain", 1)
    with many_waves(), sending(meeting, model, timeout=30) as sender:
        for version in (1, 2):
            while version == 2 and not read_if_set(sender._store, WAITING):
                time.sleep(0.01)
            write(model, version)
            receivers = sender.send_weights(version).receivers
            meeting.say(f"sent-{version}")
    return receivers


@pytest.mark.parametrize(("dtype", "stage"), [(FP32, "none"), (BF16, "host")])
def test_the_next_version_waits_for_an_engine_if_no_engine_can_hand_one_on(dtype: torch.dtype, stage: str) -> None:
    """Versions are open for a moment only, which the engine that joins must not miss. Others have none in host memory, or have in
    bfloat16 not what the sender has in float32."""
    sent, _, late = jobs.run(
        [
            Job(1, send_once_one_waits),
            Job(1, partial(receive, dtype=dtype, stage=stage), ("plain",)),
            Job(1, partial(receive, versions=(2,)), ("plain", 0)),
        ]
    )
    assert sent == [2]
    assert late == [[(2, False, 2)]]


def fails_first(rank: int, meeting: Meeting) -> None:
    with many_waves(), receiving(meeting, build("plain", 1), timeout=30) as receiver:
        assert "expected version 99" in outcome(partial(receiver.receive_weights, 99))
        receiver.receive_weights(2)
        meeting.hear("joined-0")


def test_an_engine_that_has_failed_once_hands_on_the_next_version() -> None:
    late = partial(receive, after="sent-2", versions=(2,))
    sends = Job(1, send, (1, 1, {2: ("joined-0",)}))
    (sent,), _, received = jobs.run([sends, Job(1, fails_first), Job(1, late, ("plain", 0))])
    assert "expected version 99" in sent[0]
    assert sent[1] == 1
    assert received == [[(2, True, 1)]]


def die(meeting: Meeting, is_last: bool) -> None:
    kill_self()


def test_a_rank_that_dies_while_it_hands_a_version_on_is_replaced() -> None:
    dying = partial(receive, versions=(1,), packing=die, until="sent-2")
    sent, _, left, late = jobs.run(
        [
            Job(1, send, (1, 2, joined(0))),
            Job(1, dying, ("plain",), dying=(0,)),
            Job(1, receive, ("plain",)),
            Job(1, receive, ("plain", 0)),
        ]
    )
    assert sent == [[2, 2]]
    assert left == [[(1, False, 2), (2, False, 2)]]
    assert late == [[(1, True, 1), (2, False, 2)]]


def wait_for_next(meeting: Meeting, is_last: bool) -> None:
    if is_last:
        meeting.say("handing on")
        meeting.hear("sent-2")


def test_the_next_version_does_not_wait_for_one_that_is_handed_on() -> None:
    """The engine that joins gets the next version, and not a mixture of both, with the last bucket of the next."""
    sent, _, late = jobs.run(
        [
            Job(1, send, (1, 1, {1: ("handing on",), 2: ("joined-0",)})),
            Job(1, partial(receive, packing=wait_for_next, until="joined-0"), ("plain",)),
            Job(1, partial(receive, versions=(2,)), ("plain", 0)),
        ]
    )
    assert sent == [[1, 1]]
    assert late == [[(2, True, 1)]]
