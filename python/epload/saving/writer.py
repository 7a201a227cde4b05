"""Packs a rank's buckets and writes them to their files, the next bucket being packed while one is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from epload.saving.plan import WritePlan
from epload.saving.report import SaveReport

BUFFERS = 2


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
            fd = self._fds.get(number)
            if fd is None:
                fd = self._fds[number] = os.open(self._folder / self._names[number], os.O_WRONLY)
            write_all(fd, data[begin : begin + nbytes], offset)
            written += nbytes
        return written

    def sync(self, synced: Callable[[], None]) -> None:
        """Waits until what was written is on disk; ``synced`` is called after each file. Raises OSError."""
        for fd in self._fds.values():
            os.fsync(fd)
            synced()


def write_buckets(
    plan: WritePlan,
    files: NewFiles,
    pack: Callable[[int, Tensor], None],
    report: SaveReport,
    wrote: Callable[[int], None],
) -> None:
    """Writes all buckets of a plan.

    Args:
        pack: packs a bucket, by its number, into a buffer.
        wrote: called after each bucket with its bytes; may raise to stop.

    Raises:
        OSError: a file cannot be written.
    """
    largest = plan.largest
    buffers = [torch.empty(largest, dtype=torch.uint8) for _ in range(min(BUFFERS, len(plan.buckets)))]
    report.peak_staging = largest * len(buffers)

    def write(buffer: Tensor, runs: Tensor) -> int:
        with report.timed("write"):
            return files.write(buffer, runs)

    pending: list[Future[int]] = []
    with ThreadPoolExecutor(1, "epload-save") as thread:
        for number, bucket in enumerate(plan.buckets):
            if len(pending) == BUFFERS:
                wrote(pending.pop(0).result())
            buffer = buffers[number % BUFFERS][: bucket.nbytes]
            with report.timed("pack"):
                pack(number, buffer)
            pending.append(thread.submit(write, buffer, bucket.runs))
        for each in pending:
            wrote(each.result())


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Writes bytes to an offset of a file. Raises OSError."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
