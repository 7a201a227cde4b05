"""Objects as a byte store: ranges are fetched by many requests at once, each with retries, from the object that was opened.

The client is obstore where it is installed and knows the scheme, else whatever fsspec has. Both take credentials from their own
chain (environment variables, instance metadata, configuration files), are thread-safe, and have three methods, which take names
relative to the client's address. These raise FileNotFoundError; PermissionError if the request failed in a way that no retry
helps with; Busy if the server asks for fewer requests; or another exception. No message quotes what a client says in full, as
that may contain a signed address.
"""

from __future__ import annotations

import errno
import importlib
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from posixpath import normpath
from typing import Any, TypeAlias, TypeVar
from urllib.parse import SplitResult, quote, unquote, urlsplit

from torch import Tensor

from epload.checkpoint.byte_store import REQUESTS, ByteStore, Progress, Shared, Source, StoredFile, in_threads
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


_OBSTORE = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
    "http": "http",
    "https": "http",
}
"""The schemes that obstore knows, and the extra of epload that installs it."""
_CONNECT_SECONDS, _READ_SECONDS = 10, 30
"""Seconds without an answer, or the next part of one, after which a request has failed."""
_VARIABLES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
"""The first part of the names of environment variables that obstore reads."""
_OPTIONS = (
    "allow_http",
    "allow_invalid_certificates",
    "http1_only",
    "http2_only",
    "connect_timeout",
    "read_timeout",
    "timeout",
    "proxy_url",
    "proxy_ca_certificate",
    "proxy_excludes",
    "user_agent",
)
"""Options of its HTTP client, which follow in the names."""
_STATUS = re.compile(r"status code: ([45]\d\d)")
_TIMEOUT = re.compile(r"operation timed out|kind: timeout|timedout")
_VERSION_KEYS = (
    "ETag", "etag", "LastModified", "Last-Modified", "last_modified", "mtime", "modificationTime", "created",
)  # fmt: skip
_METADATA = ("/latest/api/token", "169.254.169.254", "169.254.170.", "metadata.google.internal")
"""Parts of the addresses at which a machine in a cloud gives credentials."""
_BUSY = (429, 503)
Version = tuple[int, str]
"""Size of an object, and its ETag, else when it was modified; "" if the server gives neither."""


class Busy(ConnectionError):
    """The server has too many requests, and asks for them again later."""


def connect(url: str) -> Client:
    """Raises CheckpointError if no client is installed for the scheme, or it does not take the address. ``url``: of a folder,
    with credentials and query if it has them."""
    scheme, missing = url.partition("://")[0], []
    for client in (ObstoreClient, FsspecClient) if scheme in _OBSTORE else (FsspecClient,):
        try:
            return client(url)
        except ImportError as error:
            missing.append(str(error.name))
        except Exception as error:
            raise CheckpointError(f"cannot open {redact_url(url)}: {type(error).__name__} ({client.__name__})") from None
    raise CheckpointError(
        f"cannot open {redact_url(url)}: no client for {scheme}:// is installed (missing: {', '.join(missing)}); "
        f"pip install epload[{_OBSTORE.get(scheme, 'fsspec')}]"
    )


class ObstoreClient:
    """obstore, in Rust. Retries are made by the caller, so that each is counted once."""

    def __init__(self, url: str) -> None:
        self._obstore = importlib.import_module("obstore")
        self._errors = importlib.import_module("obstore.exceptions")
        stores = importlib.import_module("obstore.store")
        scheme, _, address = url.replace("s3a://", "s3://", 1).partition("://")
        is_http = scheme.startswith("http")
        if not is_http:
            bucket, slash, key = address.partition("/")
            address = f"{bucket}{slash}{key.replace('%', '%25')}"  # keys are not quoted
        self._is_signed = is_http and "?" in address
        # The other from_url() takes hosts of S3 and Azure for buckets, without the signature in the URL.
        from_url = stores.HTTPStore.from_url if is_http else stores.from_url
        self._store = from_url(f"{scheme}://{address}", retry_config={"max_retries": 0}, client_options=_client_options(scheme))

    def head(self, name: str) -> Version:
        """Returns the object's version. A signature in a URL is one of GET, and does not allow HEAD."""
        if self._is_signed:
            return _version(self._call(lambda: self._obstore.get(self._store, name, options={"range": (0, 1)})).meta)
        return _version(self._call(lambda: self._obstore.head(self._store, name)))

    def get(self, name: str, begin: int, end: int, version: Version) -> Any:
        """Returns the bytes [begin, end) as something with the buffer protocol; None if the object has another version."""
        options: dict[str, Any] = {"range": (begin, end)}
        if version[1].startswith('"'):
            options["if_match"] = version[1]
        try:
            result = self._call(lambda: self._obstore.get(self._store, name, options=options))
        except self._errors.PreconditionError:
            return None
        return self._call(result.bytes) if _version(result.meta) == version else None

    def list(self) -> list[str]:
        """Returns the names of the objects, without those in folders."""
        listed = self._call(lambda: self._obstore.list_with_delimiter(self._store))
        return [entry["path"] for entry in listed["objects"]]

    def _call(self, function: Callable[[], Any]) -> Any:
        errors = self._errors
        try:
            return function()
        except errors.PreconditionError:
            raise
        except (errors.NotFoundError, FileNotFoundError) as error:
            raise FileNotFoundError from error
        except errors.PermissionDeniedError as error:
            raise PermissionError("access is denied (403)") from error
        except errors.UnauthenticatedError as error:
            raise PermissionError("the credentials are missing or not valid (401)") from error
        except errors.NotSupportedError as error:
            raise PermissionError("the server does not send parts of files (HTTP Range)") from error
        except errors.InvalidPathError as error:
            raise PermissionError(
                "obstore does not list a folder in which a key has an empty part, '.', '..' or a control character; remove the "
                "key, or pass the file or the index"
            ) from error
        except errors.BaseError as error:
            raise _described(str(error).lower()) from error


