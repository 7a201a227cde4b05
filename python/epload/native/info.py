"""Reports the features of this build of epload, and whether they can be used here."""

from __future__ import annotations

from typing import Any

import torch

from epload.native import ops
from epload.native.extension import _C, LIBRARY

__version__: str = _C.version


def build_info() -> dict[str, Any]:
    """The version, the torch and the compiler of this build; whether it has CUDA kernels, for which architectures, and why they
    cannot be used on the current device (``""`` if they can; asked only where the process uses CUDA already, as asking makes a
    context); whether it has the Ascend part, and for which torch_npu.

    Without the kernels, regions on a CUDA device are copied through ATen: right, but one call a region. Without the Ascend
    part, groups of HCCL's are refused.
    """
    return {
        "version": _C.version,
        "torch_version": _C.torch_version,
        "compiler": _C.compiler,
        "library": str(LIBRARY),
        "cuda": bool(_C.cuda_architectures),
        "cuda_architectures": [arch for arch in _C.cuda_architectures.split(",") if arch],
        "cuda_obstacle": _cuda_obstacle(),
        "npu": has_npu(),
        "torch_npu_version": _C.torch_npu_version,
    }


def has_npu() -> bool:
    """Returns True if this build has the Ascend part."""
    return bool(_C.torch_npu_version)


def _cuda_obstacle() -> str:
    if not _C.cuda_architectures:
        return (
            "this build has no CUDA kernels: torch had no CUDA, there was no nvcc, or EPLOAD_CUDA=0 was set; EPLOAD_CUDA=1 "
            "builds them, or says what is missing"
        )
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "not known: the process does not use CUDA yet (torch.cuda.init())"
    return ops.cuda_obstacle(torch.device("cuda", torch.cuda.current_device()))
