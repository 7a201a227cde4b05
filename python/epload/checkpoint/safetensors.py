"""The safetensors file format: its header, not trusted, and fast ranged reads.

Format: https://huggingface.co/docs/safetensors. A little-endian uint64 N, N bytes of JSON, then the tensors' bytes without
holes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from epload.checkpoint import foreign
from epload.checkpoint.source_file import SourceFile
from epload.core.dtypes import SAFETENSORS
from epload.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The limit of the format's own library."""
READ_BYTES = 16 << 20
READ_THREADS = 2
"""16 MiB by two threads into a reused buffer reads the page cache at 12.6 GB/s where mmap and copy gives 3.9."""
_MAX_IOVECS = 512
_SAMPLES, _SAMPLE_BYTES = 16, 512
_MAX_DIMS = 64  # torch's
_MAX = 10**30  # far above any file, and short enough to print

Range = tuple[int, int, int, int]
"""File number, offset in the file, offset in the buffer, bytes."""


@dataclass(frozen=True)
class SafetensorsHeader:
    """Columns, one entry a tensor, in the header's order. ``order`` sorts them as their bytes lie in the file."""

    names: list[str]
    dtypes: list[torch.dtype]
    shapes: list[tuple[int, ...]]
    offsets: list[int]
    """From the start of the file, bytes."""
    order: list[int]


def read_header(file: SourceFile) -> SafetensorsHeader:
    """Reads and checks a header; touches no tensor.

    Raises:
        CheckpointError: the header is not what the format asks for, or claims bytes that the file does not have.
        OSError: the file cannot be read.
    """
    path, size = file.path, file.nbytes
    prefix = file.read(0, 8)
    if len(prefix) < 8:
        raise CheckpointError(f"{path}: {size} bytes are too few for a safetensors file")
    (length,) = struct.unpack("<Q", prefix)
    if said := foreign.pointer(path, prefix + file.read(8, 56)):
        raise CheckpointError(said)
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{path}: claims a header of {length} bytes, but the file has {size} and a header at most {MAX_HEADER_BYTES}"
        )
    raw = file.read(8, length)
    try:
        entries = json.loads(raw, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON with distinct keys ({error})") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: the header is a JSON {type(entries).__name__}, expected an object")
    if said := foreign.safetensors(path, entries.pop("__metadata__", None)):
        raise CheckpointError(said)
    return _check(path, entries, data=8 + length, end=size)


class FileFacts(NamedTuple):
    """By which two ranks know that they see the same file."""

    name: str
    nbytes: int
    header: str
    """Digest of its header."""
    samples: str
    """Digest of bytes taken all over the file, so that other weights under the same header are found out."""


def file_facts(file: SourceFile) -> FileFacts:
    """Raises OSError if the file cannot be read."""
    prefix = file.read(0, 8)
    length = min(int.from_bytes(prefix, "little"), MAX_HEADER_BYTES)
    # Processors have instructions for SHA-256, and a header can be megabytes that every reader hashes at every load.
    header = hashlib.sha256(prefix)
    header.update(file.read(8, length))
    return FileFacts(file.path.name, file.nbytes, header.hexdigest()[:32], digest_of_samples(file, 8 + length))


