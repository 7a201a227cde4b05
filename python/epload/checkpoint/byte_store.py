"""The seam below file checkpoints: files that are read by byte ranges, wherever they are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from torch import Tensor


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

    @abstractmethod
    def stream(self) -> BinaryIO:
        """A new stream over the open file, positioned at its beginning; the caller closes it. Raises as :meth:`read`."""

    @property
    def mapping_path(self) -> Path | None:
        """A local path by which the open file can be memory-mapped; None if there is none."""
        return None


class Readable(Protocol):
    """Regions of tensors that a store reads from its files: into a model's tensors, or to compute digests."""

    @property
    def origins(self) -> Tensor:
        """int64 CPU tensor [n, 2]; for each region the index of its checkpoint tensor, and its offset there in bytes."""

    def read(
        self, descriptors: Sequence[int], files: Tensor, offsets: Tensor, threads: int, direct: bool
    ) -> tuple[int, int, int, int]:
        """Reads the regions; arguments and result are those of ``ops.read_regions``."""


class ByteStore(ABC):
    """The files of one checkpoint, open for reading. Reading is thread-safe; closing must not overlap with it.

    An implementation opens each file once and reads everything, headers included, from what it opened, so that what was
    parsed is what is read.
    """

    files: Sequence[StoredFile]
    """The files that ranges refer to by index."""
    direct_io: bool = False
    """Whether large reads of what is not in the page cache go past it, in a store that uses it."""

    @abstractmethod
    def identity(self) -> tuple[Hashable, ...]:
        """What must still be true when the load ends: the version that each file had when it was opened.

        Two stores with equal identities read the same bytes.
        """

    @abstractmethod
    def changed(self) -> str:
        """How a file now differs from :meth:`identity`, e.g. "PATH was replaced by another file"; empty if none does."""

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

    def read_regions(self, files: Tensor, offsets: Tensor, regions: Readable) -> int | None:
        """Reads regions of tensors without a buffer in between, if the store has such a path.

        Args:
            files: int64 CPU tensor [t], for each tensor the index of its file.
            offsets: int64 CPU tensor [t], where each tensor starts in its file, in bytes.
            regions: what to read.

        Returns:
            The bytes read, or None if the store can only :meth:`read`.

        Raises:
            CheckpointError: as for :meth:`read`.
        """
        return None

    @abstractmethod
    def reopen(self) -> None:
        """Opens all files by path again, so that later reads see what other ranks find there.

        Raises:
            CheckpointError: a file is not the one that was opened before.
        """

    @abstractmethod
    def close(self) -> None:
        """Releases connections and files. Later reads open the files again, provided that they are unchanged."""
