"""The native code without Python: the kept inputs of the fuzzer, random ones, and threads. `make sanitize` runs the same under
sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.fakedev import build

HERE = Path(__file__).parent / "cpp"


def test_the_kept_corpus_and_random_inputs() -> None:
    program = build.program([HERE / "test_native.cpp", HERE / "cases.cpp"])
    done = subprocess.run([program, HERE / "corpus"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    kept = [len(list((HERE / "corpus" / case).iterdir())) for case in ("copy_table", "planner", "changes")]
    assert min(kept) > 0
    assert done.stdout.startswith(f"{sum(kept)} inputs of the corpus")
