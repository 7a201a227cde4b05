"""The seam below file checkpoints: folders of files that are read by byte ranges, wherever they are stored."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from epload.core.copy_table import ALIGNMENT
from epload.core.regions import Regions
from epload.errors import CheckpointError

_STREAM_BYTES = 256 << 10
SPAN_BYTES = 64 << 20
"""Approximate number of bytes that :meth:`ByteStore.read_regions` reads at a time; one large region may take more."""


class StoredFile(ABC):
    """One open file of a store. ``str(file)`` is its path or URL, for error messages. Reading is thread-safe."""

    name: str
    """Last component of the path or URL."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size in bytes when the file was opened."""

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> bytes:
        """Reads bytes [offset, offset + nbytes), fewer at the end of the file. For headers; data goes through the store.

        Raises:
            CheckpointError: the file has changed since it was opened.
            OSError: it cannot be read.
        """

    def read_whole(self, limit: int) -> bytes:
        """Returns all bytes of a file that describes others.

        Raises:
            CheckpointError: the file has changed since it was opened, or is larger than ``limit``.
            OSError: it cannot be read.
        """
        if self.nbytes > limit:
            raise CheckpointError(
                f"{self} has {self.nbytes} bytes, expected at most {limit} from its name: replace it, or save it again"
            )
        return self.read(0, self.nbytes)

    def stream(self) -> BinaryIO:
        """A new stream over the open file, positioned at its beginning; the caller closes it. Raises as :meth:`read`."""
        return io.BufferedReader(_Stream(self), _STREAM_BYTES)

    @property
    def identity(self) -> str:
        """The storage's own identifier of the content, such as an ETag; empty if it has none."""
        return ""

    @property
    def mapping_path(self) -> Path | None:
        """A local path by which the open file can be memory-mapped; None if there is none."""
        return None

    def close(self) -> None:
        """Releases what it holds, if anything. Later reads open the file again, provided that it is unchanged."""
        return None


class _Stream(io.RawIOBase):
    """Reads a file from its beginning."""

    def __init__(self, file: StoredFile) -> None:
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.nbytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        part = self._file.read(self._at, len(buffer))
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


class ByteStore(ABC):
    """The files of one checkpoint, open for reading. Reading is thread-safe; closing must not overlap with it.

    An implementation opens each file once and reads everything, headers included, from what it opened, so that what was
    parsed is what is read.
    """

    files: Sequence[StoredFile]
    """The files that ranges refer to by index."""
    direct_io: bool = False
    """True if large reads of what is not in the page cache go past it, in a store that uses it."""
    threads: int | None = None
    """Number of threads that read, in a store that has threads; None for the store's own number."""

    @abstractmethod
    def changed(self) -> str:
        """Returns how a file has changed since it was opened, e.g. "PATH was replaced by another file"; empty if none has."""

    @abstractmethod
    def read(self, ranges: Tensor, buffer: Tensor) -> None:
        """Reads byte ranges of files into a buffer. Returns when all are read.

        Ranges that follow one another in a file are read with one request.

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

        Returns:
            The bytes read.

        Raises:
            CheckpointError: as for :meth:`read`.
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

    @abstractmethod
    def reopen(self) -> None:
        """Opens all files by path again, so that later reads see what other ranks find there.

        Raises:
            CheckpointError: a file is not the one that was opened before.
        """

    @abstractmethod
    def close(self) -> None:
        """Releases connections and files. Later reads open the files again, provided that they are unchanged."""


class Folder(ABC):
    """The location of a checkpoint's files. ``str(folder)`` is its path or URL, for error messages."""

    @abstractmethod
    def names(self, standard: Sequence[str] = ()) -> list[str]:
        """Returns the names of what is in it, sorted; those of folders end with "/".

        Args:
            standard: names to look for if the store cannot list.

        Raises:
            CheckpointError, OSError: it cannot be read.
        """

    def present(self, names: Sequence[str]) -> set[str]:
        """Returns those of ``names`` that are in the folder. Raises as :meth:`names`."""
        return {*names} & {*self.names()}

    @abstractmethod
    def open(self, names: Sequence[str]) -> AbstractContextManager[Sequence[StoredFile]]:
        """Opens files, and closes them if the body raises. Raises CheckpointError; OSError, which names the file."""

    @abstractmethod
    def store(self, files: Sequence[StoredFile], metadata: Sequence[StoredFile] = ()) -> ByteStore:
        """A store of files that this folder has opened, of which it takes ownership.

        Args:
            files: the files that ranges refer to.
            metadata: other files whose content the checkpoint depends on, such as an index, which must not change either.
        """

    @abstractmethod
    def path_of(self, name: str) -> str:
        """The path or URL of a file in it, for error messages."""
