"""Rewrites a checkpoint of any format as safetensors files, in a few megabytes of memory a process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.checkpoint.opening import read_config
from epload.checkpoint.state_dict import STATE_DICT
from epload.core import dtypes as dtype_names
from epload.core.attempt import Attempt
from epload.core.default_device import on_cpu
from epload.core.pieces import Piece
from epload.errors import CheckpointError
from epload.files import read_regular
from epload.mapping.mapping import Rename, apply_renames
from epload.mapping.precision import kept_by_config
from epload.ranks.control import Control
from epload.ranks.topology import Topology, as_timedelta
from epload.report import SaveReport
from epload.saving import writer
from epload.saving.folder import NewFolder
from epload.saving.layout import FilesLayout, lay_out
from epload.saving.source import with_dtype

_CHUNK_ELEMENTS = 2 << 20
"""Read at once."""


@on_cpu
def convert(
    source: Any,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    renames: Sequence[Rename] = (),
    max_shard_bytes: int = 5 << 30,
    files: Sequence[str | Path] = (),
    overwrite: bool = False,
    prefix: str = "",
    variant: str = "",
    topology: Topology | None = None,
    timeout: timedelta | float | None = None,
    progress: Callable[[int], object] | None = None,
) -> SaveReport:
    """Writes the tensors of a checkpoint to a folder of safetensors files, which appears when it is complete.

    Not collective, unless a topology is passed.

    Args:
        source: as for :meth:`epload.Checkpoint.open`, as are ``prefix`` and ``variant``.
        path: as for :func:`epload.save`, as are ``max_shard_bytes``, ``files`` and ``overwrite``.
        dtype: of floating-point tensors of at least 16 bits; by default as they are. Refused if weights are quantized. Where a
            ``config.json`` next to the source names a transformers model, what ``from_pretrained(dtype=)`` keeps in float32 stays
            as it is; a class that is not installed is an error.
        renames: applied to the names, in order.
        topology: of ranks that divide the work; all of them call this, with equal arguments, and see the folder.
        timeout: of these ranks, as for :func:`epload.save`.
        progress: called with the number of bytes after each read of this process.

    Raises:
        CheckpointError: the source cannot be read, or has changed meanwhile.
        ValueError: names that become equal, a dtype that the format lacks, a ``dtype`` for quantized weights, or a folder that
            must not be overwritten.
        LoadError: the folder cannot be written. With a topology, all errors are the same on every rank.
    """
    began = perf_counter()
    report = SaveReport(path=str(Path(path).expanduser().absolute()))
    with ExitStack() as stack:
        if topology is not None:
            made_by = threading.current_thread()
            stack.enter_context(writer.exclusively("convert()", topology, object(), made_by, as_timedelta(timeout)))
        else:
            topology = Topology([[0]], None, 0, Control(None, (0,), 0))
        checkpoint = Attempt(lambda: Checkpoint.open(source, prefix=prefix, variant=variant))
        if checkpoint.failure is None and checkpoint.value is not source:
            stack.callback(checkpoint.value.close)
        new = Attempt(lambda: _new_manifest(checkpoint.value.manifest, source, dtype, renames))
        layout, work = Attempt(lambda: lay_out(new.value, max_shard_bytes)), ""
        if layout.failure is None:
            old = checkpoint.value.manifest
            work = repr((old.identity, old.version, new.value.digest, max_shard_bytes, report.path, overwrite))
        topology.control.settle("opening the checkpoint", layout.failure, work, _check_equal)
        chunks = _own_chunks(topology, checkpoint.value.manifest)

        def write(folder: NewFolder, done: Callable[[int], None]) -> None:
            for chunk in chunks:
                nbytes, written = _copy(checkpoint.value, new.value, layout.value, *chunk, folder)
                report.written += written
                if progress is not None:
                    progress(nbytes)
                done(nbytes)
            if changed := checkpoint.value.changed():
                raise CheckpointError(f"{changed} while it was converted: convert it again")

        def small_files() -> dict[str, bytes]:
            return {file.name: read_regular(file) for file in map(Path, files)}

        writer.write_checkpoint(topology, Path(report.path), overwrite, layout, write, small_files, report)
    report.files, report.tensors, report.nbytes = len(layout.value.names), len(new.value.names), new.value.nbytes
    report.seconds = perf_counter() - began
    return report


def _check_equal(work: dict[int, str]) -> None:
    first = min(work)
    for rank, of_rank in work.items():
        if of_rank != work[first]:
            raise ValueError(
                f"ranks {first} and {rank} convert different checkpoints, or pass different options; pass the same on all ranks"
            )


def _new_manifest(manifest: Manifest, source: Any, dtype: torch.dtype | None, renames: Sequence[Rename]) -> Manifest:
    """Returns the tensors that are written."""
    if dtype is not None:
        manifest = with_dtype(manifest, dtype, _kept_in_fp32(source, manifest, dtype))
    names = apply_renames(tuple(renames), list(manifest.names))
    if len(set(names)) != len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the renames give several tensors the name {name}; change them so that names stay different")
    return replace(manifest, names=tuple(names), locations=None)


def _kept_in_fp32(source: Any, manifest: Manifest, dtype: torch.dtype) -> set[str]:
    """Returns the names of the tensors that the model, which the configuration next to the checkpoint names, keeps in float32.

    Raises:
        CheckpointError: the configuration cannot be read.
        ValueError: it names a model that is unknown, or that the checkpoint does not fit.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return set()
    if isinstance(source, Checkpoint):
        source = manifest.source if manifest.source != STATE_DICT else None
    config = read_config(source)
    if not config.get("architectures"):
        return set()
    try:
        return kept_by_config(config, manifest, dtype)
    except ValueError as error:
        raise ValueError(
            f"cannot tell which tensors from_pretrained(dtype={dtype_names.name(dtype)}) keeps in float32: the config.json next "
            f"to {manifest.source} names a model that cannot be built ({error}); install what it needs, or move the "
            "configuration away to cast all tensors"
        ) from error


