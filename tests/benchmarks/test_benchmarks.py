"""The benchmarks' promises about peers: a failure is reported and stops nothing; wrong bytes never count."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bench_load
import tables

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PEERS = {
    "missing": "import a_library_that_nobody_has\n",
    "raises": "def load(job):\n    if job.rank == 1:\n        raise OSError('the disk is gone')\n    job.materialize()\n",
    "wrong": "def load(job):\n    job.materialize()\n",
}
RUN = """
import json, sys
from dataclasses import asdict
from pathlib import Path
import launch
from workload import Size

size, outcome = Size(layers=1, experts=2), launch.Outcome()
folder = Path(sys.argv[1])
entries = launch.loaders(("reload",), outcome, sys.argv[2])
plan = launch.Plan(1, 2, asdict(size), launch.checkpoints(folder / "data", size), entries, repeat=1)
(folder / "run").mkdir()
launch.run(plan, folder / "run", outcome)
(folder / "outcome").write_text(json.dumps(asdict(outcome)))
"""


def example() -> str:
    """Returns the peer that benchmarks/results.md shows."""
    found = re.search(r"```python\n(.*?)```", (BENCHMARKS / "results.md").read_text(), re.S)
    assert found
    return found[1]


def test_what_fails_is_reported_and_stops_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks"
    shutil.copytree(BENCHMARKS, folder, ignore=shutil.ignore_patterns("results", "__pycache__"))
    for name, text in {**PEERS, "zz_example": example()}.items():
        (folder / "peers" / f"{name}.py").write_text(text)
    names = [*PEERS, "zz_example"]
    subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path), ",".join(names)], cwd=folder, timeout=240, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
    )  # fmt: skip
    outcome = json.loads((tmp_path / "outcome").read_text())
    errors = {failure["entry"]: failure["error"] for failure in outcome["failures"]}
    assert set(errors) == set(PEERS)
    assert errors["missing"].startswith("missing: ")
    assert "a_library_that_nobody_has" in errors["missing"]
    assert errors["raises"] == "rank 1: OSError: the disk is gone"
    assert "wrong result" in errors["wrong"]
    assert [sample["entry"] for sample in outcome["samples"]] == ["zz_example"]
    assert all(sample["seconds"] > 0 for sample in outcome["samples"])


def test_tables_are_written_between_their_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin x -->\nold\n<!-- end x -->\nafter\n")
    table = tables.Table("T", ("what", "s"), [["one | two", "1.0"], ["none", "FAILED: why"]])
    tables.write("x", [table.markdown()], page)
    text = page.read_text()
    assert text.startswith("before\n<!-- begin x -->\n**T**\n\n| what | s |\n| --- | ---: |\n| one / two | 1.0 |\n")
    assert text.endswith("| none | FAILED: why |\n<!-- end x -->\nafter\n")
    with pytest.raises(ValueError, match="begin y"):
        tables.write("y", [], page)


def test_a_target_that_is_missed_is_marked() -> None:
    cases = (("<= 1.5", 1.5, "1.50"), ("<= 1.5", 1.6, "1.60 (missed)"), (">= 10", 10.4, "10"), (">= 10", 3.35, "3.35 (missed)"))
    for target, ratio, shown in (*cases, (">= 10", None, "")):
        assert bench_load._reached("what", target, ratio) == ["what", target, shown]
