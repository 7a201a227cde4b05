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

CONTROLS = """
import socket, sys
from threading import Semaphore, Thread
from netbed import NETWORK, enter

def control(end):
    return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\\0")[0].decode()

def accept():
    enter(sys.argv[1])
    with socket.create_server((f"{NETWORK}.1", 0)) as server:
        ports.append(server.getsockname()[1])
        listening.release()
        accepted.append(control(server.accept()[0]))

ports, accepted, listening = [], [], Semaphore(0)
thread = Thread(target=accept)
thread.start()
listening.acquire()
enter(sys.argv[2])
with socket.create_connection((f"{NETWORK}.1", ports[0]), timeout=30) as made:
    print(control(made))
thread.join()
print(accepted[0])
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


@pytest.mark.netbed
def test_connections_do_not_depend_on_the_machines_congestion_control() -> None:
    require("congestion control in the test-bed")
    with NetBed(nodes=2, mbit=1000) as bed:
        assert run_on(bed, CONTROLS, 0, 1) == ["cubic", "cubic"]
