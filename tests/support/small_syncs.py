"""Syncs that take several waves of small models, and notice silence soon."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import epload
from epload.sync import lobby


@contextmanager
def many_waves(wave_bytes: int = 20_000, lease_seconds: float = 2.0) -> Iterator[None]:
    """
    Args:
        lease_seconds: after which a silent rank is dropped.
    """
    with (
        mock.patch("epload.sync.formation.SYNC_WAVE_BYTES", wave_bytes),
        mock.patch("epload.planning.schedule.MIN_WAVE_BYTES", 10_000),
        mock.patch("epload.planning.exchange.LEAST_BUCKET_BYTES", 5_000),
        mock.patch("epload.planning.exchange.LEAST_SLOT_BYTES", 4_000),
        mock.patch.object(lobby, "LEASE_SECONDS", lease_seconds),
        mock.patch.object(lobby, "_BEAT_SECONDS", 0.3),
    ):
        yield


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def names_culprit(text: str, rank: str) -> bool:
    """Returns whether an error says which rank has ended: whoever notices first, the watch or a peer of its, says it."""
    return re.search(f"rank {rank} has exited|message (from|to) rank {rank} failed", text) is not None


def outcome(step: Callable[[], Any]) -> str:
    """The error's text, or an empty string."""
    try:
        step()
    except epload.LoadError as error:
        return str(error)
    return ""
