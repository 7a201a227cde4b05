"""Rewrites a checkpoint of any format as safetensors files, in one process and a few megabytes of memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.core import dtypes as dtype_names
from epload.core.pieces import Piece
from epload.errors import CheckpointError
from epload.mapping.rules import Rename, apply_renames
from epload.saving.folder import NewFolder
from epload.saving.layout import INDEX, FilesLayout, lay_out
from epload.saving.report import SaveReport
from epload.saving.writer import write_all

_CHUNK_ELEMENTS = 2 << 20
"""Read at once."""


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
    progress: Callable[[int], object] | None = None,
) -> SaveReport:
    """Writes the tensors of a checkpoint to a folder of safetensors files, which appears when it is complete.

    Args:
        source, prefix: as for :meth:`epload.Checkpoint.open`.
        path, max_shard_bytes, files, overwrite: as for :func:`epload.save`.
        dtype: of floating-point tensors of at least 16 bits; by default as they are.
        renames: applied to the names, in order.
        progress: called with the number of bytes after each read.

    Raises:
        CheckpointError: the source cannot be read, or has changed meanwhile.
        ValueError: names that become equal, a dtype that the format lacks, or a folder that must not be overwritten.
        OSError: the folder cannot be written.
    """
    began = perf_counter()
    checkpoint = Checkpoint.open(source, prefix=prefix)
    old = checkpoint.manifest
    new = _converted(old, dtype, renames)
    layout = lay_out(new.names, new.shapes, new.dtypes, max_shard_bytes)
    folder = NewFolder.create(Path(path).expanduser().absolute(), overwrite)
    try:
        folder.add_files(layout.files)
        _copy(checkpoint, old, new, layout, folder.temporary, progress)
        if changed := checkpoint.changed():
            raise CheckpointError(f"{changed} while it was converted: convert it again")
        if layout.index is not None:
            folder.add(INDEX, layout.index)
        for file in map(Path, files):
            folder.add(file.name, file.read_bytes())
        folder.commit()
    except BaseException:
        with suppress(OSError):
            folder.discard()
        raise
    finally:
        checkpoint.close()
    return SaveReport(
        path=str(folder.path), files=len(layout.files), tensors=len(new.names), nbytes=new.nbytes, written=new.nbytes,
        seconds=perf_counter() - began,
    )  # fmt: skip


def _converted(manifest: Manifest, dtype: torch.dtype | None, renames: Sequence[Rename]) -> Manifest:
    names = apply_renames(tuple(renames), list(manifest.names))
    if len(set(names)) != len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the renames give several tensors the name {name}; change them so that names stay different")
    dtypes = manifest.dtypes
    if dtype is not None:
        dtypes = tuple(dtype if dtype_names.is_wide(of) else of for of in dtypes)
    return replace(manifest, names=tuple(names), dtypes=dtypes, locations=None)


def _copy(
    checkpoint: Checkpoint,
    old: Manifest,
    new: Manifest,
    layout: FilesLayout,
    folder: Path,
    progress: Callable[[int], object] | None,
) -> None:
    buffer = torch.empty(_CHUNK_ELEMENTS * max((of.itemsize for of in old.dtypes), default=1), dtype=torch.uint8)
    fds = [os.open(folder / file.name, os.O_WRONLY) for file in layout.files]
    try:
        places = zip(layout.file.tolist(), layout.offset.tolist(), strict=True)
        tensors = zip(old.dtypes, new.dtypes, old.nbytes_of(), places, strict=True)
        for index, (have, wanted, nbytes, (file, offset)) in enumerate(tensors):
            step = _CHUNK_ELEMENTS * have.itemsize
            for begin in range(0, nbytes, step):
                chunk = buffer[: min(step, nbytes - begin)]
                checkpoint.fill(chunk, [Piece(index, begin, 0, len(chunk))])
                if progress is not None:
                    progress(len(chunk))
                converted = chunk if have == wanted else chunk.view(have).to(wanted).view(torch.uint8)
                at = offset + begin // have.itemsize * wanted.itemsize
                write_all(fds[file], memoryview(converted.numpy()).cast("B"), at)  # type: ignore[arg-type]
        for fd in fds:
            os.fsync(fd)
    finally:
        for fd in fds:
            os.close(fd)
