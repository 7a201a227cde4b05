"""The benchmark of syncs: every way that is compared hands over the same bits, and one that does not never counts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
WRONG = "def send(job):\n    pass\n\n\ndef receive(job):\n    pass\n"
RUN = """
import json, sys
from argparse import Namespace
from pathlib import Path
import bench_sync

options = Namespace(layers=1, experts=2, repeat=1, slow=4.0, mbit=1000, peers="")
run = bench_sync.measure(options, "loopback")
texts = [table.markdown() for table in [*bench_sync.tables(run), bench_sync.targets({"loopback": run})]]
Path(sys.argv[1]).write_text(json.dumps({"run": run, "texts": texts}))
"""


def test_every_way_hands_over_the_same_bits(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks"
    shutil.copytree(BENCHMARKS, folder, ignore=shutil.ignore_patterns("results", "__pycache__"))
    (folder / "sync_peers" / "wrong.py").write_text(WRONG)
    subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "found")], cwd=folder, timeout=240, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
    )  # fmt: skip
    found = json.loads((tmp_path / "found").read_text())
    rows = {row["entry"]: row for row in found["run"]["rows"]}
    assert [entry for entry, row in rows.items() if "error" in row] == ["wrong"]
    assert "wrong result" in rows["wrong"]["error"]
    ways = {"floor", "point_to_point", *(f"epload_sync:stage={stage}" for stage in ("none", "host"))}
    ways |= {f"gather_broadcast:{mode}" for mode in ("full_tensor", "packed")}
    assert set(rows) == {"wrong", "plan_exchange", "make_plan"} | ways
    assert all(row["runs"] == 1 for entry, row in rows.items() if entry != "wrong")
    assert "commit" in rows["epload_sync:stage=host"]["phases"]
    assert "| **epload, stage=host** | 1 |" in found["texts"][0]
    assert "loopback: over the raw floor" in found["texts"][-1]


PLAN = """
import json, sys
import sync_planning

rows = sync_planning.measure("Qwen3-30B-A3B", ((64, 128),), repeat=1)
json.dump([rows, sync_planning.table(rows).markdown()], sys.stdout)
"""


def test_planning_at_scale() -> None:
    """Engines of one node take everything into it, those of eight nodes an eighth of the experts into each."""
    found = subprocess.run(
        [sys.executable, "-c", PLAN], cwd=BENCHMARKS, timeout=240, check=True, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
    )  # fmt: skip
    (alone, together), text = json.loads(found.stdout)
    assert alone["receiver"]["nbytes"] == pytest.approx(61.06e9, rel=0.01)
    assert together["receiver"]["nbytes"] == pytest.approx(61.06e9 / 8 * 0.95 + 61.06e9 * 0.05, rel=0.05)
    for row in (alone, together):
        assert row["sender"]["nbytes"] == pytest.approx(61.06e9 / 64, rel=0.01)
        assert row["sender"]["buckets"] <= row["receiver"]["buckets"]
    assert "64 + 128" in text
