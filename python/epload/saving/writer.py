"""Writes a rank's part of a checkpoint to its files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from epload.core.copy_table import CopyTable
from epload.native import ops
from epload.saving.plan import WritePlan
from epload.saving.report import SaveReport
from epload.staging.shards import Shards

BUFFERS = 2
_AT_ONCE = 8
"""Buckets whose regions on a device are written in one call, in which all threads of the pipe take part."""


class NewFiles:
    """The files of a new checkpoint, to some of which one rank writes. A context manager."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """``names``: of all files."""
        self._folder = folder
        self._names = names
        self._fds: dict[int, int] = {}

    def __enter__(self) -> NewFiles:
        return self

    def __exit__(self, *_: object) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    def write(self, buffer: Tensor, runs: Tensor) -> int:
        """Writes runs of bytes of a buffer to where they belong; returns their number.

        Args:
            buffer: uint8 on CPU.
            runs: see :class:`~epload.saving.plan.WriteBucket`.

        Raises:
            OSError: a file cannot be written.
        """
        data = memoryview(buffer.numpy()).cast("B")  # type: ignore[arg-type]
        written = 0
        for number, offset, begin, nbytes in runs.tolist():
            write_all(self._open(number), data[begin : begin + nbytes], offset)
            written += nbytes
        return written

    def write_from_device(self, origins: Tensor, sources: list[Tensor], rows: Tensor, pipe: ops.Pipe) -> int:
        """Writes regions of tensors on a device; returns the bytes.

        Args:
            origins: int64 [n, 2]: the file of each row and where in it it starts.
            rows: a copy table of ``sources``, as they lie in the files.

        Raises:
            OSError: a file cannot be written.
        """
        numbers = torch.arange(len(self._names))
        used = torch.zeros(len(self._names), dtype=torch.bool)
        used[origins[:, 0]] = True
        descriptors = [self._open(i) if use else -1 for i, use in enumerate(used.tolist())]
        written, failed, _, error = ops.write_from_device(
            descriptors, numbers, torch.zeros_like(numbers), origins, sources, rows, pipe
        )
        if failed >= 0:
            raise OSError(error, os.strerror(error), str(self._folder / self._names[failed]))
        return written

    def _open(self, number: int) -> int:
        if number not in self._fds:
            self._fds[number] = os.open(self._folder / self._names[number], os.O_WRONLY)
        return self._fds[number]

    def sync(self, synced: Callable[[], None]) -> None:
        """Waits until what was written is on disk; ``synced`` is called after each file. Raises OSError."""
        for fd in self._fds.values():
            os.fsync(fd)
            synced()


def write_buckets(
    plan: WritePlan,
    files: NewFiles,
    shards: Shards,
    report: SaveReport,
    wrote: Callable[[int], None],
) -> None:
    """Writes all buckets of a plan: what is on a device straight to the files, the rest by way of a buffer.

    Args:
        shards: of the plan.
        wrote: called now and then with the bytes written; may raise to stop.

    Raises:
        OSError: a file cannot be written.
    """
    on_device = [number for number, bucket in enumerate(plan.buckets) if shards.on_device(bucket.targets)]
    _write_packed(plan, sorted({*range(len(plan.buckets))} - {*on_device}), files, shards, report, wrote)
    if on_device:
        assert shards.pipe is not None
        report.peak_staging += shards.pipe.footprint
    for first in range(0, len(on_device), _AT_ONCE):
        buckets = [plan.buckets[number] for number in on_device[first : first + _AT_ONCE]]
        rows = CopyTable.concatenate([bucket.in_files for bucket in buckets])
        with report.timed("write"):
            wrote(
                shards.write(rows, partial(files.write_from_device, torch.cat([bucket.origins for bucket in buckets])))
            )


def _write_packed(
    plan: WritePlan,
    numbers: Sequence[int],
    files: NewFiles,
    shards: Shards,
    report: SaveReport,
    wrote: Callable[[int], None],
) -> None:
    """Packs one bucket while the one before is written."""
    largest = max((plan.buckets[number].nbytes for number in numbers), default=0)
    buffers = [torch.empty(largest, dtype=torch.uint8) for _ in range(min(BUFFERS, len(numbers)))]
    report.peak_staging = largest * len(buffers)

    def write(buffer: Tensor, runs: Tensor) -> int:
        with report.timed("write"):
            return files.write(buffer, runs)

    pending: list[Future[int]] = []
    with ThreadPoolExecutor(1, "epload-save") as thread:
        for turn, number in enumerate(numbers):
            bucket = plan.buckets[number]
            if len(pending) == BUFFERS:
                wrote(pending.pop(0).result())
            buffer = buffers[turn % BUFFERS][: bucket.nbytes]
            with report.timed("pack"):
                shards.pack(number, buffer)
            pending.append(thread.submit(write, buffer, bucket.runs))
        for each in pending:
            wrote(each.result())


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Writes bytes to an offset of a file. Raises OSError."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
