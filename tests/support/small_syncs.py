"""Syncs that take several waves of small models, and notice silence soon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from epload.sync import lobby


@contextmanager
def many_waves(wave_bytes: int = 20_000, lease_seconds: float = 2.0) -> Iterator[None]:
    """
    Args:
        lease_seconds: after which a silent rank is dropped.
    """
    with (
        mock.patch("epload.sync.epoch.SYNC_WAVE_BYTES", wave_bytes),
        mock.patch("epload.planning.schedule.MIN_WAVE_BYTES", 10_000),
        mock.patch("epload.planning.exchange.LEAST_BUCKET_BYTES", 5_000),
        mock.patch("epload.planning.exchange.LEAST_SLOT_BYTES", 4_000),
        mock.patch.object(lobby, "LEASE_SECONDS", lease_seconds),
        mock.patch.object(lobby, "_BEAT_SECONDS", 0.3),
    ):
        yield
