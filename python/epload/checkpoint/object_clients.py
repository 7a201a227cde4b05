"""Clients of object storage: obstore where it is installed and knows the scheme, else whatever fsspec has.

Both take credentials from their own chain (environment variables, instance metadata, configuration files). No message quotes
what a client says in full, as that may contain a signed address.
"""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from epload.errors import CheckpointError, redact_url

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
_STATUS = re.compile(r"status code: ([45]\d\d)")
_TIMEOUT = re.compile(r"operation timed out|kind: timeout|timedout")
_VERSION_KEYS = ("ETag", "etag", "LastModified", "mtime", "last_modified", "created")


class Version(NamedTuple):
    """Identifies the content of an object."""

    nbytes: int
    tag: str
    """Its ETag, else when it was modified; empty if the server gives neither."""


class Absent(Exception):
    """There is no such object."""


class Replaced(Exception):
    """The object is not the one that was opened."""


class RequestRefused(Exception):
    """The request failed in a way that no retry helps with; the text says how."""


class ObjectClient(ABC):
    """Access to the objects below one address. Thread-safe. Names are relative to that address.

    All methods raise Absent, RequestRefused, or another exception after which a retry may help.
    """

    @abstractmethod
    def head(self, name: str) -> Version: ...

    @abstractmethod
    def get(self, name: str, begin: int, end: int, version: Version) -> Any:
        """Returns the bytes [begin, end) as something with the buffer protocol. Raises Replaced, if the server can tell."""

    @abstractmethod
    def list(self) -> list[str] | None:
        """Returns the names of the objects, without those in folders; None if this kind of server cannot list."""


