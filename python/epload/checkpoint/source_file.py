"""A file of a checkpoint: opened once, read through one descriptor, and found out when it changes meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from epload.errors import CheckpointError

_TICK_NS = 12_000_000
"""Longer than a kernel's clock for time stamps stands still (10 ms at 100 Hz): two changes further apart differ in ctime."""
_COARSE_TICK_NS = 1_000_000_000
"""The same on a file system that counts in seconds."""
_SETTLING_ROUNDS = 5


class Version(NamedTuple):
    """What ``stat`` says of a file. Two equal ones are the same file with, as far as ``stat`` can tell, the same bytes."""

    device: int
    inode: int
    nbytes: int
    mtime: int
    ctime: int
    """Nanoseconds, both."""

    @classmethod
    def of(cls, found: os.stat_result) -> Version:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def became(self, now: Version) -> str:
        """How a file of this version has become one of version ``now``; empty if it has not changed."""
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


class SourceFile:
    """One file of a checkpoint. Everything that is read of it, its header too, is read through one descriptor.

    Its version is recorded when it is opened, before the first byte is read. A file that was changed within the last tick of
    the file system's clock is given time to age first, since another change in the same tick would leave the same version.

    Reading is thread-safe; closing is not to overlap with it.
    """

    _fd = -1

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises OSError."""
        self.path = Path(path)
        self._opening = Lock()
        self._fd, self.version = self._open()
        for _ in range(_SETTLING_ROUNDS):
            if not (age := self._young()):
                break
            time.sleep(age / 1e9)
            before, self.version = self.version, Version.of(os.fstat(self._fd))
            if before == self.version:
                break

    def _open(self) -> tuple[int, Version]:
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return fd, Version.of(os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise

    def _young(self) -> int:
        """Nanoseconds to wait until a further change shows in ctime; 0 if it would already."""
        tick = _TICK_NS if self.version.ctime % 1_000_000_000 else _COARSE_TICK_NS
        age = time.time_ns() - self.version.ctime
        # A file server's clock may be ahead of this machine's: then the age says nothing, and a whole tick is waited.
        return max(0, tick - max(age, 0))

    @property
    def nbytes(self) -> int:
        """When it was opened."""
        return self.version.nbytes

    @property
    def fd(self) -> int:
        """The descriptor. A file that was closed is opened again, if it is still the same.

        Raises:
            CheckpointError: it is not, or cannot be opened.
        """
        if self._fd < 0:
            with self._opening:
                if self._fd < 0:
                    self._fd = self._open_again()
        return self._fd

    def reopen(self) -> None:
        """Opens the path again, so that what is read from now on is what others find there. Raises as :attr:`fd`."""
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
        if became := self.version.became(version):
            os.close(fd)
            raise CheckpointError(f"{self.path} {became} after it was opened; load again")
        return fd

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes [offset, offset + nbytes), fewer where the file ends. Raises OSError, and as :attr:`fd`."""
        parts = []
        while nbytes > 0 and (
            part := os.pread(self.fd, nbytes, offset)
        ):  # over FUSE one call may give less than is there
            parts.append(part)
            offset, nbytes = offset + len(part), nbytes - len(part)
        return b"".join(parts)

    def changed(self) -> str:
        """What has happened to the file, or to its path, since it was opened: "PATH was replaced ..."; empty if nothing."""
        try:
            became = self.version.became(Version.of(os.stat(self.path)))
            if not became and self._fd >= 0:
                became = self.version.became(Version.of(os.fstat(self._fd)))
        except FileNotFoundError:
            became = "was removed"
        except OSError as error:
            became = f"can no longer be looked at ({error.strerror})"
        return f"{self.path} {became}" if became else ""

    def close(self) -> None:
        """May be read again afterwards, as long as it is the same file."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SourceFile({str(self.path)!r})"


def changed(files: Sequence[SourceFile]) -> str:
    """What has happened to the first of some files that is not as it was when it was opened; empty if all are."""
    return next(filter(None, (file.changed() for file in files)), "")


@contextmanager
def opened(paths: Sequence[Path]) -> Iterator[list[SourceFile]]:
    """Opens files, which stay open unless something is raised. Raises OSError."""
    files: list[SourceFile] = []
    try:
        for path in paths:
            files.append(SourceFile(path))
        yield files
    except BaseException:
        for file in files:
            file.close()
        raise
