"""Local files as a byte store: each is opened once, read with a few threads, and checked for changes."""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from epload.checkpoint.byte_store import ByteStore, Extent, Readable, StoredFile
from epload.errors import CheckpointError

READ_BYTES = 16 << 20
READ_THREADS = 2
"""Two threads that read 16 MiB at a time into a reused buffer read the page cache at 12.6 GB/s; mmap and copy: 3.9 GB/s."""
_MAX_IOVECS = 512
_TICK_NS = 12_000_000
"""Longer than one tick of the kernel's timestamp clock (10 ms at 100 Hz): changes further apart than this differ in ctime."""
_COARSE_TICK_NS = 1_000_000_000
"""The same for file systems whose timestamps have a resolution of one second."""
_SETTLING_ROUNDS = 5


class FileVersion(NamedTuple):
    """What ``stat`` reports about a file. Equal versions are the same file and, as far as ``stat`` can tell, the same bytes."""

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
        """What happened to a file that had this version and now has ``now``; empty if nothing did."""
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
        """Raises OSError."""
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
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
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
        # Over FUSE one call may return fewer bytes than the file has.
        while nbytes > 0 and (part := os.pread(self.fd, nbytes, offset)):
            parts.append(part)
            offset, nbytes = offset + len(part), nbytes - len(part)
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
        """What happened to the file or its path since it was opened, e.g. "PATH was replaced ..."; empty if nothing did."""
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


@contextmanager
def open_files(paths: Sequence[Path]) -> Iterator[list[LocalFile]]:
    """Opens files, and closes them if the body raises. Raises OSError."""
    files: list[LocalFile] = []
    try:
        for path in paths:
            files.append(LocalFile(path))
        yield files
    except BaseException:
        for file in files:
            file.close()
        raise


_Request = tuple[LocalFile, int, list[memoryview]]
"""File, offset in bytes, and the buffers that its bytes go to."""


class LocalStore(ByteStore):
    """Local files, read with a few threads that are kept until :meth:`close`."""

    _pool: ThreadPoolExecutor | None = None

    def __init__(self, files: Sequence[LocalFile], metadata: Sequence[LocalFile] = ()) -> None:
        """Takes ownership of the files.

        Args:
            files: the files that extents refer to.
            metadata: other files whose content the checkpoint depends on, such as an index; part of the identity.
        """
        self.files: Sequence[LocalFile] = files
        self._all = [*metadata, *files]
        self._pool_lock = Lock()

    def identity(self) -> tuple[Hashable, ...]:
        return tuple(file.version for file in self._all)

    def changed(self) -> str:
        return next(filter(None, (file.changed() for file in self._all)), "")

    def readv(self, extents: Sequence[Extent], buffers: Sequence[memoryview]) -> None:
        batches: list[list[_Request]] = []
        room = 0
        for request in self._requests(extents, buffers):
            nbytes = sum(map(len, request[2]))
            if not batches or nbytes > room:
                batches.append([])
                room = READ_BYTES
            batches[-1].append(request)
            room -= nbytes
        if len(batches) <= 1:
            for batch in batches:
                _read_batch(batch)
            return
        with self._pool_lock:
            pool = self._pool = self._pool or ThreadPoolExecutor(READ_THREADS, thread_name_prefix="epload-read")
        reads = [pool.submit(_read_batch, batch) for batch in batches]
        wait(reads)  # for all of them, even if one fails: they write to the caller's buffers
        for read in reads:
            read.result()

    def _requests(self, extents: Sequence[Extent], buffers: Sequence[memoryview]) -> list[_Request]:
        """Joins extents that follow each other in a file; cuts at READ_BYTES, so that threads can share the work."""
        requests: list[_Request] = []
        views: list[memoryview] = []
        last, end, room = -1, -1, 0
        for (file, offset, nbytes), buffer in zip(extents, buffers, strict=True):
            while nbytes:
                if file != last or offset != end or room == 0 or len(views) == _MAX_IOVECS:
                    views, room = [], READ_BYTES
                    requests.append((self.files[file], offset, views))
                    last = file
                if nbytes <= room:
                    views.append(buffer)
                    end, room = offset + nbytes, room - nbytes
                    break
                views.append(buffer[:room])
                buffer, nbytes = buffer[room:], nbytes - room
                offset = end = offset + room
                room = 0
        return requests

    def read_regions(self, files: Tensor, offsets: Tensor, regions: Readable) -> int:
        descriptors = [-1] * len(self.files)
        for index in torch.unique(files[regions.origins[:, 0]]).tolist() if len(self.files) > 1 else [0]:
            descriptors[index] = self.files[index].fd
        nbytes, failed, offset, error = regions.read(descriptors, files, offsets, READ_THREADS)
        if failed >= 0:
            raise _read_error(self.files[failed], offset, os.strerror(error) if error else "")
        return nbytes

    def reopen(self) -> None:
        for file in self._all:
            file.reopen()

    def close(self) -> None:
        self._end_threads()
        for file in self._all:
            file.close()

    def _end_threads(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def __del__(self) -> None:
        self._end_threads()


def _read_batch(requests: list[_Request]) -> None:
    for request in requests:
        _read(*request)


def _read(file: LocalFile, offset: int, views: list[memoryview]) -> None:
    while views:
        try:
            nbytes = os.preadv(file.fd, views, offset)
        except OSError as error:
            raise _read_error(file, offset, error.strerror or str(error)) from error
        if nbytes == 0:
            raise _read_error(file, offset)
        offset += nbytes
        while views and nbytes >= len(views[0]):
            nbytes -= len(views[0])
            views = views[1:]
        if views and nbytes:
            views = [views[0][nbytes:], *views[1:]]


def _read_error(file: LocalFile, offset: int, reason: str = "") -> CheckpointError:
    """``reason``: what the system reports; empty at the end of the file."""
    if changed := file.changed():
        return CheckpointError(f"{changed} while it was read; load again")
    if reason:
        return CheckpointError(f"cannot read {file} at byte {offset}: {reason}")
    return CheckpointError(f"{file} ends at byte {offset}, but its header describes more")
