"""Local files as a byte store: each is opened once, read with a few threads, and checked for changes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from epload.checkpoint.byte_store import ByteStore, Folder, StoredFile
from epload.core.regions import Regions
from epload.errors import CheckpointError
from epload.files import open_regular
from epload.native import ops

READ_THREADS = 2
"""Two threads that read 16 MiB at a time into a reused buffer read the page cache at 12.6 GB/s; mmap and copy: 3.9 GB/s."""
_TICK_NS = 12_000_000
"""Longer than one tick of the kernel's timestamp clock (10 ms at 100 Hz): changes further apart than this differ in ctime."""
_COARSE_TICK_NS = 1_000_000_000
"""The same for file systems whose timestamps have a resolution of one second."""
_SETTLING_ROUNDS = 5


class FileVersion(NamedTuple):
    """Identifies a file by its ``stat``. Equal versions are the same file and, as far as ``stat`` can tell, the same bytes."""

    device: int
    inode: int
    nbytes: int
    mtime: int
    """Nanoseconds since the epoch."""
    ctime: int
    """Nanoseconds since the epoch."""

    @classmethod
    def of(cls, status: os.stat_result) -> FileVersion:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def difference(self, now: FileVersion) -> str:
        """Returns what happened to a file that had this version and now has ``now``; empty if nothing did."""
        if (now.device, now.inode) != (self.device, self.inode):
            return f"was replaced by another file (inode {self.inode}, now {now.inode})"
        if now.nbytes < self.nbytes:
            return f"was truncated ({self.nbytes} bytes, now {now.nbytes})"
        if now.nbytes > self.nbytes:
            return f"was modified ({self.nbytes} bytes, now {now.nbytes})"
        if now.mtime != self.mtime:
            return f"was modified ({_at(now.mtime)})"
        if now.ctime != self.ctime:
            return f"was modified, or its attributes were ({_at(now.ctime)})"
        return ""


def _at(nanoseconds: int) -> str:
    return time.strftime("at %Y-%m-%d %H:%M:%S UTC", time.gmtime(nanoseconds / 1e9))


class LocalFile(StoredFile):
    """One local file. Everything in it, its header included, is read through one descriptor.

    Its version is recorded when it is opened, before the first byte is read. If the file changed within the last tick of the
    file system's clock, opening waits for that tick to end: a second change in the same tick would leave the same version.

    Reading is thread-safe; closing must not overlap with it.
    """

    _fd = -1

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises OSError, also if it is not a regular file."""
        self.path = Path(path)
        self.name = self.path.name
        self._opening = Lock()
        self._fd, self.version = self._open()
        for _ in range(_SETTLING_ROUNDS):
            if not (nanoseconds := self._settling_time()):
                break
            time.sleep(nanoseconds / 1e9)
            before, self.version = self.version, FileVersion.of(os.fstat(self._fd))
            if before == self.version:
                break

    def _open(self) -> tuple[int, FileVersion]:
        fd = open_regular(self.path)
        try:
            return fd, FileVersion.of(os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise

    def _settling_time(self) -> int:
        """Nanoseconds until another change is certain to change ctime; 0 if it already is."""
        tick = _TICK_NS if self.version.ctime % 1_000_000_000 else _COARSE_TICK_NS
        age = time.time_ns() - self.version.ctime
        # If a file server's clock is ahead of this machine's, the age is negative and means nothing: wait one whole tick.
        return max(0, tick - max(age, 0))

    @property
    def nbytes(self) -> int:
        return self.version.nbytes

    @property
    def fd(self) -> int:
        """The descriptor. A closed file is opened again.

        Raises:
            CheckpointError: the file has changed or cannot be opened.
        """
        if self._fd < 0:
            with self._opening:
                if self._fd < 0:
                    self._fd = self._open_again()
        return self._fd

    def reopen(self) -> None:
        """Opens the path again, so that later reads see what other ranks find there. Raises as :attr:`fd`."""
        fd = self._open_again()
        self.close()
        self._fd = fd

    def _open_again(self) -> int:
        try:
            fd, version = self._open()
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.path} was removed after it was opened; load again") from error
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from error
        if difference := self.version.difference(version):
            os.close(fd)
            raise CheckpointError(f"{self.path} {difference} after it was opened; load again")
        return fd

    def read(self, offset: int, nbytes: int) -> bytes:
        parts = []
        nbytes = min(nbytes, self.nbytes - offset)  # some files of /proc have no size, and no end
        # Over FUSE one call may return fewer bytes than the file has.
        try:
            while nbytes > 0 and (part := os.pread(self.fd, nbytes, offset)):
                parts.append(part)
                offset, nbytes = offset + len(part), nbytes - len(part)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None  # which the kernel does not say
        return b"".join(parts)

    def stream(self) -> BinaryIO:
        stream = open(os.dup(self.fd), "rb")  # noqa: SIM115  (the caller closes it)
        stream.seek(0)  # the position is shared with the duplicated descriptor
        return stream

    @property
    def mapping_path(self) -> Path | None:
        """The path of the descriptor, which is the open file even if its own path was replaced."""
        path = Path(f"/proc/self/fd/{self.fd}")
        return path if path.exists() else self.path

    def changed(self) -> str:
        """Returns how the file or its path has changed since it was opened, e.g. "PATH was replaced ..."; empty if not."""
        try:
            difference = self.version.difference(FileVersion.of(os.stat(self.path)))
            if not difference and self._fd >= 0:
                difference = self.version.difference(FileVersion.of(os.fstat(self._fd)))
        except FileNotFoundError:
            difference = "was removed"
        except OSError as error:
            difference = f"is no longer accessible ({error.strerror})"
        return f"{self.path} {difference}" if difference else ""

    def close(self) -> None:
        """Closes the descriptor. Later reads open the file again, provided that it is unchanged."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"LocalFile({str(self.path)!r})"


