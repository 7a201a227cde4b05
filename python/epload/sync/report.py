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
    """Grows when receivers join or leave; 0 for a version from other engines."""
    senders: int = 0
    """Ranks that sent it."""
    receivers: int = 0
    """Ranks that received it."""
    wire_bytes: int = 0
    """Bytes that this rank sent, or that entered its node; headers included."""
    changed: int | None = None
    """Number of elements that differ from the version before, in the dtypes that are sent, where changes were sent; else None.
    A bucket of several dtypes that are converted counts units of its narrowest one."""
    buckets_changed: int = 0
    """Number of buckets whose changes this rank sent, or its node received, in place of the buckets."""
    buckets_unchanged: int = 0
    """Number of buckets of which nothing was sent, as nothing has changed."""
    why_full: str = ""
    """Why some receivers got all of the version, on a sender with ``delta="auto"`` or ``"always"``."""
    waited: float = 0.0
    """Seconds that a receiver waited until the sender had the version and its receivers; not in ``seconds``."""
    stage: str = ""
    """``"host"``, ``"device"`` or ``"none"`` on a receiver, else empty."""
    from_engines: bool = False
    """True if other engines sent the version, as this one has joined late."""
    transport: str = "host"
    """``"host"`` through host memory, over gloo; else the backend that moved it from device to device, such as ``"nccl"``;
    ``"ipc"`` if receivers copied all of it out of the device memory of senders."""
    pulled: int = 0
    """Bytes that a receiver copied out of the device memory of senders on its machine, or that were copied out of a sender's."""
    not_pulled: str = ""
    """Why receivers on a sender's machine did not copy from its device memory, though their tensors were on such devices."""

    @property
    def _moved_bytes(self) -> int:
        return self.wire_bytes + self.pulled

    def _headline(self) -> str:
        ways = []
        if self.changed is not None:
            ways.append(f"changes of {count(self.changed, 'element')} in {show_bytes(self.wire_bytes)}")
        elif self.wire_bytes or not self.pulled:
            ways.append(f"{show_bytes(self.wire_bytes)} in {count(self.buckets, 'bucket')}")
        if self.pulled:
            ways.append(f"{show_bytes(self.pulled)} between devices' memory")
        source = " from other engines" if self.from_engines else ""
        return (
            f"{'received' if self.stage else 'sent'} version {self.version}{source}: {count(self.tensors, 'tensor')}, "
            f"{' and '.join(ways)}, {self.seconds:.3f} s ({show_rate(self._rate)}); {count(self.senders, 'sender')}, "
            f"{count(self.receivers, 'receiver')}, generation {self.generation}"
        )
