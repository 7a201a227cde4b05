"""What happens to both jobs when a rank of either fails: the culprit is named, and whoever lives holds a whole version."""

from __future__ import annotations

import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import epload
from epload.planning.waves import Wave
from epload.ranks import single_flight
from epload.ranks.single_flight import Call
from epload.sync import participants, store
from epload.sync.committed import CommittedTensors
from epload.transfer.engine import Engine
from support import fakedev
from support.accelerator import DEVICE
from support.jobs import Job, Meeting, run
from support.small_syncs import (
    attempt,
    kill_self,
    many_waves,
    names_culprit,
    outcome,
    receiving,
    sending,
    take,
    trainer,
)
from support.sync_jobs import engine, send_model
from support.synced_models import build, check, write


@contextmanager
def at_second_wave(act: Callable[[], None]) -> Iterator[None]:
    """Acts before a wave is moved."""
    move = Engine._move

    def moved(self: Engine, wave: Wave) -> bool:
        if wave.index == 1:
            act()
        return move(self, wave)

    with mock.patch.object(Engine, "_move", moved):
        yield


def receives(
    rank: int, meeting: Meeting, name: str, plan: list[str], stage: str = "host", where: str = "cpu"
) -> list[tuple[str, int | None, bool]]:
    return engine(rank, meeting, name, 1, plan, stage, where, at_second_wave)


PLACES = pytest.mark.parametrize(
    ("semantics", "stage"), [(None, "host"), (None, "none"), ("nccl", "none"), ("hccl", "host")]
)


def place(semantics: str | None) -> tuple[str, Callable[[], str] | None]:
    """Where models are, and the setup of jobs that have them there."""
    return (DEVICE, partial(fakedev.setup, semantics, shares=False)) if semantics is not None else ("cpu", None)


@PLACES
@pytest.mark.usefixtures("fake_device")
def test_a_receiver_that_is_killed_is_named_and_the_others_go_on(stage: str, semantics: str | None) -> None:
    where, setup = place(semantics)
    sent, left, _ = run(
        [
            Job(2, trainer, (2, 2, 3, {}, where), setup=setup),
            Job(1, receives, ("a", ["", "", ""], stage, where), setup=setup),
            Job(1, receives, ("b", ["", "die"], stage, where), dying=(0,), setup=setup),
        ]
    )
    assert [bool(text) for text, _ in sent[0]] == [False, True, False]
    assert names_culprit(sent[0][1][0], "[23]")  # engines join in any order
    assert "engine" in sent[0][1][0]
    assert sent[0][1][0] == sent[1][1][0] == left[0][1][0]
    assert [version for _, version, _ in left[0]] == [1, 1 if stage == "host" else None, 3]
    assert sent[0][1][1] < 10


def test_a_receiver_that_dies_between_versions_is_left_out() -> None:
    sent, left, _ = run(
        [
            Job(1, trainer, (1, 2, 2, {2: "b-0-dies"})),
            Job(1, receives, ("a", ["", ""])),
            Job(1, receives, ("b", ["", "die waiting"]), dying=(0,)),
        ]
    )
    assert [text for text, _ in sent[0]] == ["", ""]
    assert [(text, version) for text, version, _ in left[0]] == [("", 1), ("", 2)]


def late(rank: int, meeting: Meeting) -> int | None:
    meeting.hear("tried-1")
    model = build("tp0", 2)
    with many_waves(), receiving(meeting, model, timeout=20) as receiver:
        meeting.say(f"late-{rank}-joined")
        receiver.receive_weights()
        meeting.say(f"late-{rank}-received")
        receiver.commit()
        check(model, receiver.version)
        return receiver.version


def test_a_receiver_that_joins_late_gets_the_version_of_the_others_or_the_next_one() -> None:
    sent, first, second = run(
        [
            Job(1, trainer, (1, 1, 5, {2: "late-1-joined", 3: "late-0-joined", 5: "late-0-received"})),
            Job(1, receives, ("a", [""] * 5)),
            Job(2, late),
        ]
    )
    assert [text for text, _ in sent[0]] == [""] * 5
    assert [version for _, version, _ in first[0]] == [1, 2, 3, 4, 5]
    assert second[0] == second[1]
    assert second[0] in (1, 2, 3, 4, 5)


def leaving(rank: int, meeting: Meeting) -> None:
    model = build("plain", 1)
    with many_waves(), sending(meeting, model, timeout=20) as sender:
        write(model, 1)
        sender.send_weights(1)
        time.sleep(1.0)
    meeting.say("left")


