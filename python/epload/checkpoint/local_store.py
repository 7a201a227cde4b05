"""Local files as a byte store: each is opened once, read with a few threads, and checked for changes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from epload.checkpoint.byte_store import ByteStore, Progress, Shared, Source, StoredFile, in_threads
from epload.core.copy_table import CopyTable
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


class LocalFile(StoredFile):
    """One local file. Everything in it, its header included, is read through one descriptor.

    Its ``stat`` is recorded when it is opened, before the first byte is read. If the file changed within the last tick of the
    file system's clock, opening waits for that tick to end: a second change in the same tick could not be told.
    """

    _fd = -1

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises OSError, also if it is not a regular file."""
        self.path = Path(path).absolute()  # wherever the process is when it opens the file again
        self._shown = str(path)
        self.name = self.path.name
        self._fd = open_regular(Path(path))  # whose messages have it as it was passed
        self._status = os.fstat(self._fd)
        for _ in range(_SETTLING_ROUNDS):
            if not (nanoseconds := _settling_time(self._status)):
                break
            time.sleep(nanoseconds / 1e9)
            before, self._status = self._status, os.fstat(self._fd)
            if not _difference(before, self._status):
                break
        self.nbytes = self._status.st_size

    @property
    def fd(self) -> int:
        """The descriptor. A closed file is opened again. Raises as :meth:`reopen`."""
        if self._fd < 0:
            self.reopen()
        return self._fd

    @property
    def version(self) -> str:
        status = self._status
        return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"

    def reopen(self) -> None:
        """Opens the path again. Raises CheckpointError if the file has changed or cannot be opened."""
        self.close()
        failure = ""
        try:
            self._fd = open_regular(self.path)
        except OSError as error:
            failure = f"cannot read {self}: {error.strerror}"
        if changed := self.changed():
            failure = f"{changed} after it was opened; load again"
        if failure:
            self.close()
            raise CheckpointError(failure)

    def read(self, offset: int, nbytes: int) -> bytes:
        parts = []
        nbytes = min(nbytes, self.nbytes - offset)  # some files of /proc have no size, and no end
        try:
            # Over FUSE one call may return fewer bytes than the file has.
            while nbytes > 0 and (part := os.pread(self.fd, nbytes, offset)):
                parts.append(part)
                offset, nbytes = offset + len(part), nbytes - len(part)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None  # which the kernel does not say
        return b"".join(parts)

    @property
    def mapping_path(self) -> Path | None:  # type: ignore[override]
        """The path of the descriptor, which is the open file even if its own path was replaced."""
        path = Path(f"/proc/self/fd/{self.fd}")
        return path if path.exists() else self.path

    def changed(self) -> str:
        try:
            difference = _difference(self._status, os.stat(self.path))
            if self._fd >= 0:
                difference = difference or _difference(self._status, os.fstat(self._fd))
        except FileNotFoundError:
            difference = "was removed"
        except OSError as error:
            difference = f"is no longer accessible ({error.strerror})"
        return f"{self} {difference}" if difference else ""

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def __str__(self) -> str:
        return self._shown


def _difference(before: os.stat_result, now: os.stat_result) -> str:
    """Returns what happened to a file between two calls of ``stat``; empty if, as far as ``stat`` can tell, nothing did."""
    if (now.st_dev, now.st_ino) != (before.st_dev, before.st_ino):
        return f"was replaced by another file (inode {before.st_ino}, now {now.st_ino})"
    if now.st_size != before.st_size:
        how = "truncated" if now.st_size < before.st_size else "modified"
        return f"was {how} ({before.st_size} bytes, now {now.st_size})"
    if (now.st_mtime_ns, now.st_ctime_ns) != (before.st_mtime_ns, before.st_ctime_ns):
        attributes = "" if now.st_mtime_ns != before.st_mtime_ns else ", or its attributes were"
        return f"was modified{attributes} ({time.strftime('at %Y-%m-%d %H:%M:%S UTC', time.gmtime(now.st_ctime))})"
    return ""


def _settling_time(status: os.stat_result) -> int:
    """Returns the nanoseconds until another change is certain to change ctime; 0 if it already is."""
    tick = _TICK_NS if status.st_ctime_ns % 1_000_000_000 else _COARSE_TICK_NS
    # If a file server's clock is ahead of this machine's, the age is negative and means nothing: wait one whole tick.
    return max(0, tick - max(time.time_ns() - status.st_ctime_ns, 0))


class LocalStore(ByteStore):
    """A folder of a file system, whose files are read natively with a few threads."""

    def __init__(self, path: Path, address: str = "") -> None:
        """``address``: the folder's name in messages, by default its path."""
        super().__init__()
        self.path = path
        self._address = address

    def names(self, standard: Sequence[str] = ()) -> list[str]:
        with os.scandir(self.path) as entries:
            folders = {e.name: os.path.isdir(e) if e.is_symlink() else e.is_dir() for e in entries}  # is_dir() raises for a loop
        return sorted(f"{name}/" if is_folder else name for name, is_folder in folders.items())

    def path_of(self, name: str) -> str:
        return f"{self._address}/{name}" if self._address else str(self.path / name)

    def resolve(self, relative: str) -> Source:
        return (self.path / relative).resolve()

    def open_files(self, names: Sequence[str]) -> list[LocalFile]:
        def open_one(name: str) -> LocalFile:
            if (marker := self.path / f"{name}.aria2").exists():
                raise CheckpointError(
                    f"{self.path_of(name)} is downloaded in part, as aria2 says in {marker.name}: it may have its size already; "
                    "let aria2 end, or delete that file if it has"
                )
            return LocalFile(self.path / name)

        return in_threads(open_one, names)

    def reopen(self) -> None:
        for file in self._all_files():
            file.reopen()  # type: ignore[attr-defined]

    def read(self, ranges: Tensor, buffer: Tensor) -> None:
        origins, copies = ranges[:, :2].contiguous(), CopyTable.of_bytes(ranges[:, 2], ranges[:, 3])
        files = torch.arange(len(self.files), device="cpu")
        self.read_regions(files, torch.zeros_like(files), Regions([buffer], copies, origins))

    def read_regions(self, files: Tensor, offsets: Tensor, regions: Regions) -> int:
        targets, copies, origins, pipe = regions
        descriptors = [file.fd for file in self.files]  # type: ignore[attr-defined]
        nbytes, failed, offset, error = ops.read_regions(
            descriptors,
            files,
            offsets,
            origins,
            targets,
            copies.rows,
            self.threads or READ_THREADS,
            self.direct_io,
            pipe,
        )
        if failed < 0:
            return nbytes
        file = self.files[failed]
        if changed := file.changed():
            raise CheckpointError(f"{changed} while it was read; load again")
        if error:
            raise CheckpointError(f"cannot read {file} at byte {offset}: {os.strerror(error)}")
        raise CheckpointError(f"{file} ends at byte {offset}, but its header describes more")

    def __str__(self) -> str:
        return self._address or str(self.path)


def locate(source: Source, variant: str, progress: Progress, shared: Shared | None) -> tuple[ByteStore, str]:
    """See :data:`epload.checkpoint.finding.STORES`."""
    try:
        path = Path(source).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"no checkpoint at {source}: {error}") from error
    if path.is_dir():
        return LocalStore(path), ""
    if shared is None and not path.exists():
        raise CheckpointError(f"no checkpoint at {path.absolute()}: expected a file or a folder")
    return LocalStore(path.parent), path.name
