"""The test-bed: a link's rate can be changed and comes back, and nothing of the bed is left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from netbed import PREFIX, NetBed, available

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
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


def require(what: str) -> None:
    """Skips, or fails where that is asked for, if there can be no test-bed. ``what`` is then not checked."""
    if why := available():
        if os.environ.get("EPLOAD_FAIL_WITHOUT_NETBED") == "1":
            pytest.fail(f"EPLOAD_FAIL_WITHOUT_NETBED=1, and there can be no test-bed: {why}")
        pytest.skip(f"NOT CHECKED: {what}; {why}")


def made_by_this_process() -> str:
    names = re.compile(rf"\b{PREFIX}{os.getpid()}[bhn]")
    shown = [subprocess.run(["ip", *of], capture_output=True, text=True).stdout for of in (["-o", "link"], ["netns"])]
    return "\n".join(line for text in shown for line in text.splitlines() if names.search(line))


@pytest.mark.netbed
def test_a_link_is_slow_for_a_while() -> None:
    require("rates of the test-bed's links")
    with NetBed(nodes=2, mbit=1000) as bed:
        done = subprocess.run(
            [sys.executable, "-c", RATES, bed.namespace(1)], capture_output=True, text=True, timeout=60,
            env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert made_by_this_process()
    assert done.stdout.split() == ["1Gbit", "200Kbit", "1Gbit"]
    assert not made_by_this_process()
