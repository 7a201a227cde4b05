"""Throws hostile input at the parts that read what others wrote, for a given time.

    python -m campaigns.fuzz --seconds 600

Half of the time goes to hypothesis (headers, plans, copy tables, regions that are read and digested), half to AFL++ on the native
cases, or all to hypothesis where there is no ``afl-fuzz``. What fails is printed; native inputs that fail belong into
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
MODULES = (
    "checkpoint/test_malformed", "core/test_views", "native/test_changes", "native/test_region_copy",
    "native/test_region_read", "planning/test_bucket_plan", "planning/test_flow", "transfer/test_node_memory",
)  # fmt: skip


def hypothesis(until: float) -> None:
    """Runs every property of these tests with new seeds, again and again."""
    files = [TESTS / f"{name}.py" for name in MODULES]
    turn = 0
    while time.monotonic() < until:
        options = ["-m", "hypothesis", "--hypothesis-profile=fuzz", f"--hypothesis-seed={time.time_ns()}"]
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", *options, *files], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout[-4000:])
        turn += 1
        print(f"hypothesis, turn {turn}: {done.stdout.strip().splitlines()[-1]}", flush=True)


def afl(until: float) -> int:
    """Fuzzes the native cases at once; returns how many inputs crashed or hung."""
    options = {"AFL_I_DONT_CARE_ABOUT_MISSING_CRASHES": "1", "AFL_SKIP_CPUFREQ": "1", "AFL_NO_UI": "1"}
    environment = {**os.environ, **options, "CXX": shutil.which("afl-clang-fast++") or "afl-g++-fast"}
    crashed = 0
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "fuzz"
        subprocess.run([CPP / "build.sh", sys.executable, program, "fuzz.cpp"], check=True, env=environment)
        runs = {}
        for case in ("copy_table", "planner", "changes", "pickles"):
            limits = ["-V", str(max(10, int(until - time.monotonic()))), "-m", "none"]
            paths = ["-i", CPP / "corpus" / case, "-o", Path(folder) / case, "--", program, case]
            runs[case] = subprocess.Popen(["afl-fuzz", *limits, *paths], env=environment, stdout=subprocess.DEVNULL)
        for case, run in runs.items():
            if run.wait() != 0:
                raise RuntimeError(f"afl-fuzz {case} ended with {run.returncode}")
            inputs = [path for kind in ("crashes", "hangs") for path in Path(folder).glob(f"{case}/default/{kind}/id*")]
            for path in inputs:
                print(f"{case}: {path.parent.name}: {path.read_bytes().hex()}")
            crashed += len(inputs)
    print(f"afl-fuzz: {crashed} crashes and hangs")
    return crashed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    seconds = parser.parse_args().seconds
    began = time.monotonic()
    has_afl = shutil.which("afl-fuzz") is not None
    hypothesis(began + (seconds / 2 if has_afl else seconds))
    if not has_afl:
        print("afl-fuzz is not installed (Debian: afl++): the native code was fuzzed through hypothesis only")
    return int(has_afl and afl(began + seconds) > 0)


if __name__ == "__main__":
    sys.exit(main())
