"""Objects as a byte store: ranges are fetched by many requests at once, each with retries, from the object that was opened."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from posixpath import normpath
from typing import TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from torch import Tensor

from epload.checkpoint.byte_store import REQUESTS, ByteStore, Progress, Shared, Source, StoredFile, in_threads
from epload.checkpoint.object_clients import Busy, Client, connect
from epload.core.buffers import as_memoryview
from epload.errors import CheckpointError, redact_url

T = TypeVar("T")
REQUEST_BYTES = 8 << 20
"""Maximum number of bytes that one request asks for."""
MIN_REQUEST_BYTES = 2 << 20
"""Requests are smaller than the maximum where there would be fewer of them than run at once, but not than this."""
ATTEMPTS = 7
BUSY_SECONDS = 180.0
"""Seconds for which a request is repeated, instead of ATTEMPTS times, while the server is busy, as with many ranks."""
FIRST_PAUSE = 0.2
"""Seconds before the second attempt, on average; each pause is twice the one before, up to MAX_PAUSE."""
MAX_PAUSE = 8.0
_BLOCK_BYTES = 1 << 20
"""Unit in which headers are fetched, as they are parsed in many small reads."""
_BLOCKS = 128
"""Maximum number of such units that are kept of a file."""
_GAP_BYTES = 64 << 10
"""A gap that is cheaper to fetch than another request."""
_SUFFIXES = (".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".distcp", ".metadata")
_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "obs", "cos")
"""Schemes of storage in which a key with // is not the one with /."""
_Range = tuple[int, int, int, int]
"""A row of what :meth:`ByteStore.read` takes: index of the file, offset in it, offset in the buffer, length."""


