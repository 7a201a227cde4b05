"""The seam below file checkpoints: folders of files that are read by byte ranges, wherever they are stored.

A store is one module with a :class:`Folder`, which ``STORES`` in :mod:`epload.checkpoint.opening` lists.
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, ClassVar

import torch
from torch import Tensor

from epload.core.copy_table import ALIGNMENT
from epload.core.regions import Regions
from epload.errors import CheckpointError

_STREAM_BYTES = 256 << 10
SPAN_BYTES = 64 << 20
"""Approximate number of bytes that :meth:`ByteStore.read_regions` reads at a time; one large region may take more."""


Shared = tuple[str, Sequence[str]]
"""The source, and the names of the files, in the manifest of the rank that has opened a checkpoint."""


class StoredFile(ABC):
    """One open file of a store. ``str(file)`` is its path or URL, for error messages. Reading is thread-safe."""

    name: str
    """Last component of the path or URL."""
    nbytes: int
    """Size in bytes when the file was opened."""
    identity: str = ""
    """The storage's own identifier of the content, such as an ETag; empty if it has none."""
    mapping_path: Path | None = None
    """A local path by which the open file can be memory-mapped; None if there is none."""

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> bytes:
        """Reads bytes [offset, offset + nbytes), fewer at the end of the file. For headers; data goes through the store.

        Raises:
            CheckpointError: the file has changed since it was opened.
            OSError: it cannot be read.
        """

    def read_whole(self, limit: int) -> bytes:
        """Returns all bytes of a file that describes others. Raises as :meth:`read`; CheckpointError if it is too large."""
        if self.nbytes > limit:
            raise CheckpointError(
                f"{self} has {self.nbytes} bytes, expected at most {limit} from its name: replace it, or save it again"
            )
        return self.read(0, self.nbytes)

    def stream(self) -> BinaryIO:
        """Returns a new stream over the open file, positioned at its beginning. Reading raises as :meth:`read`."""
        return io.BufferedReader(_Stream(self), _STREAM_BYTES)

    def changed(self) -> str:
        """Returns how the file has changed since it was opened, e.g. "PATH was replaced by another file"; empty if not."""
        return ""

    def close(self) -> None:
        """Releases what it holds, if anything. Later reads open the file again, provided that it is unchanged."""
        return None


class _Stream(io.RawIOBase):
    """Reads a file from its beginning."""

    def __init__(self, file: StoredFile) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.nbytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        part = self._file.read(self._position, len(buffer))
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)


