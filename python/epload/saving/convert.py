"""Rewrites a checkpoint of any format as safetensors files, in a few megabytes of memory a process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
from epload.cluster.single_flight import Call, Refused, exclusive
from epload.cluster.topology import Topology, as_timedelta
from epload.control.activity import working
from epload.core import dtypes as dtype_names
from epload.core.attempt import attempt
from epload.core.default_device import on_cpu
from epload.core.pieces import Piece
from epload.errors import CheckpointError, LoadError
from epload.files import read_regular
from epload.mapping.mapping import Rename, apply_renames
from epload.mapping.precision import kept_by_config
from epload.saving.folder import NewFolder
from epload.saving.layout import INDEX, FilesLayout, lay_out
from epload.saving.report import SaveReport
from epload.saving.source import with_dtype
from epload.saving.writer import NewFiles

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
        OSError: the folder cannot be written. With a topology a LoadError, the same on every rank.
    """
    began = perf_counter()
    report = SaveReport(path=str(Path(path).expanduser().absolute()))
    ranks = _Ranks(topology, timeout)

    with ranks.guard(), ExitStack() as opened_files:
        opened, failure = attempt(lambda: _open(source, prefix, variant, dtype, renames, max_shard_bytes))
        view: list[Any] = []
        if opened is not None:
            if opened[0] is not source:
                opened_files.callback(opened[0].close)
            old = opened[0].manifest
            view = [old.identity, old.version, opened[1].digest.hex(), max_shard_bytes, report.path, overwrite]
        ranks.settle("opening the checkpoint", failure, view, _check_equal)
        assert opened is not None
        checkpoint, new, layout = opened
        with ranks.new_folder(Path(report.path), layout, overwrite) as folder:
            chunks = _chunks(checkpoint.manifest, new, layout)
            # Without locations there are no facts by which ranks recognize each other's files.
            mine = chunks[ranks.part(len(chunks), whole=checkpoint.manifest.locations is None)]

            def copy() -> None:
                ranks.check_seen(folder)
                with ranks.working("rewrites its part of the checkpoint") as done:
                    _copy(checkpoint, mine, layout, folder, progress, done)
                    if changed := checkpoint.changed():
                        raise CheckpointError(f"{changed} while it was converted: convert it again")

            ranks.settle("writing the checkpoint", attempt(copy)[1])

            failure = attempt(lambda: _commit(folder, layout, files))[1] if ranks.first else None
            ranks.settle("completing the checkpoint", failure, last=True)
    report.files, report.tensors, report.nbytes = len(layout.files), len(new.names), new.nbytes
    report.written = sum(chunk.written for chunk in mine)
    report.seconds = perf_counter() - began
    return report


def _open(
    source: Any,
    prefix: str,
    variant: str,
    dtype: torch.dtype | None,
    renames: Sequence[Rename],
    max_shard_bytes: int,
) -> tuple[Checkpoint, Manifest, FilesLayout]:
    """The checkpoint, and what is written."""
    checkpoint = Checkpoint.open(source, prefix=prefix, variant=variant)
    new = _converted(source, checkpoint.manifest, dtype, renames)
    return checkpoint, new, lay_out(new.names, new.shapes, new.dtypes, max_shard_bytes)


def _commit(folder: NewFolder, layout: FilesLayout, files: Sequence[str | Path]) -> None:
    if layout.index is not None:
        folder.add(INDEX, layout.index)
    for file in map(Path, files):
        folder.add(file.name, read_regular(file))
    folder.sync()
    folder.commit()


def _converted(source: Any, manifest: Manifest, dtype: torch.dtype | None, renames: Sequence[Rename]) -> Manifest:
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


class _Chunk(NamedTuple):
    """A byte range of one tensor that is read at once."""

    tensor: int
    begin: int
    """Offset in the tensor, in bytes."""
    nbytes: int
    have: torch.dtype
    wanted: torch.dtype
    file: int
    offset: int
    """Offset in the file, in bytes."""

    @property
    def written(self) -> int:
        return self.nbytes // self.have.itemsize * self.wanted.itemsize


def _chunks(old: Manifest, new: Manifest, layout: FilesLayout) -> list[_Chunk]:
    """Divides all tensors into chunks, in the order of the files."""
    found = []
    places = zip(layout.file.tolist(), layout.offset.tolist(), strict=True)
    tensors = zip(old.dtypes, new.dtypes, old.nbytes_of(), places, strict=True)
    for index, (have, wanted, nbytes, (file, offset)) in enumerate(tensors):
        step = _CHUNK_ELEMENTS * have.itemsize
        for begin in range(0, nbytes, step):
            at = offset + begin // have.itemsize * wanted.itemsize
            found.append(_Chunk(index, begin, min(step, nbytes - begin), have, wanted, file, at))
    return sorted(found, key=lambda chunk: (chunk.file, chunk.offset))


