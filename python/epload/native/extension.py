"""Imports the extension module (build information, the bucket planner, the schedule), and loads the native library."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

REBUILD = "pip install --force-reinstall --no-deps . (in epload's source folder)"
LIBRARY = Path(__file__).parents[1] / "libepload.so"

if sys.byteorder != "little":
    raise ImportError("epload reads the little-endian bytes of checkpoints as they are, and this machine is big-endian")

try:
    from epload import _C as _C
except ImportError as error:
    raise ImportError(f"epload's native part is missing or does not load ({error}). Build it: {REBUILD}") from error


def check_torch(built_for: str, running: str) -> None:
    """Raises ImportError when the native library was built for another torch minor.

    torch keeps no binary compatibility between minors, and a mismatched library may load and then misbehave; so this is
    checked before it is loaded.
    """
    if built_for.split(".")[:2] != running.split(".")[:2]:
        raise ImportError(
            f"epload's native library was built for torch {built_for}, but torch {running} is running. "
            f"Rebuild it against this torch: {REBUILD}"
        )


def load_native_library() -> None:
    """Registers the native ops. Raises ImportError with the command that mends a missing or stale build."""
    check_torch(_C.torch_version, torch.__version__)
    try:
        torch.ops.load_library(str(LIBRARY))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(f"{LIBRARY} does not load ({error}). Rebuild it: {REBUILD}") from error
