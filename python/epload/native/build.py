"""What this build of epload has, and loading its native library into the torch that is running."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_LIBRARY = Path(__file__).parents[1] / "libepload.so"
_REBUILD = "pip install --force-reinstall --no-deps . (in epload's source folder)"


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def check_torch(built_for: str, running: str) -> None:
    """Raises ImportError when the native library was built for another torch minor.

    torch keeps no binary compatibility between minors, and a mismatched library may load and then misbehave; so this is
    checked before it is loaded.
    """
    if _minor(built_for) != _minor(running):
        raise ImportError(
            f"epload's native library was built for torch {built_for}, but torch {running} is running. "
            f"Rebuild it against this torch: {_REBUILD}"
        )


def load_native_library() -> None:
    """Registers the native ops. Raises ImportError with the command that mends a missing or stale build."""
    try:
        from epload.native.extension import _C
    except ImportError as error:
        raise ImportError(
            f"epload's native part is missing or does not load ({error}). Build it: {_REBUILD}"
        ) from error
    check_torch(_C.torch_version, torch.__version__)
    try:
        torch.ops.load_library(str(_LIBRARY))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(f"{_LIBRARY} does not load ({error}). Rebuild it: {_REBUILD}") from error


def build_info() -> dict[str, Any]:
    """The version, the torch and compiler of this build, whether it has CUDA kernels and for which architectures, and whether it
    has the Ascend part and for which torch_npu.

    Without the kernels, regions on a CUDA device are copied through ATen: right, but one call a region. Without the Ascend
    part, groups of HCCL's are refused.
    """
    from epload.native.extension import _C

    return {
        "version": _C.version,
        "torch_version": _C.torch_version,
        "compiler": _C.compiler,
        "library": str(_LIBRARY),
        "cuda": bool(_C.cuda_architectures),
        "npu": bool(_C.torch_npu_version),
        "torch_npu_version": _C.torch_npu_version,
        "cuda_architectures": [arch for arch in _C.cuda_architectures.split(",") if arch],
    }
