"""The outcome of a load, published once in the store, which still works when process groups do not.

The first failure published in a load is the one that every rank raises. A *soft* failure is that of a rank that can still do its
part: the readers check for one before each bucket and end the transfer in band. Any other failure is *hard*: every rank's watch
stops what that rank is waiting for.
"""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from epload.errors import LoadError, RankExited, WaitTimeout, kind_of, make_error, message_of

_POLL_SECONDS = 0.05
"""Between two checks for a failure that another rank is about to publish."""
_MAX_TEXT = 1 << 20
"""Characters of a failure's text; the store accepts values of up to 8 MiB."""
_SUCCESS = "ended"
"""The outcome of a load that succeeded; any other outcome is the first failure."""


@dataclass(frozen=True)
class Failure:
    """What went wrong, as every rank raises it."""

    kind: str
    text: str
    rank: int
    clean: bool = False
    """Whether all ranks are known to have stopped at the same step, so that groups and buffers can be reused."""

    def __post_init__(self) -> None:
        if len(self.text) > _MAX_TEXT:
            object.__setattr__(self, "text", f"{self.text[:_MAX_TEXT]} ... ({len(self.text)} characters)")

    @classmethod
    def of(cls, error: BaseException, rank: int, clean: bool = False) -> Failure:
        """The error with its message only; see :func:`describe` for more."""
        return cls(kind_of(error), message_of(error), rank, clean)

    def error(self) -> Exception:
        """A new exception of the same class and text."""
        return make_error(self.kind, self.text)


def describe(error: BaseException, rank: int, doing: str = "", others: str = "") -> Failure:
    """The failure that ``error`` on ``rank`` is for all ranks, with its stack.

    Args:
        doing: the rank's activity when it failed.
        others: appended, the state of the other ranks.
    """
    if not isinstance(error, Exception):
        text = f"rank {rank} was interrupted ({type(error).__name__})"
    else:
        text = message_of(error)
        if not isinstance(error, LoadError):
            kind = "" if text.startswith(type(error).__name__) else f"{type(error).__name__}: "
            text = f"rank {rank}: {kind}{text}"
    if doing and not isinstance(error, LoadError):
        text += f" (last activity of rank {rank}: {doing})"
    if others:
        text += f"\n{others}"
    if stack := stack_of(error):
        text += f"\nTraceback of rank {rank}:\n{stack}"
    # A ValueError or TypeError becomes a LoadError: a caller's mistake is reported in a round, before anything moves.
    return Failure(kind_of(error) if isinstance(error, LoadError) else LoadError.__name__, text, rank)


def stack_of(error: BaseException) -> str:
    """The stack of the root cause, innermost call last; empty for a timeout or an ended rank, where it says nothing."""
    while error.__cause__ is not None and error.__cause__.__traceback__ is not None:
        error = error.__cause__
    if isinstance(error, WaitTimeout | RankExited):
        return ""
    return "".join(traceback.format_tb(error.__traceback__)[-12:]).rstrip()


class FailureStore:
    """The outcome of one load in the store. Thread-safe."""

    def __init__(self, store: Store, prefix: str) -> None:
        """``prefix``: of the load's keys."""
        self._store = store
        self._outcome, self._stop = f"{prefix}outcome", f"{prefix}stop"

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that any rank may have set."""
        return self._outcome, self._stop

    def publish(self, failure: Failure, hard: bool = True) -> Failure | None:
        """Returns what all ranks raise: this failure, or the one published first; None if the load has succeeded."""
        first = self._set_outcome(json.dumps(asdict(failure)))
        if hard and first is not None:
            self._store.set(self._stop, "1")
        return first

    def end(self) -> bool:
        """Marks the load as succeeded; returns False if a failure was published before."""
        return self._set_outcome(_SUCCESS) is None

    def first(self, patience: timedelta | None = None) -> Failure | None:
        """The first published failure, if any; waits up to ``patience`` for one."""
        if not self._store.check([self._outcome]):
            if patience is None:
                return None
            until = time.monotonic() + patience.total_seconds()
            while not self._store.check([self._outcome]):  # polls: the store's own wait would block the watch
                if time.monotonic() >= until:
                    return None
                time.sleep(_POLL_SECONDS)
        return _parse(self._store.get(self._outcome))

    def stopped(self) -> bool:
        """Whether a hard failure was published."""
        return bool(self._store.check([self._stop]))

    def _set_outcome(self, text: str) -> Failure | None:
        """One atomic operation, so that a rank that is interrupted or killed leaves either no outcome or a whole one."""
        return _parse(self._store.compare_set(self._outcome, "", text))


def _parse(outcome: bytes) -> Failure | None:
    text = outcome.decode()
    return None if text == _SUCCESS else Failure(**json.loads(text))
