"""The test-bed: a link's rate can be changed and comes back, TCP is under CUBIC at both ends, and nothing of the bed is left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from netbed import PREFIX, NetBed
from support.testbed import require

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RATES = """
import re, subprocess, sys
from netbed import INTERFACE, enter, slow_link

def rate():
    shown = subprocess.run(["tc", "qdisc", "show", "dev", INTERFACE], capture_output=True, text=True, check=True).stdout
    return re.search(r"rate (\\w+)", shown)[1]

enter(sys.argv[1])
print(rate())
with slow_link(200, 1000):
    print(rate())
print(rate())
"""


def made_by_this_process() -> str:
    names = re.compile(rf"\b{PREFIX}{os.getpid()}[bhn]")
    shown = [subprocess.run(["ip", *of], capture_output=True, text=True).stdout for of in (["-o", "link"], ["netns"])]
    return "\n".join(line for text in shown for line in text.splitlines() if names.search(line))


def run_on(bed: NetBed, script: str, *nodes: int) -> list[str]:
    """The words that a script prints, which is given the namespaces of some nodes."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(bed.namespace, nodes)], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.netbed
def test_a_link_is_slow_for_a_while() -> None:
    require("rates of the test-bed's links")
    with NetBed(nodes=2, mbit=1000) as bed:
        rates = run_on(bed, RATES, 1)
        assert made_by_this_process()
    assert rates == ["1Gbit", "200Kbit", "1Gbit"]
    assert not made_by_this_process()
