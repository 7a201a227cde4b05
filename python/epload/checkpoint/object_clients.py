"""Clients of object storage: obstore where it is installed and knows the scheme, else whatever fsspec has.

Both take credentials from their own chain (environment variables, instance metadata, configuration files), are thread-safe, and
have three methods, which take names relative to the client's address. These raise FileNotFoundError; PermissionError if the
request failed in a way that no retry helps with; Busy if the server asks for fewer requests; or another exception. No message
quotes what a client says in full, as that may contain a signed address.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
from collections.abc import Callable
from typing import Any, TypeAlias
from urllib.parse import quote

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
_CONNECT_SECONDS, _READ_SECONDS = 10, 30
"""Seconds without an answer, or the next part of one, after which a request has failed."""
_VARIABLES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
"""The first part of the names of environment variables that obstore reads."""
_FLAGS = ("allow_http", "allow_invalid_certificates", "http1_only", "http2_only")
_TEXTS = (
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
    for name in (*_FLAGS, *_TEXTS) if prefix else ():
        if value := os.environ.get(f"{prefix}_{name.upper()}"):
            options[name] = value.lower() in ("1", "true", "yes", "on") if name in _FLAGS else value
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
