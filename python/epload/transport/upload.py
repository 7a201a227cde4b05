"""From a bucket in host memory to a model on a device: each rank copies the regions that it keeps, and no others.

They are packed into a pinned buffer of the rank's own, so that the bucket may be filled again at once, cross the rank's own link
in one copy, and are unpacked on the load's stream.
"""

from __future__ import annotations

from torch import Tensor

from epload.core.regions import packed
from epload.native import ops
from epload.planning.plan import LoadPlan
from epload.report import LoadReport
from epload.staging.device import BUFFERS, DeviceStaging
from epload.transport.local import Local


def upload_bytes(plan: LoadPlan) -> int:
    """Bytes of one staging buffer."""
    return max((packed(bucket.copies)[1] for bucket in plan.buckets), default=0)


class Uploader:
    """Used by one thread, within ``staging.entered()``."""

    def __init__(self, staging: DeviceStaging, local: Local, report: LoadReport) -> None:
        """``staging``: with pinned buffers of at least ``upload_bytes(plan)``."""
        self.staging = staging
        self._local = local
        self._report = report
        self._turn = 0

    def unpack(self, number: int, bucket: Tensor) -> None:
        """Queues all that is to be done with a bucket; it is not needed any more when this returns. ``bucket``: uint8, on CPU."""
        on_cpu, on_device = self._local.regions(number).by_device()
        if on_cpu.targets:
            ops.unpack(bucket, on_cpu.targets, on_cpu.copies)
        if not on_device.targets:
            return
        turn = self._turn % BUFFERS
        self._turn += 1
        moved, nbytes = on_device.packed()
        self.staging.wait_until_copied(turn)
        into = on_device.read_into(self.staging.pinned[turn])
        ops.unpack(bucket, into.targets, into.copies)
        self.staging.copy(turn, turn, nbytes)
        with self.staging.stream:
            self.staging.wait_for_copy(turn)
            ops.unpack(self.staging.buckets[turn], moved.targets, moved.copies)
            self.staging.unpacked(turn)
        self._report.phases["host_to_device"].nbytes += nbytes
