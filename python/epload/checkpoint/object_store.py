"""Objects as a byte store: ranges are fetched by many requests at once, each with retries, from the object that was opened."""

from __future__ import annotations

import os
import random
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from threading import Lock
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from epload.checkpoint.byte_store import ByteStore, Folder, Shared, StoredFile
from epload.checkpoint.object_clients import Absent, Address, ObjectClient, Replaced, RequestRefused, connect
from epload.errors import CheckpointError

REQUEST_BYTES = 8 << 20
"""Maximum number of bytes that one request asks for."""
MIN_REQUEST_BYTES = 2 << 20
"""Requests are smaller than the maximum where there would be fewer of them than run at once, but not than this."""
REQUESTS = 16
"""Number of requests that each process runs at once."""
ATTEMPTS = 7
FIRST_PAUSE = 0.2
"""Seconds before the second attempt, on average; each pause is twice the one before, up to MAX_PAUSE."""
MAX_PAUSE = 8.0
_HEAD_BYTES = 128 << 20
"""Maximum number of bytes that are kept from the start of an object; more than any header has."""
_GAP_BYTES = 64 << 10
"""A gap that is cheaper to fetch than another request."""
T = TypeVar("T")


class ObjectFile(StoredFile):
    """One object, as it was when it was opened."""

    def __init__(self, client: ObjectClient, name: str, url: str) -> None:
        """Raises CheckpointError; FileNotFoundError."""
        self.name, self._client, self._url = name, client, url
        self._head = bytearray()
        """The beginning of the object, as far as headers were read."""
        self._reading = Lock()
        try:
            self.version = self._retry(lambda: client.head(name))
        except Absent:
            raise FileNotFoundError(2, "no such object", url) from None
        self.nbytes = self.version.nbytes
        self.identity = f"{self.version.tag} {self.nbytes}"

    def read(self, offset: int, nbytes: int) -> bytes:
        """Ranges that continue what was read from the beginning on, as those of a header do, are fetched once."""
        end = min(offset + nbytes, self.nbytes)
        if offset >= end:
            return b""
        with self._reading:
            if offset > len(self._head) or end > _HEAD_BYTES:
                return bytes(self.fetch(offset, end))
            if end > len(self._head):
                self._head += self.fetch(len(self._head), end)
            return bytes(self._head[offset:end])

    def fetch(self, begin: int, end: int) -> memoryview:
        """Raises CheckpointError."""

        def get() -> memoryview:
            content = memoryview(self._client.get(self.name, begin, end, self.version))
            if content.nbytes != end - begin:
                raise ConnectionError(f"expected {end - begin} bytes, got {content.nbytes}")
            return content

        try:
            return self._retry(get)
        except Absent:
            raise CheckpointError(f"{self} was removed after it was opened; load again") from None
        except Replaced:
            raise CheckpointError(f"{self} was replaced by another object while it was read; load again") from None

    def changed(self) -> str:
        try:
            now = self._retry(lambda: self._client.head(self.name))
        except Absent:
            return f"{self} was removed"
        except CheckpointError as error:
            return f"{self} is no longer accessible ({error})"
        if now != self.version:
            return f"{self} was replaced by another object ({self.nbytes} bytes, now {now.nbytes})"
        return ""

    def _retry(self, call: Callable[[], T]) -> T:
        return retried(call, str(self))

    def __str__(self) -> str:
        return self._url


def retried(call: Callable[[], T], what: str) -> T:
    """Returns the result of ``call``, after up to ATTEMPTS attempts. Clients' own retries do not cover the bodies of responses.

    Raises:
        Absent, Replaced: as ``call`` does.
        CheckpointError: it was refused, or failed in each of ATTEMPTS attempts.
    """
    pause = FIRST_PAUSE
    for attempt in range(ATTEMPTS):
        try:
            return call()
        except (Absent, Replaced, CheckpointError):
            raise
        except RequestRefused as refused:
            raise CheckpointError(f"cannot read {what}: {refused}") from None
        except Exception as error:  # each client has its own; what they say may quote credentials
            last = str(error) if type(error) is ConnectionError else type(error).__name__
        if attempt + 1 < ATTEMPTS:
            time.sleep(pause * random.uniform(0.5, 1.5))  # so that ranks do not come back together
            pause = min(2 * pause, MAX_PAUSE)
    raise CheckpointError(f"cannot read {what}: {ATTEMPTS} attempts failed, the last: {last}; load again later")


