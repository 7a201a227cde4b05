"""What of a file is in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


def drop(path: Path) -> None:
    """Takes a file out of the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # pages that are yet to be written stay
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached(path: Path) -> float:
    """The share of a file that is in the page cache."""
    pages = -(-path.stat().st_size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as memory:
        first = ctypes.c_char.from_buffer(memory)
        failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(memory)), found)
        del first
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in found) / pages
