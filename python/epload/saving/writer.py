"""Packs a rank's buckets and writes them to their files, the next bucket being packed while one is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from epload.saving.plan import WriteBucket, WritePlan
from epload.saving.report import SaveReport

BUFFERS = 2


class Writer:
    """Open files of a new checkpoint, of which one rank writes its part."""

    def __init__(self, plan: WritePlan, folder: Path, names: Sequence[str]) -> None:
        """Opens the files that this rank writes to.

        Args:
            names: of all files.

        Raises:
            OSError: one cannot be opened.
        """
        self._plan = plan
        self._fds: dict[int, int] = {}
        numbers = {number for bucket in plan.buckets for number in torch.unique(bucket.runs[:, 0]).tolist()}
        try:
            for number in sorted(numbers):
                self._fds[number] = os.open(folder / names[number], os.O_WRONLY)
        except OSError:
            self.close()
            raise

    def write(self, pack: Callable[[int, Tensor], None], report: SaveReport, wrote: Callable[[int], None]) -> None:
        """Writes all buckets, to disk.

        Args:
            pack: packs a bucket, by its number, into a buffer.
            wrote: called after each bucket with its bytes; may raise to stop.

        Raises:
            OSError: a file cannot be written.
        """
        largest = self._plan.largest
        buffers = [torch.empty(largest, dtype=torch.uint8) for _ in range(min(BUFFERS, len(self._plan.buckets)))]
        report.peak_staging = largest * len(buffers)
        pending: list[Future[int]] = []
        with ThreadPoolExecutor(1, "epload-save") as thread:
            for number, bucket in enumerate(self._plan.buckets):
                if len(pending) == BUFFERS:
                    wrote(pending.pop(0).result())
                buffer = buffers[number % BUFFERS][: bucket.nbytes]
                with report.timed("pack"):
                    pack(number, buffer)
                pending.append(thread.submit(self._write_bucket, bucket, buffer, report))
            for each in pending:
                wrote(each.result())
        with report.timed("sync"):
            for fd in self._fds.values():
                os.fsync(fd)
                wrote(0)

    def _write_bucket(self, bucket: WriteBucket, buffer: Tensor, report: SaveReport) -> int:
        data = memoryview(buffer.numpy()).cast("B")  # type: ignore[arg-type]
        written = 0
        with report.timed("write"):
            for file, offset, begin, nbytes in bucket.runs.tolist():
                write_all(self._fds[file], data[begin : begin + nbytes], offset)
                written += nbytes
        return written

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Writes bytes to an offset of a file. Raises OSError."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