def _own_chunks(topology: Topology, old: Manifest) -> list[tuple[int, int, int]]:
    """Divides all tensors into chunks: tensor, first element, and number of elements. Returns those that this rank rewrites."""
    counts, step = list(map(prod, old.shapes)), _CHUNK_ELEMENTS
    chunks = [(i, begin, min(step, count - begin)) for i, count in enumerate(counts) for begin in range(0, count, step)]
    rank, ranks = topology.ranks.index(topology.rank), len(topology.ranks)
    if old.locations is None:  # there are no facts by which ranks recognize one another's files: the first does all
        return chunks if rank == 0 else []
    return chunks[len(chunks) * rank // ranks : len(chunks) * (rank + 1) // ranks]


def _copy(
    checkpoint: Checkpoint, new: Manifest, layout: FilesLayout, tensor: int, begin: int, count: int, folder: NewFolder
) -> tuple[int, int]:
    """Rewrites a chunk; returns the bytes read and written."""
    old_dtype, new_dtype = checkpoint.manifest.dtypes[tensor], new.dtypes[tensor]
    raw = torch.empty(count * old_dtype.itemsize, dtype=torch.uint8)
    checkpoint.fill(raw, [Piece(tensor, begin * old_dtype.itemsize, 0, len(raw))])
    converted = raw if old_dtype == new_dtype else raw.view(old_dtype).to(new_dtype).view(torch.uint8)
    offset = int(layout.offset[tensor]) + begin * new_dtype.itemsize
    fd = folder.open(layout.names[int(layout.file[tensor])])
    writer.write_all(fd, memoryview(converted.numpy()).cast("B"), offset)  # type: ignore[arg-type]
    return len(raw), len(converted)
