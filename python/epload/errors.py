"""The errors that epload raises.

There are two classes of failure. The caller's mistake raises ``ValueError`` or ``TypeError`` before any data moves. A run that
failed raises :class:`LoadError` or one of its subclasses. Either way, every rank raises the same error with the same message.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Mapping


class LoadError(RuntimeError):
    """The run failed. Every rank raises it, and the message names the rank, the tensor or the file at fault."""

    def __init__(self, message: str = "") -> None:
        super().__init__(redact(message))


class CheckpointError(LoadError):
    """The checkpoint is at fault: a file is missing, truncated, malformed or changed, or a tensor cannot be read."""


class ModelMismatch(LoadError):
    """The checkpoint does not fit the model: keys, shapes or dtypes differ. The arguments are attributes of the same names."""

    def __init__(
        self,
        message: str = "",
        *,
        missing_keys: Iterable[str] = (),
        unexpected_keys: Iterable[str] = (),
        mismatched_keys: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.missing_keys: list[str] = list(missing_keys)
        """Names of the model's tensors that the checkpoint lacks. Empty if they are not the error."""
        self.unexpected_keys: list[str] = list(unexpected_keys)
        """Names of the checkpoint's tensors that the model lacks. Empty if they are not the error."""
        self.mismatched_keys: dict[str, str] = dict(mismatched_keys or {})
        """Names of the model's tensors whose shape differs in the checkpoint, each with a text that states both shapes."""

    def copy_keys(self, other: ModelMismatch) -> None:
        """Copies the keys of ``other``. Errors are sent between ranks as text, without their keys."""
        self.missing_keys, self.unexpected_keys = other.missing_keys, other.unexpected_keys
        self.mismatched_keys = other.mismatched_keys


class ManifestMismatch(LoadError):
    """The ranks disagree about what to load into which tensors."""


class RemoteFailure(LoadError):
    """Another rank failed. Internal: users get that rank's error instead."""


class WaitTimeout(LoadError):
    """Another rank made no progress within the timeout. Other ranks raise it as LoadError."""

    absent: tuple[int, ...] = ()
    """Ranks that have not come to a round."""


class RankExited(LoadError):
    """The process of a rank exited during a load. Other ranks raise it as LoadError."""

    def __init__(self, rank: int, process: int) -> None:
        super().__init__(f"rank {rank} has exited (process {process}): it was killed, ran out of memory, or left the load early")


def call_order_error() -> LoadError:
    """Returns the error for two threads of a process that call epload at once, and for a rank that makes its calls in another
    order: ranks cannot always tell these mistakes apart. Each logs what it saw."""
    return LoadError(
        "load() or coalesced_bcast() was called by two threads of a process at once, or in a different order on another "
        "rank: make one call at a time, in the same order on every rank "
        "(EPLOAD_LOG=info shows the ranks and threads)"
    )


_BY_NAME: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in (
        LoadError, CheckpointError, ModelMismatch, ManifestMismatch, RemoteFailure, ValueError, TypeError, MemoryError
    )
}  # fmt: skip
"""The error classes that every rank can raise again from a name and a message."""


def kind_of(error: BaseException) -> str:
    """The class name under which an error is sent to other ranks: its own or the nearest base class in ``_BY_NAME``."""
    return next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _BY_NAME), LoadError.__name__)


def is_known(error: BaseException) -> bool:
    """Returns True if the error is epload's own or a caller's mistake: its message suffices, without a class name or a stack."""
    return isinstance(error, LoadError) or (type(error).__name__ in _BY_NAME and not isinstance(error, MemoryError))


def limit_hint(error: BaseException) -> str:
    """Returns which limit to raise where no more files can be opened, as an end of a message; empty for other errors."""
    of_process, of_machine = "the limit on open files (ulimit -n)", "the machine's limit on open files (sysctl fs.file-max)"
    limit = {errno.EMFILE: of_process, errno.ENFILE: of_machine}.get(getattr(error, "errno", None) or 0, "")
    return f"; raise {limit}" if limit else ""


