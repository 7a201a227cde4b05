"""Throws hostile input at the parts that read what others wrote, for a given time.

    python tests/fuzz.py --seconds 600

Half of the time goes to hypothesis (headers, copy tables, regions that are read and digested), half to AFL++ on the native cases,
or all to hypothesis where there is no ``afl-fuzz``. What fails is printed; native inputs that fail belong into
``tests/native/corpus``, which `make test` replays.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, seed, settings

import test_bucket_plan
import test_checkpoint
import test_digest
import test_hostile
import test_region_copy
import test_region_read

HERE = Path(__file__).parent


def properties() -> list[Callable[..., Any]]:
    """Tests of hypothesis that need no fixture."""
    modules = (test_bucket_plan, test_digest, test_hostile, test_region_copy, test_region_read)
    found = [value for module in modules for name, value in vars(module).items() if name.startswith("test_")]
    return [test for test in found if hasattr(test, "hypothesis") and _arguments(test) == set()]


def _arguments(test: Callable[..., Any]) -> set[str]:
    """Names of fixtures, which only pytest could give."""
    return set(test.__signature__.parameters) if hasattr(test, "__signature__") else set()  # type: ignore[attr-defined]


def hypothesis(until: float) -> int:
    """Runs the properties in turn with new seeds; returns how many examples were asked for."""
    tests, turn, examples = properties(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzz.safetensors"
        while time.monotonic() < until:
            test = [*tests, test_checkpoint.test_a_header_is_read_or_refused][turn % (len(tests) + 1)]
            asked = settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))(
                seed(turn)(test)
            )
            asked(**({"fuzzed_path": path} if test is test_checkpoint.test_a_header_is_read_or_refused else {}))
            turn, examples = turn + 1, examples + 300
    return examples


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
            [HERE / "native/build.sh", sys.executable, program, "fuzz.cpp"],
            check=True,
            env={**environment, "CXX": compiler},
        )
        seconds = str(max(10, int(until - time.monotonic())))
        runs = [
            subprocess.Popen(
                ["afl-fuzz", "-V", seconds, "-m", "none", "-i", HERE / "native/corpus" / case, "-o", Path(folder) / case,
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
    examples = hypothesis(began + (seconds / 2 if has_afl else seconds))
    print(f"hypothesis: {examples} examples of {len(properties()) + 1} properties, nothing found")
    if not has_afl:
        print("afl-fuzz is not installed (Debian: afl++): the native code was fuzzed through hypothesis only")
        return 0
    return 1 if afl(began + seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