class _Request(NamedTuple):
    """Bytes [begin, end) of a file, and which rows of the ranges they have parts of."""

    file: int
    begin: int
    end: int
    rows: range


class ObjectStore(ByteStore):
    """Objects, read by requests that run at once."""

    files: Sequence[ObjectFile]
    _pool: ThreadPoolExecutor | None = None

    def changed(self) -> str:
        return next(filter(None, self._threads().map(lambda file: file.changed(), self._all)), "")

    def read(self, ranges: Tensor, buffer: Tensor) -> None:
        order = torch.argsort(ranges[:, 1], stable=True)
        rows = ranges[order[torch.argsort(ranges[order, 0], stable=True)]].tolist()
        into = memoryview(buffer.numpy())  # type: ignore[arg-type]
        jobs = [self._threads().submit(self._fetch, request, rows, into) for request in _requests(rows)]
        done, pending = wait(jobs, return_when=FIRST_EXCEPTION)
        for job in pending:
            job.cancel()
        wait(pending)  # none writes to the buffer after this
        for job in done:
            job.result()

    def _fetch(self, request: _Request, rows: Sequence[Sequence[int]], into: memoryview) -> None:
        file = self.files[request.file]
        if request.end > file.nbytes:
            raise CheckpointError(f"{file} ends at byte {file.nbytes}, but its header describes more")
        content = file.fetch(request.begin, request.end)
        for i in request.rows:
            _, offset, at, nbytes = rows[i]
            begin, end = max(offset, request.begin), min(offset + nbytes, request.end)
            if begin < end:
                at += begin - offset
                into[at : at + end - begin] = content[begin - request.begin : end - request.begin]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(REQUESTS, "epload-get")
        return self._pool


def _requests(rows: Sequence[Sequence[int]]) -> list[_Request]:
    """Joins ranges that are close to each other in a file, and cuts them to the size of a request.

    Args:
        rows: file, offset, place in the buffer, bytes; sorted by file and offset.
    """
    total = sum(nbytes for _, _, _, nbytes in rows)
    size = min(REQUEST_BYTES, max(MIN_REQUEST_BYTES, -(-total // REQUESTS)))
    requests: list[_Request] = []
    first, ends = 0, list[int]()
    for i, (file, offset, _, nbytes) in enumerate(rows):
        ends.append(max(offset + nbytes, ends[-1] if ends else 0))
        if i + 1 < len(rows) and rows[i + 1][0] == file and rows[i + 1][1] - ends[-1] <= _GAP_BYTES:
            continue
        begins = [row[1] for row in rows[first : i + 1]]
        for begin in range(begins[0], ends[-1], size):
            end = min(begin + size, ends[-1])
            touched = range(first + bisect_right(ends, begin), first + bisect_left(begins, end))
            requests.append(_Request(file, begin, end, touched))
        first, ends = i + 1, []
    return requests


class ObjectFolder(Folder):
    """The objects under one address."""

    store = ObjectStore

    def __init__(self, address: Address) -> None:
        """Raises CheckpointError."""
        super().__init__()
        self._address = address
        self._client = connect(address)

    @classmethod
    def locate(
        cls, source: str | os.PathLike[str], variant: str, progress: Callable[[int], None], shared: Shared | None
    ) -> tuple[Folder, str] | None:
        if not isinstance(source, str) or "://" not in source:
            return None
        address, name = Address.of(source)
        return ObjectFolder(address), name

    def names(self, standard: Sequence[str] = ()) -> list[str]:
        try:
            listed = retried(self._client.list, str(self))
        except Absent:
            return []
        if listed is not None:
            return listed

        def exists(name: str) -> bool:
            try:
                retried(lambda: self._client.head(name), self.path_of(name))
            except Absent:
                return False
            return True

        with ThreadPoolExecutor(REQUESTS) as pool:
            return sorted(name for name, present in zip(standard, pool.map(exists, standard), strict=True) if present)

    def _files(self, names: Sequence[str]) -> Iterator[StoredFile]:
        with ThreadPoolExecutor(REQUESTS) as pool:
            yield from pool.map(lambda name: ObjectFile(self._client, name, self.path_of(name)), names)

    def path_of(self, name: str) -> str:
        return f"{self._address}/{name}"

    def __str__(self) -> str:
        return str(self._address)
