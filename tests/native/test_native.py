"""The native code without Python: the kept inputs of the fuzzer, random ones, and threads. `make sanitize` runs the same under
sanitizers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent / "cpp"


def test_the_kept_corpus_and_random_inputs(tmp_path: Path) -> None:
    program = tmp_path / "native"
    subprocess.run([HERE / "build.sh", sys.executable, program, "test_native.cpp"], check=True, timeout=600)
    done = subprocess.run([program, HERE / "corpus"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    kept = [len(list((HERE / "corpus" / case).iterdir())) for case in ("copy_table", "planner")]
    assert min(kept) > 0
    assert done.stdout.startswith(f"{kept[0]} + {kept[1]} inputs of the corpus")