def _copy(
    checkpoint: Checkpoint,
    chunks: Sequence[_Chunk],
    layout: FilesLayout,
    folder: NewFolder,
    progress: Callable[[int], object] | None,
    done: Callable[[int], None],
) -> None:
    """``done``: called with the bytes of each chunk; may raise to stop."""
    buffer = torch.empty(max((chunk.nbytes for chunk in chunks), default=0), dtype=torch.uint8)
    with NewFiles(folder.temporary, [file.name for file in layout.files]) as files:
        for chunk in chunks:
            raw = buffer[: chunk.nbytes]
            checkpoint.fill(raw, [Piece(chunk.tensor, chunk.begin, 0, chunk.nbytes)])
            if progress is not None:
                progress(chunk.nbytes)
            same = chunk.have == chunk.wanted
            converted = raw if same else raw.view(chunk.have).to(chunk.wanted).view(torch.uint8)
            files.write(converted, torch.tensor([[chunk.file, chunk.offset, 0, converted.nbytes]]))
            done(chunk.nbytes)
        files.sync(lambda: done(0))


class _Ranks:
    """This process, alone or among others that divide the work."""

    def __init__(self, topology: Topology | None, timeout: timedelta | float | None) -> None:
        self._topology = topology
        self._timeout = as_timedelta(timeout)
        self.first = topology is None or topology.rank == topology.ranks[0]

    @contextmanager
    def guard(self) -> Iterator[None]:
        if self._topology is None:
            yield
            return
        call = Call("convert()", self._topology, self, threading.current_thread())
        try:
            with exclusive(call, self._timeout), self._topology.control.guard():
                yield
        except Refused as refused:
            raise refused.failure.error() from None

    def settle(
        self, what: str, failure: Exception | None, view: Any = None,
        decide: Callable[[dict[int, Any]], Any] = lambda views: None, last: bool = False,
    ) -> Any:  # fmt: skip
        """See :meth:`~epload.control.control.Control.settle`; alone, the failure itself is raised."""
        if self._topology is not None:
            return self._topology.control.settle(what, failure, view, decide, last=last)
        if failure is not None:
            raise failure
        return decide({0: view})

    @contextmanager
    def working(self, what: str) -> Iterator[Callable[[int], None]]:
        """See :func:`~epload.control.activity.working`."""
        if self._topology is None:
            yield lambda nbytes: None
            return
        with working(self._topology.control, what) as done:
            yield done

    def check_seen(self, folder: NewFolder) -> None:
        """Raises LoadError if this process does not see the folder that the first has made."""
        if not folder.exists:
            raise LoadError(
                f"expected all ranks to see {folder.temporary}, which the first has made: convert to a path on a file system "
                "that all share, or in one process"
            )

    def part(self, count: int, whole: bool) -> slice:
        """Returns which of ``count`` things this process does; if they are a ``whole``, the first process does all."""
        if self._topology is None:
            return slice(count)
        if whole:
            return slice(count if self.first else 0)
        number, ranks = self._topology.ranks.index(self._topology.rank), len(self._topology.ranks)
        return slice(count * number // ranks, count * (number + 1) // ranks)

    @contextmanager
    def new_folder(self, path: Path, layout: FilesLayout, overwrite: bool) -> Iterator[NewFolder]:
        """The hidden folder with its empty files, which the first of the ranks makes. It is deleted on a failure."""
        folder: NewFolder | None = None

        def make() -> None:
            nonlocal folder
            folder = NewFolder.create(path, overwrite)
            folder.add_files(layout.files)

        try:
            failure = attempt(make)[1] if self.first else None
            name = folder.temporary.name if folder is not None else ""
            name = self.settle("making the folder", failure, name, lambda views: views[min(views)])
            folder = folder or NewFolder(path, path.with_name(name), overwrite)
            yield folder
        except BaseException:
            if folder is not None:
                folder.discard()
            raise


def _check_equal(views: dict[int, Any]) -> None:
    for rank, view in views.items():
        if view != views[min(views)]:
            raise ValueError(
                f"ranks {min(views)} and {rank} convert different checkpoints, or pass different options; pass the same on all "
                "ranks"
            )
