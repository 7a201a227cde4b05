"""System calls that Python's ``os`` lacks if Python was built with an old C library, as conda's is."""

from __future__ import annotations

import ctypes
import os

_MFD_CLOEXEC = 1
_PIDFD_OPEN = 434
"""Number of the system call on every architecture."""


def memfd_create(name: str) -> int:
    """Returns a descriptor of an anonymous file, which programs that this process starts do not inherit. Raises OSError."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    return _checked(_library().memfd_create(name.encode(), _MFD_CLOEXEC))


def pidfd_open(pid: int) -> int:
    """Returns a descriptor that is readable once a process has ended. Raises OSError."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _checked(_library().syscall(_PIDFD_OPEN, pid, 0))


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