def busy(rank: int, meeting: Meeting, stage: Any) -> tuple[str, str, float]:
    """Uses a version until long after its sender's process has ended. Returns what the next call says, what native code has
    written meanwhile, and the seconds of the call."""
    with tempfile.TemporaryFile("w+") as log, many_waves():  # whose beats are more frequent
        receiver = epload.WeightReceiver(build("plain", 1), meeting.hear("address"), timeout=20, stage=stage)
        receiver.receive_weights()
        if stage == "host":
            receiver.commit()
        stderr = os.dup(2)
        os.dup2(log.fileno(), 2)
        meeting.hear("left")
        time.sleep(2.5)  # in which both the process and its store end
        began = time.monotonic()
        text = outcome(receiver.receive_weights)
        receiver.close()
        seconds = time.monotonic() - began
        os.dup2(stderr, 2)
        log.seek(0)
        return text, log.read(), seconds


@pytest.mark.parametrize("stage", ["host", "none"])
def test_an_engine_that_is_busy_learns_that_the_sender_was_closed(stage: str) -> None:
    _, ((text, written, seconds),) = run([Job(1, leaving), Job(1, busy, (stage,))])
    assert written == ""
    assert text == "the sender has been closed, and sends no more versions"
    assert seconds < 1.0


def dying_trainer(rank: int, meeting: Meeting, where: str) -> Any:
    with many_waves():
        model = build("fsdp", 2, where=where)
        with sending(meeting, model, timeout=20) as sender:
            write(model, 1)
            sender.send_weights(1)
            write(model, 2)
            with at_second_wave(kill_self) if rank == 1 else nullcontext():
                text = outcome(lambda: sender.send_weights(2))
            meeting.say(f"over-{rank}")
        return text


@PLACES
@pytest.mark.usefixtures("fake_device")
def test_a_trainer_that_is_killed_leaves_the_version_before(stage: str, semantics: str | None) -> None:
    where, setup = place(semantics)
    sent, left = run(
        [
            Job(2, dying_trainer, (where,), dying=(1,), setup=setup),
            Job(1, receives, ("a", ["", ""], stage, where), setup=setup),
        ]
    )
    (_, version, partially_updated) = left[0][1]
    assert names_culprit(sent[0], "1")
    assert left[0][1][0] == sent[0]
    assert (version, partially_updated) == ((1, False) if stage == "host" else (None, True))


@pytest.mark.parametrize("semantics", [None, "nccl"])
@pytest.mark.usefixtures("fake_device")
def test_a_partially_updated_receiver_is_repaired_by_the_next_version(semantics: str | None) -> None:
    where, setup = place(semantics)
    sent, left = run(
        [
            Job(1, trainer, (1, 1, 3, {}, where), setup=setup),
            Job(1, receives, ("a", ["", "fail", ""], "none", where), setup=setup),
        ]
    )
    assert "a broken receiver" in sent[0][1][0]
    assert [(version, partial) for _, version, partial in left[0]] == [(1, False), (None, True), (3, False)]


def asks(rank: int, meeting: Meeting, kind: str) -> str:
    model = build("plain", 1)
    if kind == "shape":
        model.head = torch.nn.Parameter(torch.zeros(4, 4))
    if kind == "names":
        model.extra = torch.nn.Parameter(torch.zeros(4))
    with receiving(meeting, model, timeout=20, verify=kind == "verify") as receiver:
        text = outcome(lambda: receiver.receive_weights(7 if kind == "version" else None))
        assert all(not parameter.any() for parameter in model.parameters())
        return text


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("version", "expected version 7, but the sender announced 1"),
        ("shape", r"head has shape \[16, 41\]"),
        ("names", r"only the receiver has 1 tensor: extra"),
        ("verify", "expected the same verify="),
    ],
)
def test_what_does_not_fit_is_refused_in_both_jobs(kind: str, expected: str) -> None:
    sends = Job(1, send_model, (partial(build, "plain", 1), write))
    ((sent,),), (received,) = run([sends, Job(1, asks, (kind,))])
    for text in (sent, received):
        assert re.search(expected, text), text


def test_receivers_that_do_not_come_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    def alone() -> str:
        model = build("plain", 1)
        with epload.WeightSender(model, ("127.0.0.1", 0), receivers=3, timeout=1) as sender:
            return outcome(lambda: sender.send_weights(1))

    with mock.patch.object(participants, "_WARN_SECONDS", 0.2), caplog.at_level("WARNING"):
        assert "0 receiving ranks ready after 1 s, expected 3" in alone()
    assert [record.getMessage() for record in caplog.records] == [
        "version 1: 0 receiving ranks ready after 0 s, expected 3"
    ]


def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(epload.LoadError, match=f"cannot serve 127.0.0.1:{port}"):
            epload.WeightSender(build("plain", 1), ("127.0.0.1", port), receivers=1, timeout=2)


def test_an_address_of_another_machine_is_an_error_in_time(caplog: pytest.LogCaptureFixture) -> None:
    began = time.monotonic()
    with pytest.raises(epload.LoadError, match=r"cannot serve 192\.0\.2\.1:29600"), caplog.at_level("WARNING"):
        epload.WeightSender(build("plain", 1), "192.0.2.1:29600", receivers=1, timeout=2)
    assert "192.0.2.1 is no address of this machine" in caplog.text
    assert time.monotonic() - began < 30  # torch's own would be 60


