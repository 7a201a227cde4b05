"""Defines a failure as all ranks raise it.

The outcome of a load is one key of the store: the decision of its last round, or the first failure, whichever was published
first. One compare-and-set writes the key, so that all ranks read the same outcome, and a load cannot both succeed and fail.

The first failure published in a load is the one that every rank raises. A *soft* failure is that of a rank that can still do its
part: the readers check for one before each bucket and end the transfer in band. Any other failure is *hard*: every rank's watch
stops what that rank is waiting for.
"""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict, dataclass

from epload.errors import LoadError, RankExited, WaitTimeout, kind_of, make_error, message_of

FAILURE = b"f"
"""The first byte of an outcome that is a failure; no decision begins with it."""
_MAX_TEXT = 1 << 20
"""Characters of a failure's text; the store accepts values of up to 8 MiB."""


@dataclass(frozen=True)
class Failure:
    """Describes the error that every rank raises."""

    kind: str
    text: str
    rank: int
    clean: bool = False
    """True if all ranks are known to have stopped at the same step, so that groups and buffers can be reused. A transfer that its
    readers have ended in band is none of these: a rank may have been killed meanwhile, and no round reports it."""
    hard: bool = True
    """True if all have to stop at once, as a rank cannot do its part any more."""
    absent: tuple[int, ...] = ()
    """Ranks for which the others have waited in vain."""

    @classmethod
    def of(cls, error: BaseException, rank: int, clean: bool = False, hard: bool = True) -> Failure:
        """Returns the error with its message only; see :func:`describe` for more."""
        return cls(kind_of(error), _shorten(message_of(error)), rank, clean, hard)

    @classmethod
    def decode(cls, outcome: bytes) -> Failure | None:
        """Returns the failure that an outcome is; None if it is a decision, or empty."""
        if not outcome.startswith(FAILURE):
            return None
        fields = json.loads(outcome[1:])
        return cls(**fields | {"absent": tuple(fields["absent"])})

    def encode(self) -> bytes:
        return FAILURE + json.dumps(asdict(self)).encode()

    def error(self) -> Exception:
        """Returns a new exception of the same class and text."""
        return make_error(self.kind, self.text)


def describe(error: BaseException, rank: int, hard: bool, doing: str, others: str) -> Failure:
    """Returns the failure that ``error`` on ``rank`` is for all ranks, with its stack.

    Args:
        error: as raised.
        rank: this process's.
        hard: that of the failure.
        doing: the rank's activity when it failed.
        others: appended, the state of the other ranks.
    """
    # A ValueError or TypeError becomes a LoadError: a caller's mistake is reported in a round, before anything moves.
    kind, text = LoadError.__name__, message_of(error)
    if isinstance(error, LoadError):
        kind = kind_of(error)
    elif isinstance(error, Exception):
        name = type(error).__name__
        text = f"rank {rank}: {text}" if text.startswith(name) else f"rank {rank}: {name}: {text}"
    else:
        text = f"rank {rank} was interrupted ({type(error).__name__})"
    if doing and not isinstance(error, LoadError):
        text += f" (last activity of rank {rank}: {doing})"
    if others:
        text += f"\n{others}"
    if stack := stack_of(error):
        text += f"\nTraceback of rank {rank}:\n{stack}"
    return Failure(kind, _shorten(text), rank, hard=hard, absent=getattr(error, "absent", ()))


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ... ({len(text)} characters)"


def stack_of(error: BaseException) -> str:
    """Returns the stack of the root cause, innermost call last; empty for a timeout or an ended rank, where it says nothing."""
    seen = {id(error)}  # `raise error from error` makes an error its own cause
    while (cause := error.__cause__) is not None and cause.__traceback__ is not None and id(cause) not in seen:
        error = cause
        seen.add(id(error))
    if isinstance(error, WaitTimeout | RankExited):
        return ""
    return "".join(traceback.format_tb(error.__traceback__)[-12:]).rstrip()
