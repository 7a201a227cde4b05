"""The judge of the chaos campaign: what other programs do meanwhile is not held against the loads."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from campaigns.chaos import __main__ as chaos

PID = os.getpid()


@pytest.mark.parametrize(
    ("name", "leaks"),
    [(f"of-another-program-{PID}0", 0), (f"census-1{PID}", 0), (f"torch_{PID}_1234_0", 1), (f"epload-{PID}", 1)],
    ids=["longer id", "other id", "torch", "epload"],
)
def test_only_files_of_the_ranks_are_leaks(name: str, leaks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path("/dev/shm") / name

    def run(*_: object) -> tuple[str, bool, bool]:
        file.touch()
        return "", True, True

    monkeypatch.setattr(chaos, "_context", SimpleNamespace(set_forkserver_preload=lambda names: None))
    monkeypatch.setattr(chaos, "Job", lambda bed: SimpleNamespace(pids={0: PID}, close=lambda: None))
    monkeypatch.setattr(chaos, "run", run)
    try:
        assert chaos.campaign(range(1), float("inf"), False, None) == leaks
    finally:
        file.unlink()
