"""Each rank reads what it keeps, straight into its tensors: no bucket moves between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.observe.progress import Progress
from epload.planning.buckets import HEADER_BYTES
from epload.planning.waves import next_group
from epload.transfer.context import TransferContext
from epload.transfer.framing import list_buckets
from epload.transfer.local import Local

READ_BYTES = 64 << 20
"""Approximate number of bytes that a rank reads in its first call."""
READ_SECONDS = 0.05
"""A call that takes less is followed by one that reads ``GROWTH`` times as much: between two, threads end and are started, which
on an H200 took 2 ms, as long as 100 MB take to cross."""
GROWTH = 4
MAX_READ_BYTES = 1 << 30
"""Maximum of a call that follows others: between calls this rank finds out that another one has failed."""


class DirectRead:
    """Reads some of a plan's buckets. Single use; has the interface of an Engine."""

    def __init__(self, context: TransferContext, checkpoint: Checkpoint, sizes: Sequence[int], local: Local) -> None:
        """``sizes``: bytes of each bucket that this rank keeps."""
        self._context = context
        self._checkpoint = checkpoint
        self._sizes = sizes
        self._local = local
        self._buffer: Tensor | None = None
        """Host memory for one bucket, for a checkpoint that gives whole buckets only."""

    def run(self, bar: Progress) -> None:
        """``bar`` counts bytes.

        Raises:
            LoadError: another rank failed, or this rank could not read.
        """
        buckets, control = self._context.plan.buckets, self._context.control
        numbers, limit = range(0), READ_BYTES
        with self._local.entered():
            while numbers.stop < len(self._sizes):
                self._check()
                numbers, began = next_group(self._sizes, numbers.stop, limit), perf_counter()
                with control.activity(f"reads {list_buckets(numbers)}"):
                    nbytes = self._read_regions(numbers)
                if nbytes is None:
                    self._read_buckets(numbers, bar)
                    continue
                if perf_counter() - began < READ_SECONDS and not self._local.quantizes:
                    limit = min(limit * GROWTH, max(MAX_READ_BYTES, READ_BYTES))
                control.progress += nbytes
                bar.update(sum(buckets[number].nbytes for number in numbers))

    def fail(self) -> None:
        """Nothing here waits for another rank."""

    def _check(self) -> None:
        if failure := self._context.remote_failure():
            raise failure

    def _read_regions(self, numbers: range) -> int | None:
        """Returns the bytes read; None if the checkpoint gives whole buckets only."""
        try:
            with self._context.report.timed("read", list_buckets(numbers)) as span:
                nbytes = self._local.read(numbers, self._checkpoint)
                span.nbytes = nbytes or 0
            return nbytes
        except Exception as error:
            culprits, error = self._locate(numbers, error)
            raise self._context.describe_failure("read", culprits, error) from error

    def _locate(self, numbers: range, error: Exception) -> tuple[range, Exception]:
        """Reads the buckets once more, one by one; returns the first that fails, or all if none does, and the error."""
        for number in numbers if len(numbers) > 1 else ():
            bucket = range(number, number + 1)
            try:
                self._local.read(bucket, self._checkpoint)
            except Exception as again:
                return bucket, again
        return numbers, error

    def _read_buckets(self, numbers: range, bar: Progress) -> None:
        """Reads buckets by way of a buffer, one after the other."""
        context, plan, fill = self._context, self._context.plan, self._context.fill
        assert fill is not None
        if self._buffer is None:
            self._buffer = torch.empty(max(bucket.nbytes for bucket in plan.buckets), dtype=torch.uint8)
            context.report.peak_staging += self._buffer.nbytes
        for number in numbers:
            self._check()
            bucket, step = self._buffer[: plan.buckets[number].nbytes], "read"
            try:
                with context.control.activity(f"reads bucket {number}"):
                    if plan.buckets[number].targets:
                        with context.report.timed("read", f"bucket {number}") as span:
                            fill(number, bucket)
                            span.nbytes = bucket.nbytes - HEADER_BYTES
                        step = "unpack"
                        self._local.unpack(number, bucket)
            except Exception as error:
                raise context.describe_failure(step, [number], error) from error
            context.control.progress += bucket.nbytes
            bar.update(bucket.nbytes)