class ObjectFile(StoredFile):
    """One object, as it was when it was opened."""

    def __init__(self, client: Client, name: str, url: str) -> None:
        """Raises CheckpointError; FileNotFoundError."""
        self.name, self._client, self._url = name, client, url
        self._block = lru_cache(_BLOCKS)(self._fetch_block)
        try:
            self._version = retried(lambda: client.head(name), url)
        except FileNotFoundError:
            raise FileNotFoundError(2, "no such object", url) from None
        self.nbytes, tag = self._version
        self.identity = f"{tag} {self.nbytes}" if tag else ""

    def read(self, offset: int, nbytes: int) -> bytes:
        end = min(offset + nbytes, self.nbytes)
        if offset >= end:
            return b""
        first = offset // _BLOCK_BYTES
        content = b"".join(map(self._block, range(first, -(-end // _BLOCK_BYTES))))
        return content[offset - first * _BLOCK_BYTES :][: end - offset]

    def _fetch_block(self, number: int) -> bytes:
        begin = number * _BLOCK_BYTES
        return bytes(self.fetch(begin, min(begin + _BLOCK_BYTES, self.nbytes)))

    def fetch(self, begin: int, end: int) -> memoryview:
        """Raises CheckpointError."""

        def get() -> memoryview:
            content = self._client.get(self.name, begin, end, self._version)
            if content is None:
                raise CheckpointError(f"{self} was replaced by another object while it was read; load again")
            if (view := memoryview(content)).nbytes != end - begin:
                raise ConnectionError(f"expected {end - begin} bytes, got {view.nbytes}")
            return view

        try:
            return retried(get, self._url)
        except FileNotFoundError:
            raise CheckpointError(f"{self} was removed after it was opened; load again") from None

    def changed(self) -> str:
        try:
            now = retried(lambda: self._client.head(self.name), self._url)
        except FileNotFoundError:
            return f"{self} was removed"
        except CheckpointError as error:
            return f"{self} is no longer accessible ({error})"
        if now != self._version:
            return f"{self} was replaced by another object ({self.nbytes} bytes, now {now[0]})"
        return ""

    def __str__(self) -> str:
        return self._url


def retried(call: Callable[[], T], what: str) -> T:
    """Returns the result of ``call``, after several attempts. Clients' own retries do not cover the bodies of responses.

    Raises:
        FileNotFoundError: there is no such object.
        CheckpointError: it was refused, failed in ATTEMPTS attempts, or the server was busy for BUSY_SECONDS.
    """
    began, attempts, failures = time.monotonic(), 0, 0
    while True:
        try:
            return call()
        except (FileNotFoundError, CheckpointError):
            raise
        except PermissionError as denied:
            raise CheckpointError(f"cannot read {what}: {denied}") from None
        except Exception as error:  # each client has its own; what they say may quote credentials
            is_busy = isinstance(error, Busy)
            last = str(error) if is_busy or type(error) is ConnectionError else type(error).__name__
        attempts, failures = attempts + 1, failures + (not is_busy)
        if failures == ATTEMPTS or (is_busy and time.monotonic() - began > BUSY_SECONDS):
            raise CheckpointError(f"cannot read {what}: {attempts} attempts failed, the last: {last}; load again later")
        pause = min(FIRST_PAUSE * 2 ** (attempts - 1), MAX_PAUSE)
        time.sleep(pause * random.uniform(0.5, 1.5))  # so that ranks do not come back together


class ObjectStore(ByteStore):
    """The objects under one address, read by requests that run at once."""

    files: list[ObjectFile]  # type: ignore[assignment]

    def __init__(self, url: str) -> None:
        """``url``: may contain credentials and a query. Raises CheckpointError."""
        super().__init__()
        self._url, self._address = url, redact_url(url)
        self._client = connect(url)

    def names(self, standard: Sequence[str] = ()) -> list[str]:
        if self._address.startswith("http"):  # such a server cannot list
            present = in_threads(self._exists, standard)
            denied = next((found for found in present if isinstance(found, PermissionError)), None)
            if denied is not None and True not in present:
                raise CheckpointError(f"cannot read {self}: {denied}")
            return sorted(name for name, found in zip(standard, present, strict=True) if found is True)
        try:
            return sorted(retried(self._client.list, str(self)))
        except FileNotFoundError:
            return []

    def _exists(self, name: str) -> bool | PermissionError:
        """Returns the error if the server denies access, as S3 does for absent objects to those who may not list the bucket."""

        def exists() -> bool | PermissionError:
            try:
                self._client.head(name)
            except FileNotFoundError:
                return False
            except PermissionError as denied:
                return denied
            return True

        return retried(exists, self.path_of(name))

    def path_of(self, name: str) -> str:
        return f"{self._address}/{name}"

    def resolve(self, relative: str) -> str:
        parts = urlsplit(self._url)
        return _with_path(parts, normpath(f"{parts.path}/{relative}"))

    def open_files(self, names: Sequence[str]) -> list[ObjectFile]:
        return in_threads(self._open_file, names)

    def _open_file(self, name: str) -> ObjectFile:
        return ObjectFile(self._client, name, self.path_of(name))

    def changed(self) -> str:
        return next(filter(None, in_threads(lambda file: file.changed(), self._all_files())), "")

    def read(self, ranges: Tensor, buffer: Tensor) -> None:
        into = as_memoryview(buffer)
        in_threads(lambda parts: self._fetch(parts, into), _requests(ranges))

    def _fetch(self, parts: list[_Range], into: memoryview) -> None:
        number, begin, _, _ = parts[0]
        file, end = self.files[number], max(offset + nbytes for _, offset, _, nbytes in parts)
        if end > file.nbytes:
            raise CheckpointError(f"{file} ends at byte {file.nbytes}, but its header describes more")
        content = file.fetch(begin, end)
        for _, offset, at, nbytes in parts:
            into[at : at + nbytes] = content[offset - begin : offset - begin + nbytes]

    def __str__(self) -> str:
        return self._address


def _requests(ranges: Tensor) -> list[list[_Range]]:
    """Cuts ranges to the size of a request; returns those of each request, which are close to each other in a file."""
    size = min(REQUEST_BYTES, max(MIN_REQUEST_BYTES, -(-int(ranges[:, 3].sum()) // REQUESTS)))
    requests: list[list[_Range]] = []
    file, begin, end = -1, 0, 0
    for number, offset, at, nbytes in sorted(ranges.tolist()):
        while nbytes > 0:
            if number != file or not begin <= offset < begin + size or offset - end > _GAP_BYTES:
                file, begin, end = number, offset, offset
                requests.append([])
            length = min(nbytes, begin + size - offset)
            requests[-1].append((file, offset, at, length))
            offset, at, nbytes = offset + length, at + length, nbytes - length
            end = max(end, offset)
    return requests


def locate(source: Source, variant: str, progress: Progress, shared: Shared | None) -> tuple[ByteStore, str] | None:
    """See :data:`epload.checkpoint.finding.STORES`. The URL of a file ends with a suffix of files."""
    if not isinstance(source, str) or "://" not in source:
        return None
    try:
        parts = urlsplit(source)
    except ValueError:
        parts = None
    if parts is None or "@" in parts.fragment:
        raise CheckpointError(
            "expected a URL such as s3://bucket/path, got a malformed one: write each of /?#@ in a user or password as %2F, "
            "%3F, %23 or %40, or leave them out and let the client find the credentials"
        ) from None
    is_http = parts.scheme in ("http", "https")
    if "#" in source or ("?" in source and not is_http):
        raise CheckpointError(
            f"cannot read {redact_url(source)}: in a URL, a # or ? begins what is not part of the path, and a version of an "
            "object cannot be chosen; rename the folder, or pass the path itself if it is a local one"
        )
    path, name = parts.path.rstrip("/"), ""
    if "//" in path and parts.scheme in _BUCKETS:
        raise CheckpointError(
            f"cannot read {redact_url(source)}: keys with // in them are not supported, as clients take // for /; write / if "
            "that is meant, or rename the objects"
        )
    if path.endswith(_SUFFIXES):
        path, _, name = path.rpartition("/")
        name = unquote(name) if is_http else name  # elsewhere keys are what they are
    return ObjectStore(_with_path(parts, path)), name


def _with_path(parts: SplitResult, path: str) -> str:
    """Returns the URL with another path. urlunsplit() leaves out the // of those that name no host, such as hdfs:///user."""
    return f"{parts.scheme}://{parts.netloc}{path}" + (f"?{parts.query}" if parts.query else "")
