"""The benchmark of syncs: every way that is compared hands over the same bits, and one that does not never counts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
WRONG = "def send(job):\n    pass\n\n\ndef receive(job):\n    pass\n"
RUN = """
import json, sys
from argparse import Namespace
from pathlib import Path
import bench_sync

options = Namespace(layers=1, experts=2, repeat=1, slow=4.0, mbit=1000, peers="floor,wrong,epload_sync")
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
    ways = {"floor", *(f"epload_sync:stage={stage}" for stage in ("none", "host"))}
    assert set(rows) == {"wrong", "plan_exchange", "make_plan"} | ways
    assert all(row["runs"] == 1 for entry, row in rows.items() if entry != "wrong")
    assert "commit" in rows["epload_sync:stage=host"]["phases"]
    assert "| **epload, stage=host** | 1 |" in found["texts"][0]
    assert "loopback: over the raw floor" in found["texts"][-1]
