"""The sender and the receiver of a test, and syncs that take several waves of small models and notice silence soon."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import epload
from epload.sync import liveness, participants
from support.jobs import Meeting
from support.synced_models import build, write


@contextmanager
def many_waves(wave_bytes: int = 20_000, lease_seconds: float = 10.0) -> Iterator[None]:
    """
    Args:
        lease_seconds: after which a silent rank is dropped.
    """
    with (
        mock.patch("epload.sync.joining.SYNC_WAVE_BYTES", wave_bytes),
        mock.patch("epload.sync.changes_route.WAVE_BYTES", wave_bytes),
        mock.patch("epload.planning.schedule.MIN_WAVE_BYTES", 10_000),
        mock.patch("epload.planning.exchange.MIN_BUCKET_BYTES", 5_000),
        mock.patch("epload.planning.exchange.MIN_SLOT_BYTES", 4_000),
        mock.patch.object(liveness, "LEASE_SECONDS", lease_seconds),
        mock.patch.object(participants, "_BEAT_SECONDS", 0.3),
    ):
        yield


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def names_culprit(text: str, rank: str) -> bool:
    """Returns whether an error says which rank has ended: whoever notices first, the watch or a peer of its, says it."""
    return re.search(f"rank {rank} has exited|message (from|to) rank {rank} failed", text) is not None


def attempt(step: Callable[[], Any]) -> tuple[str, Any]:
    """Returns the error's text, or an empty string and the value."""
    try:
        return "", step()
    except (RuntimeError, ValueError) as error:
        return str(error), None


def outcome(step: Callable[[], Any]) -> str:
    return attempt(step)[0]


@contextmanager
def sending(
    meeting: Meeting, model: Any, receivers: int = 1, timeout: float = 60, where: str = "address", **options: Any
) -> Iterator[epload.WeightSender]:
    """Makes a sender, whose address :func:`receiving` hears."""
    with epload.WeightSender(model, ("127.0.0.1", 0), receivers=receivers, timeout=timeout, **options) as sender:
        meeting.say(where, sender.address)
        yield sender


@contextmanager
def receiving(
    meeting: Meeting, model: Any, timeout: float = 60, where: str = "address", **options: Any
) -> Iterator[epload.WeightReceiver]:
    with epload.WeightReceiver(model, meeting.hear(where), timeout=timeout, **options) as receiver:
        yield receiver


def take(receiver: epload.WeightReceiver, version: int | None = None) -> epload.SyncReport:
    """Receives a version and commits it."""
    report = receiver.receive_weights(version)
    receiver.commit()
    return report


def trainer(
    rank: int, meeting: Meeting, world: int, receivers: int, versions: int, pauses: dict[int, str], where: str = "cpu",
    dies: bool = False,
) -> Any:  # fmt: skip
    """Sends versions, and waits before each for what ``pauses`` says. Returns what each raised, and seconds.

    Args:
        dies: whether the last rank does, when it hears of the second.
    """
    with many_waves():
        model = build("fsdp" if world > 1 else "plain", world, where=where)
        outcomes = []
        with sending(meeting, model, receivers) as sender:
            if dies and rank == world - 1:
                threading.Thread(target=lambda: (meeting.hear("in the second"), kill_self()), daemon=True).start()
            for version in range(1, versions + 1):
                if version in pauses:
                    meeting.hear(pauses[version])
                write(model, version)
                began = time.monotonic()
                outcomes.append((outcome(partial(sender.send_weights, version)), time.monotonic() - began))
                if rank == 0:
                    meeting.say(f"tried-{version}")
            meeting.say(f"over-{rank}")
        return outcomes
