"""Writes a checkpoint of safetensors files, to which each rank writes its own part."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from epload.core import dtypes
from epload.core.attempt import Attempt
from epload.core.copy_table import CopyTable, byte_view
from epload.core.placement import box_slices
from epload.native import ops
from epload.ranks.single_flight import Call, Refused, exclusive
from epload.ranks.topology import Topology
from epload.report import SaveReport
from epload.saving.folder import NewFolder, check_seen_by_all
from epload.saving.layout import INDEX, FilesLayout
from epload.saving.plan import WritePlan
from epload.transfer.device_pipe import DevicePipe

CALL_BYTES = 128 << 20
"""Bytes on a device that are written in one call, in which all threads of the pipe take part."""


@contextmanager
def exclusively(
    what: str, topology: Topology, owner: object, made_by: threading.Thread, timeout: timedelta
) -> Iterator[None]:
    """A context in which no other load or save of the process runs, and out of which every rank raises the same error."""
    try:
        with exclusive(Call(what, topology, owner, made_by), timeout), topology.control.guard():
            yield
    except Refused as refused:
        raise refused.failure.error() from None


def write_checkpoint(
    topology: Topology,
    path: Path,
    overwrite: bool,
    layout: Attempt[FilesLayout],
    write: Callable[[NewFolder, Callable[[int], None]], None],
    small_files: Callable[[], Mapping[str, bytes]],
    report: SaveReport,
) -> None:
    """Writes a checkpoint that appears at its path once it is complete and on disk. Collective.

    Args:
        path, overwrite, layout: equal on all ranks.
        write: writes this rank's part. It gets the folder, and a function to call with the number of bytes after each write.
        small_files: returns the content of other files by name. Called on the first rank.

    Raises:
        LoadError, ValueError, TypeError: the same on every rank; what was at the path is still there.
    """
    control, first = topology.control, topology.rank == topology.ranks[0]
    folder: NewFolder | None = None

    def create() -> None:
        nonlocal folder
        if first or layout.failure is not None:
            folder = NewFolder.create(path, overwrite, layout.value)

    def write_part(folder: NewFolder) -> None:
        with control.working("writes its part of the checkpoint") as done, closing(folder):
            write(folder, done)
            with report.timed("sync"):
                folder.sync(lambda: done(0))

    def complete(folder: NewFolder) -> None:
        with report.timed("sync"):
            index = layout.value.index
            for name, content in {**({INDEX: index} if index is not None else {}), **small_files()}.items():
                folder.add(name, content)
            folder.commit()

    try:
        failure = Attempt(create).failure
        name = folder.temporary.name if folder is not None else ""
        name = control.settle("making the folder", failure, name, lambda views: views[control.ranks[0]])
        own = folder = folder or NewFolder(path, path.with_name(name), overwrite)
        seen = folder.temporary.is_dir()
        control.settle("finding the folder", None, seen, lambda views: check_seen_by_all(path.parent, views))
        control.settle("writing the checkpoint", Attempt(lambda: write_part(own)).failure)
        control.doing = "completes the checkpoint"
        failure = Attempt(lambda: complete(own)).failure if first else None
        control.settle("completing the checkpoint", failure, last=True)
    except BaseException:
        if folder is not None:
            folder.discard()
        raise


def write_regions(
    plan: WritePlan,
    tensors: Sequence[Tensor],
    layout: FilesLayout,
    folder: NewFolder,
    ranks: int,
    report: SaveReport,
    wrote: Callable[[int], None],
) -> None:
    """Writes all regions of a plan.

    Args:
        tensors: on CPU, on one accelerator, or on both.
        ranks: of this node, which share its processors.
        wrote: called now and then with the bytes written; may raise to stop.
    """
    on_cpu = torch.tensor([tensor.is_cpu for tensor in tensors], dtype=torch.bool)[plan.copies.target]
    for row, (file, offset) in zip(plan.copies.rows[on_cpu].tolist(), plan.origins[on_cpu].tolist(), strict=True):
        target, _, code, ndim = row[:4]
        start, size, strides = (row[4 + i * plan.copies.dims :][:ndim] for i in range(3))
        with report.timed("pack"):
            region = tensors[target].detach()[box_slices(start, size)].to(dtypes.from_code(code))
            data, offsets = _runs(region, strides)
        with report.timed("write") as block:
            block.nbytes, length = len(data), len(data) // len(offsets)
            for i, begin in enumerate(offsets):
                write_all(folder.open(layout.names[file]), data[i * length : (i + 1) * length], offset + begin)
        wrote(block.nbytes)
    if not on_cpu.all():
        rest = WritePlan(plan.copies.select(~on_cpu), plan.origins[~on_cpu])
        _write_from_device(rest, tensors, layout, folder, ranks, report, wrote)


def _runs(region: Tensor, strides: Sequence[int]) -> tuple[memoryview, list[int]]:
    """Returns the bytes of a region as a row-major tensor has them, and where in the tensor each of its contiguous runs starts
    (bytes). ``strides``: of the region in that tensor, in elements."""
    sizes, itemsize = region.shape, region.element_size()
    dims = sorted(range(region.ndim), key=lambda dim: (sizes[dim] > 1, -strides[dim]))
    region = region.permute(dims).resolve_conj().resolve_neg().contiguous()
    length = 1
    while dims and (sizes[dims[-1]] == 1 or strides[dims[-1]] == length):
        length *= sizes[dims.pop()]
    steps = ([i * strides[dim] * itemsize for i in range(sizes[dim])] for dim in dims)
    data = memoryview(byte_view(region).numpy()).cast("B")  # type: ignore[arg-type]
    return data, list(map(sum, product(*steps)))


def _write_from_device(
    plan: WritePlan,
    tensors: Sequence[Tensor],
    layout: FilesLayout,
    folder: NewFolder,
    ranks: int,
    report: SaveReport,
    wrote: Callable[[int], None],
) -> None:
    """Writes regions of tensors on a device straight to the files, through the device's pipe."""
    device = tensors[int(plan.copies.target[0])].device
    pipe, stream = DevicePipe.of(device, ranks), torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    report.peak_staging = pipe.footprint
    used, numbers = set(plan.origins[:, 0].tolist()), torch.arange(len(layout.names))
    descriptors = [folder.open(name) if number in used else -1 for number, name in enumerate(layout.names)]
    nbytes = plan.copies.nbytes()
    _, counts = torch.unique_consecutive((nbytes.cumsum(0) - nbytes) // CALL_BYTES, return_counts=True)
    batches = (torch.split(each, counts.tolist()) for each in (plan.copies.rows, plan.origins))
    for rows, origins in zip(*batches, strict=True):
        table = CopyTable(rows.clone())
        sources = [tensors[target] for target in table.renumber_targets()]
        offsets = torch.zeros_like(numbers)
        with report.timed("write") as block, stream:
            block.nbytes, failed, _, error = ops.write_from_device(
                descriptors, numbers, offsets, origins, sources, table.rows, pipe.native
            )
        if failed >= 0:
            raise OSError(error, os.strerror(error), str(folder.temporary / layout.names[failed]))
        wrote(block.nbytes)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
