"""The network cards of this machine, for the choice between one leader per node and all ranks sending at once."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import torch

_SYSFS = Path("/sys")


def count(device: torch.device) -> int:
    """Returns the number of NICs that the collectives of a device may use at once."""
    if device.type == "npu":  # each has a port for RDMA of its own, which is no device of the host
        return sys.maxsize
    if os.environ.get("NCCL_IB_DISABLE") == "1" or os.environ.get("NCCL_NET") == "Socket":
        return 0
    return count_rdma(_SYSFS, os.environ.get("NCCL_IB_HCA", ""))


def count_rdma(sysfs: Path, chosen: str = "") -> int:
    """Cards for RDMA with an active port. Those less than half as fast as the fastest do not count: they are for storage or
    management.

    Args:
        sysfs: where ``/sys`` is; see sysfs-class-infiniband in the kernel's ABI documentation.
        chosen: a selection in the syntax of NCCL's ``NCCL_IB_HCA``: ``mlx5_0:1,mlx5_1``, with ``^`` for all but those, ``=`` for
            whole names instead of prefixes. Ports are ignored.
    """
    rates: dict[str, float] = {}
    for port in sysfs.glob("class/infiniband/*/ports/*"):
        card = port.parent.parent.name
        try:
            active = (port / "state").read_text().split(":")[0].strip() == "4"
            rate = float(re.split(r"\s", (port / "rate").read_text().strip())[0])
        except (OSError, ValueError):
            continue
        if active and _is_chosen(card, chosen):
            rates[card] = max(rate, rates.get(card, 0.0))
    return sum(2 * rate >= max(rates.values()) for rate in rates.values())


def _is_chosen(card: str, chosen: str) -> bool:
    names = [name.split(":")[0] for name in chosen.lstrip("^=").split(",") if name]
    exact = chosen.lstrip("^").startswith("=")
    found = any(card == name if exact else card.startswith(name) for name in names)
    return not names or found != chosen.startswith("^")
