"""The memory of a process."""

from __future__ import annotations


def anonymous_and_shared() -> int:
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) << 10 for line in status if line.startswith(("RssAnon", "RssShmem")))
