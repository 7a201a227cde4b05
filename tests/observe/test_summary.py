"""``epload trace``: a trace in numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from epload.cli.main import main
from epload.observe.events import ROUND, Event, Events
from epload.observe.trace import Trace

SECOND = 1_000_000_000


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    first = [
        Event("MainThread", ROUND, 0, SECOND, 0, "1.0/1", (1,), "planning"),
        Event("epload-read", "read", SECOND, 3 * SECOND, 4_000_000_000),
        Event("epload-read", "read", 3 * SECOND, 4 * SECOND, 2_000_000_000),
    ]
    second = [
        Event("MainThread", ROUND, SECOND // 2, SECOND, 0, "1.0/1", (), "planning"),
        Event("MainThread", "wait", SECOND, 3 * SECOND, 0, "rank 0 has read wave 0", (0,)),
        Event("MainThread", "read", 2 * SECOND, 3 * SECOND, 1_000_000_000),
    ]
    path = tmp_path / "load.json"
    Trace((Events(0, 0, "a", first), Events(1, 0, "b", second)), {0: 0.0, 1: 0.0015}).save(path)
    return path


def test_the_command(saved: Path, tmp_path: Path) -> None:
    """Phases are summed by rank, and rates are of the time that is covered."""
    result = CliRunner().invoke(main, ["trace", str(saved), "--json", "--plot", str(tmp_path / "load.svg")])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.output)
    assert (summary["seconds"], summary["ranks"], summary["accuracy"]) == (4.0, 2, 0.0015)
    assert [phase["name"] for phase in summary["phases"]] == ["agreement", "read", "wait"]
    assert summary["phases"][1] == {
        "name": "read", "ranks": 2, "mean_seconds": 2.0, "max_seconds": 3.0, "slowest": 0, "nbytes": 7_000_000_000,
        "seconds": 3.0,
    }  # fmt: skip
    assert summary["waited_for"] == [[0, 2.0], [1, 1.0]]
    assert "<svg" in (tmp_path / "load.svg").read_text()
    text = CliRunner().invoke(main, ["trace", str(saved)]).output
    lines = [line.split() for line in text.splitlines()]
    assert " ".join(lines[0]) == "2 ranks, 4.000 s, clocks within 1.5 ms"
    assert ["read", "2", "2.000", "3.000", "0", "7,000.0", "MB", "2.33", "GB/s"] in lines
    assert "rank 0 2.000 s, rank 1 1.000 s" in text


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    result = CliRunner().invoke(main, ["trace", str(tmp_path / "x.json")])
    assert result.exit_code == 1
    assert "expected a trace that epload has written" in result.output
    assert CliRunner().invoke(main, ["trace", str(tmp_path / "none.json")]).exit_code == 2
