"""Throws hostile input at the parts that read what others wrote, for a given time.

    python -m campaigns.fuzz --seconds 600

Half of the time goes to hypothesis (headers, copy tables, regions that are read and digested), half to AFL++ on the native cases,
or all to hypothesis where there is no ``afl-fuzz``. What fails is printed; native inputs that fail belong into
``tests/native/cpp/corpus``, which `make test` replays.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]
CPP = TESTS / "native/cpp"
PROPERTIES = [
    TESTS / folder / f"test_{name}.py"
    for folder, names in {
        "checkpoint": ("hostile", "malformed"),
        "native": ("digest", "region_copy", "region_read"),
        "planning": ("bucket_plan",),
    }.items()
    for name in names
]


def hypothesis(until: float) -> int:
    """Runs every property of these tests with new seeds, again and again; returns how many times."""
    turns = 0
    while time.monotonic() < until:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-m", "hypothesis", f"--hypothesis-seed={time.time_ns()}", *PROPERTIES],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            print(done.stdout[-4000:])
            raise SystemExit(1)
        turns += 1
        print(f"hypothesis, turn {turns}: {done.stdout.strip().splitlines()[-1]}", flush=True)
    return turns


def afl(until: float) -> int:
    """Fuzzes both native cases side by side; returns how many inputs crashed or hung."""
    environment = {
        **os.environ,
        "AFL_I_DONT_CARE_ABOUT_MISSING_CRASHES": "1",
        "AFL_SKIP_CPUFREQ": "1",
        "AFL_NO_UI": "1",
    }
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "fuzz"
        compiler = shutil.which("afl-clang-fast++") or "afl-g++-fast"
        subprocess.run(
            [CPP / "build.sh", sys.executable, program, "fuzz.cpp"],
            check=True,
            env={**environment, "CXX": compiler},
        )
        seconds = str(max(10, int(until - time.monotonic())))
        runs = [
            subprocess.Popen(
                ["afl-fuzz", "-V", seconds, "-m", "none", "-i", CPP / "corpus" / case, "-o", Path(folder) / case,
                 "--", program, case],
                env=environment, stdout=subprocess.DEVNULL,
            )
            for case in ("copy_table", "planner")
        ]  # fmt: skip
        for case, run in zip(("copy_table", "planner"), runs, strict=True):
            if run.wait() != 0:
                raise RuntimeError(f"afl-fuzz {case} ended with {run.returncode}")
            bad = [*Path(folder).glob(f"{case}/default/crashes/id*"), *Path(folder).glob(f"{case}/default/hangs/id*")]
            for path in bad:
                print(f"{case}: {path.parent.name}: {path.read_bytes().hex()}")
            found += len(bad)
            print(f"afl-fuzz {case}: {len(bad)} crashes and hangs")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    seconds = parser.parse_args().seconds
    began = time.monotonic()
    has_afl = shutil.which("afl-fuzz") is not None
    turns = hypothesis(began + (seconds / 2 if has_afl else seconds))
    print(f"hypothesis: {turns} turns, nothing found")
    if not has_afl:
        print("afl-fuzz is not installed (Debian: afl++): the native code was fuzzed through hypothesis only")
        return 0
    return 1 if afl(began + seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
