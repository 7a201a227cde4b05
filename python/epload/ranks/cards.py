"""The network cards of this machine."""

from __future__ import annotations

import re
from pathlib import Path


def count_rdma(sysfs: Path) -> int:
    """Returns the number of cards for RDMA with an active port.

    Those less than half as fast as the fastest do not count: they are for storage or management.

    Args:
        sysfs: where ``/sys`` is; see sysfs-class-infiniband in the kernel's ABI documentation.
    """
    rates: dict[str, float] = {}
    for port in sysfs.glob("class/infiniband/*/ports/*"):
        card = port.parent.parent.name
        try:
            active = (port / "state").read_text().split(":")[0].strip() == "4"
            rate = float(re.split(r"\s", (port / "rate").read_text().strip())[0])
        except (OSError, ValueError):
            continue
        if active:
            rates[card] = max(rate, rates.get(card, 0.0))
    return sum(2 * rate >= max(rates.values()) for rate in rates.values())
