"""Writes a checkpoint of safetensors files, to which each rank writes its own part."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from epload.core.attempt import attempt
from epload.core.copy_table import CopyTable
from epload.native import ops
from epload.ranks.activity import working
from epload.ranks.topology import Topology
from epload.report import SaveReport
from epload.saving.folder import NewFolder, check_seen_by_all
from epload.saving.layout import INDEX, FilesLayout
from epload.saving.plan import WritePlan
from epload.transfer.shards import Shards

BUFFERS = 2
_DEVICE_BUCKETS = 8
"""Buckets whose regions on a device are written in one call, in which all threads of the pipe take part."""


class NewFiles:
    """The files of a new checkpoint, to some of which one rank writes. Methods raise OSError."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._fds: dict[int, int] = {}

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    def write(self, buffer: Tensor, runs: Tensor) -> int:
        """Writes runs of bytes of a buffer, uint8 on CPU, to where they belong; returns their number.

        ``runs``: see :class:`~epload.saving.plan.WriteBucket`.
        """
        data = memoryview(buffer.numpy()).cast("B")  # type: ignore[arg-type]
        for number, offset, begin, nbytes in runs.tolist():
            write_all(self._open(number), data[begin : begin + nbytes], offset)
        return int(runs[:, 3].sum())

    def write_from_device(self, origins: Tensor, sources: list[Tensor], rows: Tensor, pipe: ops.Pipe) -> int:
        """Writes regions of tensors on a device; returns the bytes.

        Args:
            origins: int64 [n, 2]: the file of each row and where in it it starts.
            rows: a copy table of ``sources``, as they lie in the files.
        """
        numbers, used = torch.arange(len(self._paths)), set(origins[:, 0].tolist())
        descriptors = [self._open(i) if i in used else -1 for i in range(len(self._paths))]
        written, failed, _, error = ops.write_from_device(
            descriptors, numbers, torch.zeros_like(numbers), origins, sources, rows, pipe
        )
        if failed >= 0:
            raise OSError(error, os.strerror(error), str(self._paths[failed]))
        return written

    def _open(self, number: int) -> int:
        if number not in self._fds:
            self._fds[number] = os.open(self._paths[number], os.O_WRONLY)
        return self._fds[number]

    def sync(self, synced: Callable[[], None]) -> None:
        """Waits until what was written is on disk; ``synced`` is called after each file."""
        for fd in self._fds.values():
            os.fsync(fd)
            synced()


def write_checkpoint(
    topology: Topology,
    path: Path,
    overwrite: bool,
    layout: FilesLayout | None,
    failure: Exception | None,
    write: Callable[[NewFiles, Callable[[int], None]], None],
    small_files: Callable[[], Mapping[str, bytes]],
    report: SaveReport,
) -> None:
    """Writes a checkpoint that appears at its path once it is complete and on disk. Collective.

    Args:
        path: equal on all ranks, as is ``overwrite``.
        layout: equal on all ranks; None if this rank could not plan, with the ``failure``.
        write: writes this rank's part. It gets the open files, and a function to call with the number of bytes after each write.
        small_files: returns the content of other files by name. Called on the first rank.

    Raises:
        LoadError, ValueError, TypeError: the same on every rank; what was at the path is still there.
    """
    control, first = topology.control, topology.rank == topology.ranks[0]
    folder: NewFolder | None = None

    def write_part(paths: list[Path]) -> None:
        with working(control, "writes its part of the checkpoint") as done, closing(NewFiles(paths)) as files:
            write(files, done)
            with report.timed("sync"):
                files.sync(lambda: done(0))

    def commit(folder: NewFolder, index: bytes | None) -> None:
        with report.timed("sync"):
            for name, content in {**({INDEX: index} if index is not None else {}), **small_files()}.items():
                folder.add(name, content)
            folder.commit()

    try:
        if first and layout is not None:
            files = layout.files
            folder, failure = attempt(lambda: NewFolder.create(path, overwrite, files))
        name = folder.temporary.name if folder is not None else ""
        name = control.settle("making the folder", failure, name, lambda views: views[control.ranks[0]])
        assert layout is not None
        folder = folder or NewFolder(path, path.with_name(name), overwrite)
        seen = folder.temporary.is_dir()
        control.settle("finding the folder", None, seen, lambda views: check_seen_by_all(path.parent, views))
        hidden, index, paths = folder, layout.index, [folder.temporary / file.name for file in layout.files]
        control.settle("writing the checkpoint", attempt(lambda: write_part(paths))[1])
        control.doing = "completes the checkpoint"
        failure = attempt(lambda: commit(hidden, index))[1] if first else None
        control.settle("completing the checkpoint", failure, last=True)
    except BaseException:
        if folder is not None:
            folder.discard()
        raise


def write_buckets(
    plan: WritePlan, files: NewFiles, shards: Shards, report: SaveReport, wrote: Callable[[int], None]
) -> None:
    """Writes all buckets of a plan: what is on a device straight to the files, the rest by way of a buffer.

    ``wrote``: called now and then with the bytes written; may raise to stop.
    """
    on_device = [number for number, bucket in enumerate(plan.buckets) if shards.on_device(bucket.targets)]
    _write_packed(plan, sorted({*range(len(plan.buckets))} - {*on_device}), files, shards, report, wrote)
    if on_device:
        assert shards.pipe is not None
        report.peak_staging += shards.pipe.footprint
    for begin in range(0, len(on_device), _DEVICE_BUCKETS):
        buckets = [plan.buckets[number] for number in on_device[begin : begin + _DEVICE_BUCKETS]]
        rows = CopyTable.concatenate([bucket.in_files for bucket in buckets])
        origins = torch.cat([bucket.origins for bucket in buckets])
        with report.timed("write") as block:
            block.nbytes = shards.write(rows, partial(files.write_from_device, origins))
        wrote(block.nbytes)


def _write_packed(
    plan: WritePlan,
    numbers: list[int],
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
        with report.timed("write") as block:
            block.nbytes = files.write(buffer, runs)
        return block.nbytes

    pending: Future[int] | None = None
    with ThreadPoolExecutor(1, "epload-save") as thread:
        for turn, number in enumerate(numbers):
            bucket = plan.buckets[number]
            buffer = buffers[turn % BUFFERS][: bucket.nbytes]
            with report.timed("pack"):
                shards.pack(number, buffer)
            if pending is not None:
                wrote(pending.result())
            pending = thread.submit(write, buffer, bucket.runs)
        if pending is not None:
            wrote(pending.result())


def write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