class Address(NamedTuple):
    """The URL of a folder of objects."""

    url: str
    """The URL has no slash at its end, and may contain credentials."""
    query: str = ""

    @staticmethod
    def of(url: str) -> tuple[Address, str]:
        """Returns the address of a folder, and the name of a file in it; "" for the folder itself, which lacks a suffix of files.

        Raises:
            CheckpointError: the URL is malformed.
        """
        try:
            parts = urlsplit(url)
        except ValueError:
            parts = None
        if parts is None or "@" in parts.fragment:
            raise CheckpointError(
                "expected a URL such as s3://bucket/path, got a malformed one: write each of /?#@ in a user or password as %2F, "
                "%3F, %23 or %40, or leave them out and let the client find the credentials"
            ) from None
        path, name = parts.path.rstrip("/"), ""
        if path.endswith((".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".distcp", ".metadata")):
            path, _, name = path.rpartition("/")
        return Address(urlunsplit((parts.scheme, parts.netloc, path, "", "")), parts.query), name

    @property
    def scheme(self) -> str:
        return urlsplit(self.url).scheme

    @property
    def full(self) -> str:
        """The URL with its query."""
        return f"{self.url}?{self.query}" if self.query else self.url

    def __str__(self) -> str:
        """Returns the URL without credentials."""
        return redact_url(self.full)


def connect(address: Address) -> ObjectClient:
    """Raises CheckpointError if no client is installed for the scheme, or it does not take the address."""
    scheme, missing = address.scheme, []
    for library, client in (("obstore.store", ObstoreClient), ("fsspec", FsspecClient)):
        if client is ObstoreClient and scheme not in _OBSTORE:
            continue
        try:
            return client(importlib.import_module(library), address)
        except ImportError as error:
            missing.append(str(error.name or library))
        except Exception as error:
            raise CheckpointError(f"cannot open {address}: {type(error).__name__} in {library}") from None
    raise CheckpointError(
        f"cannot open {address}: no client for {scheme}:// is installed (missing: {', '.join(missing)}); "
        f"pip install epload[{_OBSTORE.get(scheme, 'fsspec')}]"
    )


class ObstoreClient(ObjectClient):
    """obstore, in Rust."""

    def __init__(self, library: Any, address: Address) -> None:
        """``library``: ``obstore.store``. Retries are made above this, so that each is counted once."""
        self._obstore = importlib.import_module("obstore")
        self._errors = importlib.import_module("obstore.exceptions")
        scheme = _OBSTORE[address.scheme]
        url = address.full.replace("s3a://", "s3://", 1)
        options: dict[str, Any] = {"retry_config": {"max_retries": 0}}
        if scheme == "http" and address.scheme == "http":
            options["client_options"] = {"allow_http": True}
        self._store = library.from_url(url, **options)
        self._lists = scheme != "http"

    def head(self, name: str) -> Version:
        return self._version(self._call(lambda: self._obstore.head(self._store, name)))

    def get(self, name: str, begin: int, end: int, version: Version) -> Any:
        options: dict[str, Any] = {"range": (begin, end)}
        if version.tag.startswith('"'):
            options["if_match"] = version.tag
        result = self._call(lambda: self._obstore.get(self._store, name, options=options))
        if self._version(result.meta) != version:
            raise Replaced
        return self._call(result.bytes)

    def list(self) -> list[str] | None:
        if not self._lists:
            return None
        listed = self._call(lambda: self._obstore.list_with_delimiter(self._store))
        return sorted(entry["path"] for entry in listed["objects"])

    def _call(self, function: Callable[[], Any]) -> Any:
        errors = self._errors
        try:
            return function()
        except (errors.NotFoundError, FileNotFoundError) as error:
            raise Absent from error
        except errors.PreconditionError as error:
            raise Replaced from error
        except errors.PermissionDeniedError as error:
            raise RequestRefused("access is denied (403)") from error
        except errors.UnauthenticatedError as error:
            raise RequestRefused("the credentials are missing or not valid (401)") from error
        except errors.BaseError as error:
            raise _described(str(error).lower()) from error

    @staticmethod
    def _version(meta: Any) -> Version:
        return Version(meta["size"], meta["e_tag"] or str(meta["last_modified"] or ""))


class FsspecClient(ObjectClient):
    """Any file system of fsspec."""

    def __init__(self, library: Any, address: Address) -> None:
        self._fs, self._root = library.core.url_to_fs(address.full)
        self._lists = address.scheme not in ("http", "https")

    def head(self, name: str) -> Version:
        self._fs.invalidate_cache()
        info = self._call(self._fs.info, self._path(name))
        return Version(int(info["size"] or 0), next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), ""))

    def get(self, name: str, begin: int, end: int, version: Version) -> Any:
        return self._call(self._fs.cat_file, self._path(name), start=begin, end=end)

    def list(self) -> list[str] | None:
        if not self._lists:
            return None
        self._fs.invalidate_cache()
        entries = self._call(self._fs.ls, self._root, detail=True)
        return sorted(entry["name"].rpartition("/")[2] for entry in entries if entry["type"] == "file")

    def _call(self, function: Callable[..., Any], path: str, **options: Any) -> Any:
        try:
            return function(path, **options)
        except FileNotFoundError as error:
            raise Absent from error
        except PermissionError as error:
            raise RequestRefused("access is denied") from error

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def _described(text: str) -> Exception:
    """Returns an exception for a client's error text in lower case, without quoting it: it may contain the address."""
    if match := _STATUS.search(text):
        status = int(match[1])
        if status == 404:
            return Absent()
        refused = status < 500 and status not in (408, 425, 429)
        return (RequestRefused if refused else ConnectionError)(f"the server answered {status}")
    if "certificate" in text or "unknownissuer" in text:
        return RequestRefused(
            "its certificate is not valid for it, or not signed by an authority that this machine trusts"
        )
    if "builder error" in text:
        return RequestRefused(
            "the client does not take its address; an http:// endpoint has to be allowed, e.g. by AWS_ALLOW_HTTP=true"
        )
    return ConnectionError("no answer in time" if _TIMEOUT.search(text) else "the connection failed")
