"""Two classes of failure: the caller's mistake (ValueError, TypeError) and a run that failed (LoadError).

Every rank of a load raises the same error with the same text, and a caller's mistake moves nothing.
"""

from __future__ import annotations


class LoadError(RuntimeError):
    """The run failed. Every rank raises it; the text names the rank, the tensor and the file."""


class CheckpointError(LoadError):
    """The source is at fault: a missing, truncated or malformed file, or a tensor that cannot be read."""


class ModelMismatch(LoadError):
    """The checkpoint does not fit the model: keys, shapes or dtypes."""


class ManifestMismatch(LoadError):
    """Ranks disagree about what is to be loaded into what."""


class Disconnected(LoadError):
    """The groups cannot be used any more. Never seen by users: raised on as a LoadError."""


class Told(LoadError):
    """Another rank said that the load is off. Never seen by users: the root cause is shown in its place."""


_BY_NAME: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in (
        LoadError,
        CheckpointError,
        ModelMismatch,
        ManifestMismatch,
        Disconnected,
        Told,
        ValueError,
        TypeError,
        MemoryError,
    )
}


def kind_of(error: BaseException) -> str:
    """The name under which an error travels to the other ranks: its own class if it is one that they know."""
    return next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _BY_NAME), LoadError.__name__)


def text_of(error: BaseException) -> str:
    """The error's message, with its type where the message alone would not be understood."""
    known = type(error).__name__ in _BY_NAME and not isinstance(error, MemoryError)
    text = str(error).split("\nException raised from", 1)[0].strip()
    return text if known else f"{type(error).__name__}: {text}"


def make_error(kind: str, text: str) -> Exception:
    """The same error on another rank."""
    return _BY_NAME.get(kind, LoadError)(text)
