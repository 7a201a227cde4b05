"""The seam below file checkpoints: folders of files that are read by byte ranges, wherever they are stored.

A storage scheme is one module with a :class:`ByteStore` and a function ``locate``, which ``STORES`` in
:mod:`epload.checkpoint.finding` lists.
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch
from torch import Tensor

from epload.core import threads
from epload.core.columns import batches
from epload.core.copy_table import ALIGNMENT
from epload.core.regions import Regions
from epload.errors import CheckpointError

_STREAM_BYTES = 256 << 10
REQUESTS = 16
"""Requests that a process has under way at once: one of object storage takes tens of milliseconds, through a mount, too."""
PEEK_BYTES = 16 << 20
"""Maximum number of bytes of a configuration."""
SPAN_BYTES = 64 << 20
"""Approximate number of bytes that :meth:`ByteStore.read_regions` reads at a time; one large region may take more."""
Source = str | os.PathLike[str]
"""A path or URL."""
Progress = Callable[[int], None]
"""Called with a number of bytes after each part of some work; may raise to stop it."""
Shared = tuple[str, Sequence[str]]
"""The source, and the names of the files, in the manifest of the rank that has opened a checkpoint."""

S = TypeVar("S")
T = TypeVar("T")


def in_threads(call: Callable[[S], T], values: Iterable[S]) -> list[T]:
    """Returns what a function returns for each value, by REQUESTS threads at once, or as many as can be started."""
    return threads.run_all("epload-get", [partial(call, value) for value in values], REQUESTS)


class StoredFile(ABC):
    """One open file of a store. ``str(file)`` is its path or URL, for error messages."""

    name: str
    """Last component of the path or URL."""
    nbytes: int
    """Size in bytes when the file was opened."""
    identity: str = ""
    """The storage's own identifier of the content, such as an ETag; empty if it has none."""

    @property
    def version(self) -> str:
        """Equal for two processes of one machine that have opened one file in the same state; empty if that cannot be told."""
        return self.identity

    mapping_path: Path | None = None
    """A local path by which the open file can be memory-mapped; None if there is none."""

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> bytes:
        """Reads bytes [offset, offset + nbytes), fewer at the end of the file. For headers; data goes through the store.

        Raises:
            CheckpointError: the file has changed since it was opened.
            OSError: it cannot be read.
        """

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
    """A folder, and the files of one checkpoint that are open in it. ``str(store)`` is its path or URL, for error messages.

    Each file is opened once and everything, headers included, is read from what was opened, so that what was parsed is what is
    read. Reading is thread-safe; closing must not overlap with it.
    """

    direct_io: bool = False
    """True if large reads of what is not in the page cache go past it, in a store that uses it."""
    threads: int | None = None
    """Number of threads that read, in a store that has threads; None for the store's own number."""

    def __init__(self) -> None:
        self.files: list[StoredFile] = []
        """The files with tensors, to which ranges refer by index."""
        self.descriptions: list[StoredFile] = []
        """Other files whose content the checkpoint depends on, such as an index. A rank that has joined need not have them."""
        self.peeked: list[str] = []
        """Names of files that were read and are not kept open, such as a configuration."""

    # ---- the folder ----

    @abstractmethod
    def names(self, standard: Sequence[str] = ()) -> list[str]:
        """Returns the names of what is in it, sorted; those of folders end with "/". Raises CheckpointError, OSError.

        Args:
            standard: names to look for if the store cannot list.
        """

    @abstractmethod
    def path_of(self, name: str) -> str:
        """Returns the path or URL of a file in it, for error messages."""

    def resolve(self, relative: str) -> Source:
        """Returns the path or URL of what has this path relative to the folder. Raises CheckpointError if there can be none."""
        raise CheckpointError(f"{self}: expected a folder or a URL, from which {relative} can be found")

    @abstractmethod
    def open_files(self, names: Sequence[str]) -> Iterable[StoredFile]:
        """Opens files. Raises CheckpointError; OSError, which names the file."""

    def open(self, names: Sequence[str]) -> list[StoredFile]:
        """Opens the files with tensors. Raises as :meth:`open_files`."""
        self.files += self.open_files(names)
        return self.files

    def open_description(self, name: str) -> StoredFile:
        """Opens another file that the checkpoint depends on. Raises as :meth:`open_files`."""
        self.descriptions += self.open_files([name])
        return self.descriptions[-1]

    def peek(self, name: str) -> bytes:
        """Returns the content of a file, up to PEEK_BYTES, and closes it. Raises as :meth:`open_files`."""
        (file,) = self.open_files([name])
        self.peeked.append(name)
        with closing(file):
            return file.read(0, PEEK_BYTES)

    def published(self, file: StoredFile) -> str:
        """Returns the digest that has been published for one of its files: hexadecimal sha256, or of 40 digits that of git; empty
        if none is known."""
        return ""

    # ---- the open files ----

    def changed(self) -> str:
        """Returns how a file has changed since it was opened, e.g. "PATH was replaced by another file"; empty if none has."""
        return next(filter(None, (file.changed() for file in self._all_files())), "")

    def reopen(self) -> None:
        """Opens all files by path again, so that later reads see what other ranks find there. Raises CheckpointError if a file
        is not the one that was opened before."""
        if changed := self.changed():
            raise CheckpointError(f"{changed} after it was opened; load again")

    def close(self) -> None:
        """Releases connections and files. Later reads open the files again, provided that they are unchanged."""
        for file in self._all_files():
            file.close()

    def _all_files(self) -> Iterator[StoredFile]:
        return chain(self.descriptions, self.files)

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
            regions: what to read, and where to.

        Returns the bytes read. Raises as :meth:`read`.
        """
        spans = regions.copies.spans()
        for rows in batches(spans, SPAN_BYTES):
            copies, span, origin = regions.copies.select(rows), spans[rows], regions.origins[rows]
            aligned = -(span // -ALIGNMENT) * ALIGNMENT
            copies.offset[:] = aligned.cumsum(0) - aligned
            buffer = torch.empty(int(aligned.sum()), dtype=torch.uint8)
            file, begin = files[origin[:, 0]], offsets[origin[:, 0]] + origin[:, 1]
            self.read(torch.stack([file, begin, copies.offset, span], 1), buffer)
            regions._replace(copies=copies).unpack(buffer)
        return int(spans.sum())
