"""The memory of a process."""

from __future__ import annotations

import os
from contextlib import suppress


def anonymous_and_shared() -> int:
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) << 10 for line in status if line.startswith(("RssAnon", "RssShmem")))


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
