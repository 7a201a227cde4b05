"""Opens files that somebody else has put in place. Only regular files are opened: a FIFO or a device could block forever."""

from __future__ import annotations

import errno
import os
import stat

from epload.errors import limit_hint

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def open_regular(path: str | os.PathLike[str]) -> int:
    """Opens a regular file, or a symbolic link to one, for reading. Returns the descriptor. Raises OSError if there is no such
    file, it cannot be read, or it is not a regular file."""
    _check(path, os.stat(path))  # opening a device may have side effects
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY
    try:
        fd = os.open(path, flags | os.O_NONBLOCK)  # it may have become a FIFO since
    except BlockingIOError:  # a regular file with a lease, whose holder the kernel gives time to release it
        fd = os.open(path, flags)
    except OSError as error:
        error.strerror = f"{error.strerror}{limit_hint(error)}"
        raise
    try:
        _check(path, os.fstat(fd))
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Returns the content of a regular file. Raises as :func:`open_regular`."""
    with open(open_regular(path), "rb") as stream:
        return stream.read(os.fstat(stream.fileno()).st_size)  # some files of /proc have no size, and no end


def _check(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
        raise OSError(errno.EINVAL, f"expected a regular file, got {kind}; put the file itself there", os.fspath(path))
