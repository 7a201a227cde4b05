"""Two classes of failure: the caller's mistake (ValueError, TypeError) and a run that failed (LoadError).

Every rank of a load raises the same error with the same text, and a caller's mistake moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class LoadError(RuntimeError):
    """The run failed. Every rank raises it; the text names the rank, the tensor and the file."""


class CheckpointError(LoadError):
    """The source is at fault: a missing, truncated or malformed file, or a tensor that cannot be read."""


class ModelMismatch(LoadError):
    """The checkpoint does not fit the model: keys, shapes or dtypes."""

    def __init__(
        self,
        text: str = "",
        *,
        missing_keys: Iterable[str] = (),
        unexpected_keys: Iterable[str] = (),
        mismatched_keys: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(text)
        self.missing_keys = list(missing_keys)
        """Names of the model that the checkpoint lacks, where that is the error."""
        self.unexpected_keys = list(unexpected_keys)
        """Names of the checkpoint that the model lacks, where that is the error."""
        self.mismatched_keys = dict(mismatched_keys or {})
        """Names of the model that the checkpoint has in another shape, each with both shapes in words."""

    def adopt(self, other: ModelMismatch) -> None:
        """Takes over the keys, which do not travel with the text."""
        self.missing_keys, self.unexpected_keys = other.missing_keys, other.unexpected_keys
        self.mismatched_keys = other.mismatched_keys


class ManifestMismatch(LoadError):
    """Ranks disagree about what is to be loaded into what."""


class RemoteFailure(LoadError):
    """Another rank said that the load is off. Never seen by users: the root cause is shown in its place."""


class WaitTimeout(LoadError):
    """A rank waited for another for longer than it may. Travels as LoadError."""


class RankEnded(LoadError):
    """The process of a rank has ended in the middle of a load. Travels as LoadError."""

    def __init__(self, rank: int, process: int) -> None:
        super().__init__(f"rank {rank} has ended (process {process}): killed, out of memory, or it left the load early")


class OutOfOrder(LoadError):
    """Two calls at once in one process, or in another order on another rank. Travels as LoadError.

    One text for both, as ranks may see the two calls of one mistake in either way. What each rank saw is in its log.
    """

    def __init__(self) -> None:
        super().__init__(
            "load() or coalesced_bcast() was called by two threads of a process at once, or in another order on another rank: "
            "call one after the other, in the same order on every rank (EPLOAD_LOG=info shows which ranks and threads)"
        )


_BY_NAME: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in (
        LoadError,
        CheckpointError,
        ModelMismatch,
        ManifestMismatch,
        RemoteFailure,
        ValueError,
        TypeError,
        MemoryError,
    )
}


def kind_of(error: BaseException) -> str:
    """The name under which an error travels to the other ranks: its own class if it is one that they know."""
    return next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _BY_NAME), LoadError.__name__)


def known(error: BaseException) -> bool:
    """Whether the error is one of epload's own or a caller's mistake, whose message says all there is to say."""
    return isinstance(error, LoadError) or (type(error).__name__ in _BY_NAME and not isinstance(error, MemoryError))


def text_of(error: BaseException) -> str:
    """The error's message, with its type where the message alone would not be understood."""
    text = str(error).split("\nException raised from", 1)[0].strip()
    return text if known(error) else f"{type(error).__name__}: {text}"


def make_error(kind: str, text: str) -> Exception:
    """The same error on another rank."""
    return _BY_NAME.get(kind, LoadError)(text)
