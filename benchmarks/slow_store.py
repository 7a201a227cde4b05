"""A store on which each request takes a while, as a network file system's: a preloaded library delays what processes read."""

from __future__ import annotations

import array
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


@cache
def library() -> Path:
    """Compiled on first use."""
    made = Path(tempfile.mkdtemp(prefix="epload-slow-store-")) / "slow_store.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", made, SOURCE, "-ldl"], check=True)
    return made


def environment(folder: Path, log: Path, seconds: float) -> dict[str, str]:
    """For a process to whom each read of a file in ``folder`` takes so much longer. ``log``: see :func:`requests`."""
    return {
        "LD_PRELOAD": str(library()), "SLOW_FOLDER": str(folder.resolve()), "SLOW_LOG": str(log),
        "SLOW_MICROSECONDS": str(round(1e6 * seconds)),
    }  # fmt: skip


def requests(log: Path) -> list[int]:
    """The bytes of each request so far, of all processes."""
    found = array.array("Q")
    found.frombytes(log.read_bytes())
    return found.tolist()
