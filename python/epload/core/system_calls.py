"""A system call that Python's ``os`` lacks if Python was built with an old C library, as conda's is."""

from __future__ import annotations

import ctypes
import os

_MFD_CLOEXEC = 1


def memfd_create(name: str) -> int:
    """Returns a descriptor of an anonymous file, which programs that this process starts do not inherit. Raises OSError."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    fd: int = ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), _MFD_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd
