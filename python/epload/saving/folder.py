"""A folder that appears under its path as a whole, or not at all, whenever the processes that write it end."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from epload.core.log import logger
from epload.errors import LoadError
from epload.saving.layout import FilesLayout

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Constants of renameat2(2) on Linux."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""The start of a URL. A Path has one of its slashes."""


def folder_path(path: str | Path) -> Path:
    """Returns the absolute path of a folder to write. Raises ValueError for a URL, an empty path and a root."""
    if not str(path):
        raise ValueError("expected the path of a folder to write, got an empty one")
    if _URL.match(str(path)):
        raise ValueError(f"expected the path of a local folder to write, got {path}; save to one and upload it")
    if not (absolute := Path(path).expanduser().absolute()).name:
        raise ValueError(f"expected the path of a folder to write, got {path}, which is no folder of its own")
    return absolute


def hidden_path(path: Path, token: str) -> Path:
    """Returns the path of a folder as long as it is not complete. ``token``: unique among all saves."""
    return path.with_name(f".{path.name}.{token}.saving")


class NewFolder:
    """The folder of a new checkpoint, as one rank sees it: hidden next to the path until :meth:`commit`."""

    def __init__(self, path: Path, temporary: Path, overwrite: bool, layout: FilesLayout) -> None:
        self.path = path
        self.temporary = temporary
        self.layout = layout
        self._overwrite = overwrite
        self._fds: dict[int, int] = {}

    def create(self) -> None:
        """Makes the hidden folder, and in it files of full size with their headers. Raises ValueError, LoadError or OSError."""
        path, layout = self.path, self.layout
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise ValueError(f"{path} is no folder; pass the path of a folder to save to")
        if path.is_mount():
            raise ValueError(f"{path} is a mount point, which no other folder can take the place of; pass a folder inside it")
        replaces = path.exists() and any(path.iterdir())
        if replaces and not self._overwrite:
            raise ValueError(
                f"{path} exists and is not empty; pass another path, or overwrite=True, which replaces the whole folder"
            )
        if replaces and _holds_current_directory(path):
            raise ValueError(
                f"{path} is the current directory, or contains it, and overwrite=True replaces the whole folder; pass another "
                "path"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        nbytes, usage = sum(layout.sizes), shutil.disk_usage(path.parent)
        if usage.total and nbytes > usage.free:  # some file systems give no sizes
            raise LoadError(f"{path.parent} has {usage.free / 1e9:.1f} GB free, and the checkpoint {nbytes / 1e9:.1f} GB")
        self.temporary.mkdir()
        self._check_commit(replaces)
        for number, (name, header, size) in enumerate(zip(layout.names, layout.headers, layout.sizes, strict=True)):
            self.add(name, b"")
            # Before anything is written: an NFS client takes zeros for the rest of the page in which a file ends, and later
            # writes that page as a whole, over what another node has written to it.
            os.truncate(self.temporary / name, size)
            with closing(self):
                self.write(number, 0, memoryview(header))

    def _check_commit(self, replaces: bool) -> None:
        """Raises OSError if :meth:`commit` could not rename a folder with files here, or replace a folder, before anything is
        written."""
        one, other = (self.temporary / name for name in ("one", "other"))
        one.mkdir()
        (one / "file").touch()
        try:
            os.rename(one, other)
        except OSError as error:
            text = f"{error.strerror}, as this file system does not rename folders that hold files; save to another one"
            raise OSError(error.errno, text, str(one)) from error
        (other / "file").unlink()
        if replaces:
            one.mkdir()
            _exchange(one, other)
            one.rmdir()
        other.rmdir()

    def add(self, name: str, content: bytes) -> None:
        """Makes a file."""
        with open(self.temporary / name, "xb") as stream:
            stream.write(content)

    def path_of(self, file: int) -> Path:
        """Returns the path of a file of the layout, by its number."""
        return self.temporary / self.layout.names[file]

    def open(self, file: int) -> int:
        """Returns the descriptor of a file of the layout that this rank writes to, until :meth:`close`."""
        if file not in self._fds:
            self._fds[file] = os.open(self.path_of(file), os.O_WRONLY)
        return self._fds[file]

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Writes to a file of the layout. ``offset``: in bytes from its start."""
        with _naming(self.path_of(file)):
            while data:
                written = os.pwrite(self.open(file), data, offset)
                data, offset = data[written:], offset + written

    def sync(self, synced: Callable[[], None]) -> None:
        """Waits until what was written to open files is on disk; ``synced`` is called after each."""
        for file, fd in self._fds.items():
            with _naming(self.path_of(file)):
                os.fsync(fd)
            synced()

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    def commit(self) -> None:
        """Writes all files to disk and puts the folder under its path; the folder that was there is deleted.

        Raises OSError if it cannot be done, and what was at the path still is.
        """
        for path in (*self.temporary.iterdir(), self.temporary):
            _sync(path)
        try:
            os.rename(self.temporary, self.path)  # also over an empty folder
        except OSError:
            if not self._overwrite or not self.path.is_dir():
                raise
            _exchange(self.temporary, self.path)
        try:
            _sync(self.path.parent)
        except OSError as error:  # too late to fail
            logger.warning("%s is saved, but may be lost if the machine fails soon: %s", self.path, error)
        shutil.rmtree(self.temporary, ignore_errors=True)  # what was there, if it was exchanged


def _holds_current_directory(path: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(path.resolve())
    except FileNotFoundError:  # it has been deleted
        return False


def discard(temporary: Path) -> None:
    """Deletes a hidden folder. May be called by any rank, at any time, and again.

    Renames it first: a rank that is about to :meth:`NewFolder.commit` must find all of it under its name, or nothing.
    """
    discarded = temporary.with_name(f"{temporary.name}.discarded")
    try:
        os.rename(temporary, discarded)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):  # a commit cannot rename it, either
            discarded = temporary
    shutil.rmtree(discarded, ignore_errors=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """A context in which an OSError names the path."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with _naming(path):
            os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # as of a file system that writes folders by itself
            raise
    finally:
        os.close(fd)


def _exchange(a: Path, b: Path) -> None:
    """Exchanges two folders in one step, so that there is one at either path at any time."""
    library = ctypes.CDLL(None, use_errno=True)
    number = errno.ENOSYS
    if hasattr(library, "renameat2"):
        if not library.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE):
            return
        number = ctypes.get_errno()
    unsupported = number in (errno.EINVAL, errno.ENOSYS)
    hint = ": this file system cannot replace a folder in one step; save to another path" if unsupported else ""
    raise OSError(number, os.strerror(number) + hint, str(b))
