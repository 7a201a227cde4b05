"""Rewrites a checkpoint of any format as safetensors files, in a few megabytes of memory a process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.checkpoint.opening import read_config
from epload.checkpoint.state_dict import STATE_DICT
from epload.cluster.topology import Topology, as_timedelta
from epload.control.control import Control
from epload.core import dtypes as dtype_names
from epload.core.attempt import attempt
from epload.core.default_device import on_cpu
from epload.core.pieces import Piece
from epload.errors import CheckpointError
from epload.files import read_regular
from epload.mapping.precision import kept_by_config
from epload.mapping.rules import Rename, apply_renames
from epload.report import SaveReport
from epload.saving.layout import FilesLayout, lay_out
from epload.saving.run import exclusively
from epload.saving.source import with_dtype
from epload.saving.writer import NewFiles, write_checkpoint

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
        source: as for :meth:`epload.Checkpoint.open`.
        path: as for :func:`epload.save`.
        dtype: of floating-point tensors of at least 16 bits; by default as they are. Refused if weights are quantized. Where a
            ``config.json`` next to the source names a transformers model, what ``from_pretrained(dtype=)`` keeps in float32 stays
            as it is; a class that is not installed is an error.
        renames: applied to the names, in order.
        max_shard_bytes: as for :func:`epload.save`.
        files: as for :func:`epload.save`.
        overwrite: as for :func:`epload.save`.
        prefix: as for :meth:`epload.Checkpoint.open`.
        variant: as for :meth:`epload.Checkpoint.open`.
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
            stack.enter_context(exclusively("convert()", topology, object(), made_by, as_timedelta(timeout)))
        else:
            topology = Topology([[0]], None, 0, Control(None, (0,), 0))
        opened, failure = attempt(lambda: _open(source, prefix, variant, dtype, renames, max_shard_bytes))
        work = ""
        if opened is not None:
            checkpoint, new, layout = opened
            if checkpoint is not source:
                stack.callback(checkpoint.close)
            old = checkpoint.manifest
            work = repr((old.identity, old.version, new.digest, max_shard_bytes, report.path, overwrite))
        topology.control.settle("opening the checkpoint", failure, work, _check_equal)
        chunks = _own_chunks(topology, old, new, layout)

        def copy(new_files: NewFiles, done: Callable[[int], None]) -> None:
            _copy(checkpoint, chunks, new_files, progress, done)
            if changed := checkpoint.changed():
                raise CheckpointError(f"{changed} while it was converted: convert it again")

        write_checkpoint(
            topology, Path(report.path), overwrite, layout, None, copy,
            lambda: {file.name: read_regular(file) for file in map(Path, files)}, report,
        )  # fmt: skip
    report.files, report.tensors, report.nbytes = len(layout.files), len(new.names), new.nbytes
    report.written, report.seconds = sum(chunk.written for chunk in chunks), perf_counter() - began
    return report


def _check_equal(work: dict[int, str]) -> None:
    first = min(work)
    for rank, of_rank in work.items():
        if of_rank != work[first]:
            raise ValueError(
                f"ranks {first} and {rank} convert different checkpoints, or pass different options; pass the same on all ranks"
            )


def _open(
    source: Any,
    prefix: str,
    variant: str,
    dtype: torch.dtype | None,
    renames: Sequence[Rename],
    max_shard_bytes: int,
) -> tuple[Checkpoint, Manifest, FilesLayout]:
    """Returns the checkpoint, and what is written."""
    checkpoint = Checkpoint.open(source, prefix=prefix, variant=variant)
    manifest = checkpoint.manifest
    if dtype is not None:
        manifest = with_dtype(manifest, dtype, _kept_in_fp32(source, manifest, dtype))
    names = apply_renames(tuple(renames), list(manifest.names))
    if len(set(names)) != len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the renames give several tensors the name {name}; change them so that names stay different")
    new = replace(manifest, names=tuple(names), locations=None)
    return checkpoint, new, lay_out(new, max_shard_bytes)


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


class _Chunk(NamedTuple):
    """A byte range of one tensor that is read at once."""

    file: int
    offset: int
    """Offset in the file, in bytes."""
    tensor: int
    begin: int
    """Offset in the tensor, in bytes."""
    nbytes: int
    old: torch.dtype
    new: torch.dtype

    @property
    def written(self) -> int:
        return self.nbytes // self.old.itemsize * self.new.itemsize


def _own_chunks(topology: Topology, old: Manifest, new: Manifest, layout: FilesLayout) -> list[_Chunk]:
    """Divides all tensors into chunks, in the order of the files, and returns those that this rank rewrites."""
    chunks = []
    columns = old.dtypes, new.dtypes, old.nbytes_of(), layout.file.tolist(), layout.offset.tolist()
    for tensor, (have, want, nbytes, file, offset) in enumerate(zip(*columns, strict=True)):
        step = _CHUNK_ELEMENTS * have.itemsize
        for begin in range(0, nbytes, step):
            at = offset + begin // have.itemsize * want.itemsize
            chunks.append(_Chunk(file, at, tensor, begin, min(step, nbytes - begin), have, want))
    chunks.sort(key=lambda chunk: chunk[:2])
    rank, ranks = topology.ranks.index(topology.rank), len(topology.ranks)
    if old.locations is None:  # there are no facts by which ranks recognize one another's files: the first does all
        return chunks if rank == 0 else []
    return chunks[len(chunks) * rank // ranks : len(chunks) * (rank + 1) // ranks]


def _copy(
    checkpoint: Checkpoint,
    chunks: Sequence[_Chunk],
    files: NewFiles,
    progress: Callable[[int], object] | None,
    done: Callable[[int], None],
) -> None:
    """``done``: called with the bytes of each chunk; may raise to stop."""
    buffer = torch.empty(max((chunk.nbytes for chunk in chunks), default=0), dtype=torch.uint8)
    for chunk in chunks:
        raw = buffer[: chunk.nbytes]
        checkpoint.fill(raw, [Piece(chunk.tensor, chunk.begin, 0, chunk.nbytes)])
        if progress is not None:
            progress(chunk.nbytes)
        converted = raw if chunk.old == chunk.new else raw.view(chunk.old).to(chunk.new).view(torch.uint8)
        files.write(converted, torch.tensor([[chunk.file, chunk.offset, 0, converted.nbytes]]))
        done(chunk.nbytes)
