"""The report of one version's sync."""

from __future__ import annotations

from dataclasses import dataclass

from epload.observe.render import count, show_bytes, show_rate
from epload.report import TransferReport


@dataclass(repr=False)
class SyncReport(TransferReport):
    """The result of sending or receiving one version, on one rank."""

    version: int = 0
    generation: int = 0
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
    """``"host"``, ``"device"`` or ``"none"`` on a receiver, else empty."""
    transport: str = "host"
    """``"host"`` through host memory, over gloo; else the backend that moved it from device to device, such as ``"nccl"``;
    ``"ipc"`` if receivers copied all of it out of the device memory of senders."""
    pulled: int = 0
    """Bytes that a receiver copied out of the device memory of senders on its machine, or that were copied out of a sender's."""
    not_pulled: str = ""
    """Why receivers on a sender's machine did not, where some had their tensors on devices like the sender's."""

    @property
    def _moved_bytes(self) -> int:
        return self.moved + self.pulled

    def _headline(self) -> str:
        ways = []
        if self.moved or not self.pulled:
            ways.append(f"{show_bytes(self.moved)} in {count(self.buckets, 'bucket')}")
        if self.pulled:
            ways.append(f"{show_bytes(self.pulled)} between devices' memory")
        return (
            f"{'received' if self.stage else 'sent'} version {self.version}: {count(self.tensors, 'tensor')}, "
            f"{' and '.join(ways)}, {self.seconds:.3f} s ({show_rate(self._rate)}); {count(self.senders, 'sender')}, "
            f"{count(self.receivers, 'receiver')}, generation {self.generation}"
        )