class LocalFolder(Folder):
    """A folder of a file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self, standard: Sequence[str] = ()) -> list[str]:
        with os.scandir(self.path) as entries:
            return sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries)

    @contextmanager
    def open(self, names: Sequence[str]) -> Iterator[list[StoredFile]]:
        files: list[StoredFile] = []
        try:
            for name in names:
                files.append(LocalFile(self.path / name))
            yield files
        except BaseException:
            for file in files:
                file.close()
            raise

    def store(self, files: Sequence[StoredFile], metadata: Sequence[StoredFile] = ()) -> LocalStore:
        local, others = ([file for file in each if isinstance(file, LocalFile)] for each in (files, metadata))
        return LocalStore(local, others)

    def path_of(self, name: str) -> str:
        return str(self.path / name)

    def __str__(self) -> str:
        return str(self.path)


class LocalStore(ByteStore):
    """Local files, read natively with a few threads."""

    def __init__(self, files: Sequence[LocalFile], metadata: Sequence[LocalFile] = ()) -> None:
        """Arguments are those of :meth:`Folder.store`."""
        self.files: Sequence[LocalFile] = files
        self._all = [*metadata, *files]

    def changed(self) -> str:
        return next(filter(None, (file.changed() for file in self._all)), "")

    def read(self, ranges: Tensor, buffer: Tensor) -> None:
        descriptors = self._descriptors(ranges[:, 0])
        self._check(ops.read_ranges(descriptors, ranges, buffer, self._threads, self.direct_io))

    def read_regions(self, files: Tensor, offsets: Tensor, regions: Regions) -> int:
        descriptors = self._descriptors(files[regions.origins[:, 0]])
        targets, copies, origins, pipe = regions
        table = descriptors, files, offsets, origins, targets, copies.rows
        if pipe is not None:
            return self._check(ops.read_to_device(*table, pipe, self.direct_io))
        return self._check(ops.read_regions(*table, self._threads, self.direct_io))

    @property
    def _threads(self) -> int:
        return self.threads or READ_THREADS

    def _descriptors(self, files: Tensor) -> list[int]:
        """Returns the descriptors of all files, -1 for one that is not among ``files``. Raises CheckpointError."""
        if len(self.files) == 1:
            return [self.files[0].fd]
        descriptors = [-1] * len(self.files)
        for index in torch.unique(files).tolist():
            descriptors[index] = self.files[index].fd
        return descriptors

    def _check(self, outcome: tuple[int, int, int, int]) -> int:
        """The bytes read. ``outcome``: of ``ops.read_ranges``. Raises CheckpointError if a file could not be read."""
        nbytes, failed, offset, error = outcome
        if failed < 0:
            return nbytes
        file = self.files[failed]
        if changed := file.changed():
            raise CheckpointError(f"{changed} while it was read; load again")
        if error:
            raise CheckpointError(f"cannot read {file} at byte {offset}: {os.strerror(error)}")
        raise CheckpointError(f"{file} ends at byte {offset}, but its header describes more")

    def reopen(self) -> None:
        for file in self._all:
            file.reopen()

    def close(self) -> None:
        for file in self._all:
            file.close()
