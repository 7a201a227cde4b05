"""The report of one version's sync."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from epload.report import TransferReport, count, show_bytes, show_rate


@dataclass(repr=False)
class SyncReport(TransferReport):
    """The result of sending or receiving one version, on one rank."""

    version: int = 0
    epoch: int = 0
    """Grows when receivers join or leave."""
    senders: int = 0
    """Ranks that sent it."""
    receivers: int = 0
    """Ranks that received it."""
    moved: int = 0
    """Bytes that this rank sent, or that entered its node."""
    waited: float = 0.0
    """Seconds that a receiver waited until the sender had the version and its receivers; not in ``seconds``."""
    stage: str = ""
    """``"host"`` or ``"none"`` on a receiver, else empty."""
    transport: str = "host"
    """``"host"`` through host memory, over gloo; else the backend that moved it from device to device, such as ``"nccl"``."""

    _phase_titles: ClassVar[Mapping[str, str]] = {
        "plan": "plan", "read": "pack", "inter_node": "transfer", "unpack": "unpack", "verify": "verify", "wait": "wait",
    }  # fmt: skip

    @property
    def _moved_bytes(self) -> int:
        return self.moved

    def _headline(self) -> str:
        did = "received" if self.stage else "sent"
        return (
            f"{did} version {self.version}: {count(self.tensors, 'tensor')}, {show_bytes(self.moved)} in "
            f"{count(self.buckets, 'bucket')}, {self.seconds:.3f} s ({show_rate(self._rate)}); "
            f"{count(self.senders, 'sender')}, {count(self.receivers, 'receiver')}, epoch {self.epoch}"
        )
