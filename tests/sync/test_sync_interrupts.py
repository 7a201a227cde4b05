"""A rank of either job is interrupted, which its caller catches: nobody waits for it, and nothing torn is a version."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest

from epload.sync import changes_route
from epload.sync.generation import Generation
from support.jobs import Job, Meeting, run
from support.small_syncs import attempt, outcome, receiving, sending, take
from support.synced_models import build, check, write

TIMEOUT = 60.0
"""More than the test takes, so that who waits for the other side fails it."""


class InterruptedOnce:
    """:meth:`Generation.sync`, but interrupted in place of its second call."""

    calls = 0
    sync = Generation.sync

    def __get__(self, generation: Generation, owner: type) -> Callable[..., None]:
        self.calls += 1
        if self.calls == 2:
            raise KeyboardInterrupt
        return partial(InterruptedOnce.sync, generation)


def outcome_or_interrupt(step: Callable[[], Any]) -> str:
    try:
        return outcome(step)
    except KeyboardInterrupt:
        return "interrupted"


def sender(rank: int, meeting: Meeting, sync: Any) -> list[str]:
    model, outcomes = build("plain", 1), []
    with sending(meeting, model, timeout=TIMEOUT) as sender, mock.patch.object(Generation, "sync", sync):
        for version in (1, 2, 3):
            write(model, version)
            outcomes.append(outcome_or_interrupt(partial(sender.send_weights, version)))
    return outcomes


def receiver(rank: int, meeting: Meeting, sync: Any) -> list[str]:
    model = build("plain", 1)
    with receiving(meeting, model, timeout=TIMEOUT) as receiver, mock.patch.object(Generation, "sync", sync):
        outcomes = [outcome_or_interrupt(partial(take, receiver)) for _ in range(3)]
        check(model, 3)
    return outcomes


@pytest.mark.parametrize("of_sender", [True, False])
def test_nobody_waits_for_a_rank_that_is_interrupted_before_a_version(of_sender: bool) -> None:
    syncs = [InterruptedOnce(), Generation.sync]
    (sent,), (received,) = run([Job(1, sender, (syncs[not of_sender],)), Job(1, receiver, (syncs[of_sender],))])
    own, others = (sent, received) if of_sender else (received, sent)
    assert own == ["", "interrupted", ""]
    assert [others[0], others[2]] == ["", ""]
    assert "was interrupted before the version (KeyboardInterrupt)" in others[1]


def hasty(rank: int, meeting: Meeting) -> tuple[str, str]:
    """Is interrupted while a version is compared, and changes the model at once."""
    model, changed, compare = build("plain", 1), threading.Event(), changes_route.compare

    def interrupts(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        assert changed.wait(30)
        return compare(*arguments)

    with sending(meeting, model, timeout=TIMEOUT, snapshot="host", delta="always") as sender:
        write(model, 1)
        sender.send_weights(1)
        write(model, 2)
        with mock.patch.object(changes_route, "compare", interrupts), pytest.raises(KeyboardInterrupt):
            sender.send_weights(2, wait=False)
        write(model, 3)
        changed.set()
        failed = outcome(sender.wait)
        sender.send_weights(4, wait=False)
        write(model, 5)
        return failed, sender.wait().why_full


def patient(rank: int, meeting: Meeting) -> tuple[str, int | None]:
    model = build("plain", 1)
    with receiving(meeting, model, timeout=TIMEOUT) as receiver:
        take(receiver)
        text, _ = attempt(receiver.receive_weights)
        check(model, 1)
        take(receiver)
        check(model, 3)  # which version 4 has
        return text, receiver.version


def test_a_model_that_changes_after_an_interrupt_is_no_version() -> None:
    ((failed, _),), ((text, version),) = run([Job(1, hasty), Job(1, patient)])
    assert "interrupted before the weights were copied" in failed
    assert "interrupted before the weights were copied" in text
    assert version == 4