def message_of(error: BaseException) -> str:
    """The error's message without the C++ stack and without credentials, prefixed by the class name unless :func:`is_known`."""
    try:
        text = str(error)
    except Exception as fault:
        text = f"a message that cannot be shown ({type(fault).__name__})"
    message = redact(text.split("\nException raised from", 1)[0].strip())
    return message if is_known(error) else f"{type(error).__name__}: {message}"


def make_error(kind: str, message: str) -> Exception:
    """The error that another rank sent as ``kind_of(error)`` and ``message_of(error)``."""
    return _BY_NAME.get(kind, LoadError)(message)


def for_both_jobs(failure: Exception | None) -> Exception | None:
    """Returns an error that says to another job, too, that a version has failed, and not that its own call was wrong."""
    return LoadError(str(failure)) if isinstance(failure, ValueError | TypeError) else failure


# ---- credentials ----

_MALFORMED = "a malformed URL"
"""Stands for a URL in which the end of the credentials cannot be told."""
_URL = re.compile(
    r"\b[A-Za-z][A-Za-z0-9+.-]{1,30}:/+"
    r"(?:[^\s/@:]{0,200}:(?!\s|\d{1,5}(?!\w))[^\n@]{1,200}@)?"  # a password may have spaces and quotes
    r"[^\s'\"<>]*"
)
_QUERY = re.compile(r"[?#]")
_ADDRESS = re.compile(r"\[[0-9A-Fa-f:.]+\]")
_PORT = re.compile(r":\d{1,5}(?!\w)")
_NAMED = re.compile(
    r"\b(X-(?:Amz|Goog)-[\w-]{1,40}|sig|signature|token|access_token|password|passwd|secret|aws_secret_access_key"
    r"|AccountKey|SharedAccessKey)=[^\s&'\"<>/]+",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(Bearer|Authorization: Basic) +[\w.~+/=-]{8,}")
_TOKENS = re.compile(r"\b(?:hf_[A-Za-z0-9]{20,}|(?:gh[a-z]_|github_pat_)\w{20,})|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")


def redact(text: str) -> str:
    """Returns the text without user, password, query and fragment of the URLs in it, and without tokens of known forms.

    A part of a URL that may be a credential is removed, even if it is not certain to be one.
    """
    if ":/" in text:
        text = _URL.sub(_without_punctuation, text)
    return _TOKENS.sub("...", _NAMED.sub(r"\1=...", _BEARER.sub(r"\1 ...", text)))


def _without_punctuation(match: re.Match[str]) -> str:
    """Redacts a URL in a sentence, where a colon or the like after it is not part of it."""
    url = match[0].rstrip(":.,;)")
    return redact_url(url) + match[0][len(url) :]


def redact_url(url: str) -> str:
    """Returns the same for a text that as a whole is a URL, with whatever characters. A path without a scheme stays as it is."""
    scheme, separator, rest = url.partition(":/")
    if not separator or (scheme.lower() == "file" and rest.startswith("//")):
        return url
    path = rest.lstrip("/")
    start = f"{scheme}:{'/' * (1 + len(rest) - len(path))}"
    place, *query = _QUERY.split(path, maxsplit=1)
    host = _ADDRESS.sub("", place.partition("/")[0], count=1)
    is_named = "@" in host or ":" in place.rpartition("@")[0] or ":" in _PORT.sub("", host) or "[" in host
    if query and "@" in query[0] and ":" in place:  # a password with "?" or "#"
        return _MALFORMED
    if is_named:  # a password may have slashes: credentials end at the last @
        place = place.rpartition("@")[2] if "@" in place else ""
        if not place:
            return _MALFORMED
    elif scheme.rpartition(":")[2] == "github":  # the first part may be a token
        place = "..." + place[len(host) :]
    return _TOKENS.sub("...", _NAMED.sub(r"\1=...", f"{start}{place}"))