class ByteStore(ABC):
    """The files of one checkpoint, open for reading. Reading is thread-safe; closing must not overlap with it.

    Each file is opened once and everything, headers included, is read from what was opened, so that what was parsed is what is
    read.
    """

    files: Sequence[StoredFile]
    _all: Sequence[StoredFile]
    """The files, and others whose content the checkpoint depends on."""
    direct_io: bool = False
    """True if large reads of what is not in the page cache go past it, in a store that uses it."""
    threads: int | None = None
    """Number of threads that read, in a store that has threads; None for the store's own number."""

    def __init__(self, files: Sequence[StoredFile], metadata: Sequence[StoredFile] = ()) -> None:
        """Takes ownership of the files.

        Args:
            files: the files that ranges refer to by index.
            metadata: other files whose content the checkpoint depends on, such as an index, which must not change either.
        """
        self.files = files
        self._all = [*metadata, *files]

    def changed(self) -> str:
        """Returns how a file has changed since it was opened, e.g. "PATH was replaced by another file"; empty if none has."""
        return next(filter(None, (file.changed() for file in self._all)), "")

    def reopen(self) -> None:
        """Opens all files by path again, so that later reads see what other ranks find there. Raises CheckpointError if a file
        is not the one that was opened before."""
        if changed := self.changed():
            raise CheckpointError(f"{changed} after it was opened; load again")

    def close(self) -> None:
        """Releases connections and files. Later reads open the files again, provided that they are unchanged."""
        for file in self._all:
            file.close()

    @abstractmethod
    def read(self, ranges: Tensor, buffer: Tensor) -> None:
        """Reads byte ranges of files into a buffer. Ranges that follow one another in a file are read with one request.

        Args:
            ranges: int64 CPU tensor [n, 4], one a row: index of the file, offset in it, offset in ``buffer``, length; the last
                three in bytes.
            buffer: contiguous, uint8, on CPU.

        Raises:
            CheckpointError: a file has changed, cannot be read or ends too early.
        """

    def read_regions(self, files: Tensor, offsets: Tensor, regions: Regions) -> int:
        """Reads regions of tensors into a model's. This implementation has a buffer of about SPAN_BYTES, in which it reads what
        each region spans in its tensor.

        Args:
            files: int64 CPU tensor [t], for each tensor the index of its file.
            offsets: int64 CPU tensor [t], where each tensor starts in its file, in bytes.
            regions: what to read, and where to; targets on CPU.

        Returns the bytes read. Raises as :meth:`read`.
        """
        spans = regions.copies.spans()
        batch = (spans.cumsum(0) - spans) // SPAN_BYTES
        for number in torch.unique(batch).tolist():
            rows = batch == number
            copies, span, origin = regions.copies.select(rows), spans[rows], regions.origins[rows]
            ends = (-(span // -ALIGNMENT) * ALIGNMENT).cumsum(0)
            copies.offset[:1] = 0
            copies.offset[1:] = ends[:-1]
            buffer = torch.empty(int(ends[-1]), dtype=torch.uint8)
            file, begin = files[origin[:, 0]], offsets[origin[:, 0]] + origin[:, 1]
            self.read(torch.stack([file, begin, copies.offset, span], 1), buffer)
            regions.unpack_other(copies, buffer)
        return int(spans.sum())


class Folder(ABC):
    """The location of a checkpoint's files. ``str(folder)`` is its path or URL, for error messages."""

    store: ClassVar[type[ByteStore]]
    """Reads the files that the folder has opened."""

    def __init__(self) -> None:
        self._opened: list[StoredFile] = []

    @classmethod
    @abstractmethod
    def locate(
        cls, source: str | os.PathLike[str], variant: str, progress: Callable[[int], None], shared: Shared | None
    ) -> tuple[Folder, str] | None:
        """Finds what a path or URL means. A store that downloads does so here.

        Args:
            source: as for ``Checkpoint.open``.
            variant: of the weights, where the store downloads.
            progress: called with numbers of bytes as they are downloaded.
            shared: what another rank has opened, if this one joins it.

        Returns:
            The folder, and the name of the file in it that is meant, "" for the folder itself; None if ``source`` is not of this
            store.

        Raises:
            CheckpointError: there is nothing.
        """

    @abstractmethod
    def names(self, standard: Sequence[str] = ()) -> list[str]:
        """Returns the names of what is in it, sorted; those of folders end with "/". Raises CheckpointError, OSError.

        Args:
            standard: names to look for if the store cannot list.
        """

    def open(self, names: Sequence[str]) -> list[StoredFile]:
        """Opens files. Raises CheckpointError; OSError, which names the file."""
        begin = len(self._opened)
        self._opened.extend(self._files(names))
        return self._opened[begin:]

    @abstractmethod
    def _files(self, names: Sequence[str]) -> Iterable[StoredFile]:
        """Opens files."""

    def read(self, name: str, limit: int) -> bytes:
        """Returns the content of a file, up to ``limit`` bytes. Raises as :meth:`open`."""
        (file,) = self._files([name])
        try:
            return file.read(0, limit)
        finally:
            file.close()

    def close(self) -> None:
        """Closes what was opened, if it was to no avail."""
        for file in self._opened:
            file.close()

    @abstractmethod
    def path_of(self, name: str) -> str:
        """Returns the path or URL of a file in it, for error messages."""
