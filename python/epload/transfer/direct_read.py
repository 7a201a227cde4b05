"""Each rank reads what it keeps, straight into its tensors: no bucket moves between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.core.attempt import Attempt
from epload.observe.progress import Progress
from epload.transfer.context import TransferContext
from epload.transfer.framing import list_numbers
from epload.transfer.local import Local

READ_BYTES = 64 << 20
"""Approximate number of bytes that a rank reads in one call. With less, threads that read spend more of their time waiting for
one another at the end of a call."""
DEVICE_READ_BYTES = 512 << 20
"""The same for tensors on a device: at 50 GB/s, 10 ms."""


class DirectRead:
    """Reads some of a plan's buckets. Single use; has the interface of an Engine."""

    def __init__(self, context: TransferContext, checkpoint: Checkpoint, groups: Sequence[range], local: Local) -> None:
        """``groups``: numbers of buckets that are read together."""
        self._context = context
        self._checkpoint = checkpoint
        self._groups = groups
        self._local = local
        self._buffer: Tensor | None = None
        """Host memory for one bucket, for a checkpoint that gives whole buckets only."""

    def run(self, bar: Progress) -> None:
        """``bar`` counts bytes.

        Raises:
            LoadError: another rank failed, or this rank could not read.
        """
        with self._local.entered():
            for numbers in self._groups:
                if not self._step(self._read_regions, numbers, bar):
                    for number in numbers:
                        self._step(self._read_whole, range(number, number + 1), bar)

    def fail(self) -> None:
        """Nothing here waits for another rank."""

    def _step(self, read: Callable[[range], int | None], numbers: range, bar: Progress) -> bool:
        """Returns True if the checkpoint can read this way."""
        context = self._context
        if failure := context.framing.remote_failure():
            raise failure
        with context.activity.doing(f"reads {list_numbers('bucket', numbers)}"):
            nbytes = read(numbers)
        if nbytes is None:
            return False
        context.control.progress += nbytes
        bar.update(sum(context.plan.buckets[number].nbytes for number in numbers))
        return True

    def _read_regions(self, numbers: range) -> int | None:
        try:
            with self._context.report.timed("read", list_numbers("bucket", numbers)) as span:
                nbytes = self._local.read(numbers, self._checkpoint)
                span.nbytes = nbytes or 0
            return nbytes
        except Exception as error:
            culprits, error = self._locate(numbers, self._checkpoint, error)
            raise self._context.framing.describe_failure("read", culprits, error) from error

    def _locate(self, numbers: range, checkpoint: Checkpoint, error: Exception) -> tuple[range, Exception]:
        """Reads the buckets once more, one by one; returns the first that fails, or all if none does, and the error."""
        for number in numbers if len(numbers) > 1 else ():
            alone = range(number, number + 1)
            again = Attempt(partial(self._local.read, alone, checkpoint))
            if again.failure is not None:
                return alone, again.failure
        return numbers, error

    def _read_whole(self, numbers: range) -> int:
        """One bucket by way of a buffer, from a checkpoint that cannot read single regions."""
        assert self._context.fill is not None
        (number,) = numbers
        plan = self._context.plan
        bucket = plan.buckets[number]
        if not bucket.targets:
            return 0
        if self._buffer is None:
            largest = max(bucket.nbytes for bucket in plan.buckets)
            self._buffer = torch.empty(largest, dtype=torch.uint8)
            self._context.report.peak_staging += largest
        buffer = self._buffer[: bucket.nbytes]
        step = "read"
        try:
            with self._context.report.timed("read", f"bucket {number}") as span:
                self._context.fill(number, buffer)
                span.nbytes = bucket.nbytes
            step = "unpack"
            self._local.unpack(number, buffer)
        except Exception as error:
            raise self._context.framing.describe_failure(step, [number], error) from error
        return bucket.nbytes