def digest_of_samples(file: SourceFile, begin: int) -> str:
    """Of bytes taken all over the file from ``begin`` on. Raises OSError."""
    samples = hashlib.sha256()
    data = max(file.nbytes - begin, 0)  # of a malformed file there may be none
    for i in range(_SAMPLES):
        samples.update(file.read(data * i // _SAMPLES + begin, _SAMPLE_BYTES))
    return samples.hexdigest()[:32]


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        raise ValueError(f"duplicate key {next(k for k, _ in pairs if k in seen or seen.add(k))!r}")  # type: ignore[func-returns-value]
    return made


def _check(path: Path, entries: dict[str, Any], data: int, end: int) -> SafetensorsHeader:
    header = SafetensorsHeader(list(entries), [], [], [], [])
    ends = []
    nbytes_of: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, entry in entries.items():
        try:
            dtype_name, shape, (begin, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
            dtype = SAFETENSORS.get(dtype_name)
            whole = type(shape) is list and all(type(n) is int and 0 <= n <= _MAX for n in (*shape, begin, stop))
        except (TypeError, KeyError, ValueError) as error:
            raise _refuse(path, name, f"lacks a dtype, a shape or two data_offsets: {_show(entry)}") from error
        if dtype is None:
            raise _refuse(path, name, f"has dtype {_show(dtype_name)}, expected one of {', '.join(SAFETENSORS)}")
        if not whole:
            raise _refuse(
                path, name, f"has shape {_show(shape)} and offsets {_show([begin, stop])}, expected whole numbers"
            )
        shape = tuple(shape)
        nbytes = nbytes_of.get((dtype_name, shape))
        if nbytes is None:
            nbytes = nbytes_of[dtype_name, shape] = prod(shape) * dtype.itemsize
            # With a dim of 0 the others take no bytes, but their strides have to be numbers all the same.
            impossible = len(shape) > _MAX_DIMS or prod(max(n, 1) for n in shape) * dtype.itemsize >= 1 << 63
        else:
            impossible = False
        if stop - begin != nbytes:
            raise _refuse(
                path, name, f"has {stop - begin} bytes, but {dtype_name} {_show(list(shape))} takes {_show(nbytes)}"
            )
        if impossible:
            raise _refuse(path, name, f"has shape {_show(list(shape))}, more than a tensor can have")
        header.dtypes.append(dtype)
        header.shapes.append(shape)
        header.offsets.append(data + begin)
        ends.append(data + stop)
    header.order.extend(sorted(range(len(ends)), key=lambda i: (header.offsets[i], ends[i])))
    at, before = data, "the header"
    for i in header.order:
        if header.offsets[i] != at:
            what = "overlaps" if header.offsets[i] < at else "leaves a hole after"
            raise _refuse(path, header.names[i], f"{what} {before[:200]}")
        at, before = ends[i], header.names[i]
    if at != end:
        what = "is truncated" if at > end else "has bytes that belong to no tensor"
        raise CheckpointError(
            f"{path}: {what}: the header describes {at} bytes, the last of them {before[:200]}, and the file has {end}"
        )
    return header


def _refuse(path: Path, name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {name if len(name) <= 300 else name[:300] + '...'} {what}")


def _show(value: object) -> str:
    try:
        return repr(value)[:200]
    except ValueError:  # Python prints no number of thousands of digits
        return "a number out of all bounds"


_Job = tuple[SourceFile, int, list[memoryview]]
"""File, offset and where the bytes go."""


class Readable(Protocol):
    """Regions of a model's tensors on CPU that can be read from files."""

    @property
    def origins(self) -> Tensor:
        """int64 [n, 2], on CPU: of each region the number of the checkpoint's tensor and where in it it starts, bytes."""

    def read(
        self, descriptors: Sequence[int], files: Tensor, offsets: Tensor, threads: int
    ) -> tuple[int, int, int, int]:
        """See ``ops.read_regions``."""


class RangedReader:
    """Reads ranges of files into a buffer with a few threads, which are kept until close. Several threads may read at once."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._pool: ThreadPoolExecutor | None = None
        self._making = Lock()
        """Of the pool."""

    def read(self, buffer: Tensor, ranges: Sequence[Range]) -> None:
        """``buffer`` is contiguous uint8 on CPU; ranges that are adjacent in a file are read with one request.

        Raises:
            CheckpointError: a file has changed, cannot be read or ends too early.
        """
        memory = memoryview((ctypes.c_char * buffer.numel()).from_address(buffer.data_ptr())).cast("B")
        batches: list[list[_Job]] = []
        room = 0
        for request in _requests(ranges):
            nbytes = sum(range_[3] for range_ in request)
            if not batches or nbytes > room:
                batches.append([])
                room = READ_BYTES
            batches[-1].append(self._job(memory, request))
            room -= nbytes
        if len(batches) == 1:
            _read_jobs(batches[0])
            return
        with self._making:
            pool = self._pool = self._pool or ThreadPoolExecutor(READ_THREADS, thread_name_prefix="epload-read")
        reads = [pool.submit(_read_jobs, batch) for batch in batches]
        wait(reads)  # all of them, also when one fails: they write to the caller's buffer
        for read in reads:
            read.result()

    def read_regions(self, files: Tensor, offsets: Tensor, regions: Readable) -> int:
        """Reads regions of tensors that lie in these files, by number, at these offsets. Returns bytes read."""
        descriptors = [-1] * len(self._files)
        for number in torch.unique(files[regions.origins[:, 0]]).tolist() if len(self._files) > 1 else [0]:
            descriptors[number] = self._files[number].fd
        nbytes, bad, offset, error = regions.read(descriptors, files, offsets, READ_THREADS)
        if bad >= 0:
            raise _unreadable(self._files[bad], offset, os.strerror(error) if error else "")
        return nbytes

    def _job(self, memory: memoryview, request: list[Range]) -> _Job:
        number, offset, _, _ = request[0]
        views: list[tuple[int, int]] = []
        for _, _, at, nbytes in request:
            if views and views[-1][1] == at:
                views[-1] = (views[-1][0], at + nbytes)
            else:
                views.append((at, at + nbytes))
        return self._files[number], offset, [memory[begin:end] for begin, end in views]

    def close(self) -> None:
        """Ends the threads; files are for whoever opened them."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def __del__(self) -> None:
        self.close()


def joined(file: Tensor, offset: Tensor, at: Tensor, nbytes: Tensor) -> list[Range]:
    """Ranges from their columns, int64 [n] each; those that follow one another in the file and in the buffer are one."""
    apart = (file[1:] != file[:-1]) | (offset[1:] != (offset + nbytes)[:-1]) | (at[1:] != (at + nbytes)[:-1])
    first = torch.cat([torch.ones_like(file[:1], dtype=torch.bool), apart])
    run = first.cumsum(0) - 1
    total = torch.zeros(int(first.sum()), dtype=torch.int64).index_add_(0, run, nbytes)
    return list(zip(*(column.tolist() for column in (file[first], offset[first], at[first], total)), strict=True))


def _requests(ranges: Sequence[Range]) -> list[list[Range]]:
    """Groups ranges that follow one another in a file, cut at READ_BYTES so that threads have something to share."""
    requests: list[list[Range]] = []
    number, end, room, vectors, buffer_end = -1, -1, 0, 0, -1
    for range_ in ranges:
        file, offset, at, left = range_
        while left:
            if file != number or offset != end or room == 0 or vectors >= _MAX_IOVECS:
                requests.append([])
                room, vectors, buffer_end = READ_BYTES, 0, -1
            take = min(left, room)
            requests[-1].append((file, offset, at, take))
            vectors += at != buffer_end
            number, end, room, buffer_end = file, offset + take, room - take, at + take
            offset, at, left = offset + take, at + take, left - take
    return requests


def _read_jobs(jobs: list[_Job]) -> None:
    for job in jobs:
        _read_job(*job)


def _read_job(file: SourceFile, offset: int, views: list[memoryview]) -> None:
    while views:
        try:
            got = os.preadv(file.fd, views, offset)
        except OSError as error:
            raise _unreadable(file, offset, error.strerror or str(error)) from error
        if got == 0:
            raise _unreadable(file, offset)
        offset += got
        while views and got >= len(views[0]):
            got -= len(views[0])
            views = views[1:]
        if views and got:
            views = [views[0][got:], *views[1:]]


def _unreadable(file: SourceFile, offset: int, why: str = "") -> CheckpointError:
    """``why``: what the system says; empty where the file has ended."""
    if changed := file.changed():
        return CheckpointError(f"{changed} while it was read; load again")
    if why:
        return CheckpointError(f"cannot read {file.path} at byte {offset}: {why}")
    return CheckpointError(f"{file.path} ends at byte {offset}, but its header describes more")