def test_another_version_of_epload_is_refused() -> None:
    with (
        epload.WeightSender(build("plain", 1), ("127.0.0.1", 0), receivers=1, timeout=30) as sender,
        mock.patch.object(store, "PROTOCOL", store.PROTOCOL + 1),
        pytest.raises(epload.LoadError, match="install the same version in both jobs"),
    ):
        epload.WeightReceiver(build("plain", 1), sender.address, timeout=30)


def test_a_version_that_is_not_greater_is_refused() -> None:
    with epload.WeightSender(build("plain", 1), ("127.0.0.1", 0), receivers=1, timeout=30) as sender:
        sender._version = 3
        for version in (2, 3):
            message = f"expected version to be greater than 3, the last one sent, got {version}"
            with pytest.raises(ValueError, match=message):
                sender.send_weights(version)


def test_no_sender_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(epload.LoadError, match="no sender answers"):
        epload.WeightReceiver(build("plain", 1), ("127.0.0.1", port), timeout=0.5)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("trainer0:29600", ("trainer0", 29600)),
        ("[::1]:29600", ("::1", 29600)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        (("::1", 29600), ("::1", 29600)),
    ],
)
def test_addresses(address: Any, expected: tuple[str, int]) -> None:
    assert store.parse_address(address) == expected


@pytest.mark.parametrize(
    "address", ["::1:29500", "trainer0", "trainer0:", ":29600", "a:b", "a:-1", "a:65536", ("a", 70000)]
)
def test_addresses_that_say_nothing_are_refused(address: Any) -> None:
    with pytest.raises(ValueError, match="expected an address such as"):
        store.parse_address(address)


# ---- one rank of the sender ----


def troubled_trainer(rank: int, meeting: Meeting, kind: str) -> list[tuple[str, float, list[str]]]:
    """Sends versions; at the second, one rank's other thread is in a load, or its copy of what was sent fails."""
    with many_waves():
        model, outcomes = build("fsdp", 2), []
        with sending(meeting, model, timeout=20, delta="always" if kind == "copy" else "off") as sender:
            for version in range(1, 5):
                write(model, version)
                trouble: Any = nullcontext()
                if version == 2 and kind == "load" and rank == 0:
                    other = Call("load()", sender.topology, object(), threading.Thread())
                    trouble = mock.patch.object(single_flight, "_current", other)
                elif version == 2 and kind == "copy" and rank == 1:
                    trouble = mock.patch.object(CommittedTensors, "commit", side_effect=MemoryError("no room"))
                began = time.monotonic()
                with trouble:
                    text, report = attempt(partial(sender.send_weights, version))
                outcomes.append((text, time.monotonic() - began, report.warnings if report else []))
        return outcomes


def receive_all(rank: int, meeting: Meeting) -> int:
    model = build("plain", 1)
    with many_waves(), receiving(meeting, model, timeout=20) as receiver:
        while receiver.version != 4:
            with suppress(epload.LoadError):
                take(receiver)
                check(model, receiver.version)
    return 4


@pytest.mark.parametrize("kind", ["load", "copy"])
def test_ranks_of_a_sender_go_on_together_after_trouble_of_one(kind: str) -> None:
    sent, received = run([Job(2, troubled_trainer, (kind,)), Job(1, receive_all)])
    assert received == [4]
    for of_rank in sent:
        failed = ["order" in text for text, _, _ in of_rank]
        assert failed == [False, kind == "load", False, False], of_rank
        assert all(seconds < 10 for _, seconds, _ in of_rank), of_rank
    if kind == "copy":
        assert "the next version is sent in full: the copy of this one has failed" in sent[1][1][2][0]


def sender_of_three(rank: int, meeting: Meeting) -> list[str]:
    model, errors = build("plain", 1), []
    with sending(meeting, model) as sender:
        for version in (1, 2, 3):
            write(model, version)
            try:
                sender.send_weights(version)
            except epload.LoadError as error:
                errors.append(f"{version}: {error}")
    return errors


def receiver_that_frees_its_model(rank: int, meeting: Meeting) -> None:
    model = build("plain", 1)
    with receiving(meeting, model, stage="none") as receiver:
        take(receiver)
        model.to("meta")
        with pytest.raises(epload.LoadError, match="is on meta; give the model storage first"):
            take(receiver)
        model.to_empty(device="cpu")
        take(receiver)
        check(model, 3)


def test_a_receiver_without_storage_is_no_mistake_of_the_sender() -> None:
    (errors,), _ = run([Job(1, sender_of_three), Job(1, receiver_that_frees_its_model)])
    assert len(errors) == 1
    assert errors[0].startswith("2: ")
    assert "is on meta" in errors[0]
