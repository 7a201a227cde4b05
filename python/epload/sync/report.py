"""The report of one version's sync."""

from __future__ import annotations

from dataclasses import dataclass

from epload.report import TransferReport

_NAMES = {"plan": "plan", "read": "pack", "inter_node": "transfer", "unpack": "unpack", "verify": "verify"}


@dataclass
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

    def __str__(self) -> str:
        rate = self.moved / self.seconds / 1e9 if self.seconds else 0.0
        did = "received" if self.stage else "sent"
        lines = [
            f"{did} version {self.version}: {self.tensors} tensors, {self.moved / 1e6:.1f} MB in {self.buckets} buckets, "
            f"{self.seconds:.3f} s ({rate:.2f} GB/s); {self.senders} senders, {self.receivers} receivers, epoch {self.epoch}"
        ]
        for name, phase in self.phases.items():
            if phase.seconds and name in _NAMES:
                moved = f"  {phase.nbytes / 1e6:10.1f} MB" if phase.nbytes else ""
                lines.append(f"  {_NAMES[name]:<14}{phase.seconds:8.3f} s{moved}")
        return "\n".join(lines)
