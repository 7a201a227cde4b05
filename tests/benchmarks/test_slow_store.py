"""Eight ranks that keep strided parts of 12 KB load from a store that takes 1 ms a request. Requests are counted, not timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_slow_store.py"
LAYERS, RANKS, PARTS = 2, 8, 512
PROBES = 8
"""Requests by which a rank finds out in each call that a request is slow."""


def test_requests_are_few_and_large(tmp_path: Path) -> None:
    """Each rank would make a request for each of its parts; 8 ranks of 2 nodes read each byte at most as often."""
    results = tmp_path / "results"
    command = [
        sys.executable,
        BENCHMARK,
        "--layers",
        str(LAYERS),
        "--repeat",
        "1",
        "--modes",
        "auto",
        "--json",
        results,
    ]
    subprocess.run(command, check=True, timeout=240)
    (load,) = json.loads(results.read_text())["auto"]
    assert load["requests"] < RANKS * LAYERS * PARTS / 10
    assert load["bytes"] / load["requests"] > 1 << 20
    assert load["bytes"] < (RANKS + 1) * LAYERS * PARTS * RANKS * (12 << 10)