def _client_options(scheme: str) -> dict[str, Any]:
    """Returns the options of obstore's HTTP client: limits, and what the environment says, which options replace."""
    limits = {"connect_timeout": f"{_CONNECT_SECONDS}s", "read_timeout": f"{_READ_SECONDS}s", "timeout": "1h"}
    prefix = _VARIABLES.get(_OBSTORE[scheme], "")
    options: dict[str, Any] = {"allow_http": True} if scheme == "http" else {}
    for name in _OPTIONS if prefix else ():
        if value := os.environ.get(f"{prefix}_{name.upper()}"):
            options[name] = value
    return limits | options


def _version(meta: Any) -> Version:
    modified = meta["last_modified"]  # the epoch if the server does not give it
    return meta["size"], meta["e_tag"] or (str(modified) if modified and modified.timestamp() else "")


class FsspecClient:
    """Any file system of fsspec. Its methods are those of :class:`ObstoreClient`; ``get`` cannot tell another version."""

    def __init__(self, url: str) -> None:
        options, query = dict[str, Any](), ""
        self._is_http = url.startswith("http")
        if self._is_http:
            url, _, query = url.partition("?")
            limit = importlib.import_module("aiohttp").ClientTimeout(sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS)
            options["client_kwargs"] = {"timeout": limit}
        self._fs, root = importlib.import_module("fsspec.core").url_to_fs(url, **options)
        self._root, self._query = root.rstrip("/"), f"?{query}" if query else ""

    def _path(self, name: str) -> str:
        return f"{self._root}/{quote(name)}{self._query}" if self._is_http else f"{self._root}/{name}"

    def head(self, name: str) -> Version:
        self._fs.invalidate_cache()
        info = self._call(self._fs.info, self._path(name))
        return int(info["size"] or 0), next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")

    def get(self, name: str, begin: int, end: int, version: Version) -> Any:
        return self._call(self._fs.cat_file, self._path(name), start=begin, end=end)

    def list(self) -> list[str]:
        self._fs.invalidate_cache()
        entries = self._call(self._fs.ls, self._root, detail=True)
        return [entry["name"].rpartition("/")[2] for entry in entries if entry["type"] == "file"]

    def _call(self, function: Callable[..., Any], path: str, **options: Any) -> Any:
        try:
            return function(path, **options)
        except FileNotFoundError as error:
            raise FileNotFoundError from error
        except PermissionError as error:
            raise PermissionError("access is denied") from error
        except Exception as error:
            if getattr(error, "status", 0) in _BUSY or getattr(error, "errno", 0) == errno.EBUSY:  # of aiohttp, of s3fs
                raise Busy("the server is busy") from error
            raise


Client: TypeAlias = ObstoreClient | FsspecClient


def _described(text: str) -> Exception:
    """Returns an exception for a client's error text in lower case, without quoting it: it may contain the address."""
    if any(place in text for place in _METADATA):
        return ConnectionError(
            "no credentials are in the environment, and the machine's metadata gives none (obstore does not read ~/.aws): set "
            "e.g. AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket"
        )
    if match := _STATUS.search(text):
        status = int(match[1])
        if status == 404:
            return FileNotFoundError()
        refused = status < 500 and status not in (408, 425)
        kind = Busy if status in _BUSY else PermissionError if refused else ConnectionError
        return kind(f"the server answered {status}")
    if "certificate" in text or "unknownissuer" in text:
        return PermissionError("its certificate is not valid for it, or not signed by an authority that this machine trusts")
    if "redirect without location" in text:
        return PermissionError("the bucket is in another region; set AWS_REGION to it")
    if "builder error" in text:
        return PermissionError(
            "the client does not take its address; an http:// endpoint has to be allowed, e.g. by AWS_ALLOW_HTTP=true"
        )
    return ConnectionError("no answer in time" if _TIMEOUT.search(text) else "the connection failed")
