"""The memory of a process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def bytes_read() -> int:
    """Returns the bytes that this process has read by calls, from files and the page cache."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def memfds() -> list[str]:
    """Returns the open descriptors of memory that epload shares within a node."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in names if "memfd:epload" in name]


def mapped_memfds() -> list[str]:
    """Returns the mappings of such memory."""
    with open("/proc/self/maps") as maps:
        return [line for line in maps if "memfd:epload" in line]
