"""Defines a failure as all ranks raise it, and how they learn of it.

The outcome of each step of a load is one key of the store: the coordinator's decision, or the first failure, whichever was
published first. A step is a round and what a rank does before it. One compare-and-set writes the key, so that all ranks read the
same outcome, a load cannot both succeed and fail, and a rank that waits for a decision finds a failure in its place.

The first failure published in a load is the one that every rank raises. A *soft* failure is that of a rank that can still do its
part: the readers check for one before each bucket and end the transfer in band. Any other failure is *hard*: every rank's watch
stops what that rank is waiting for.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import count

from torch.distributed.distributed_c10d import Store

from epload.errors import LoadError, RankExited, WaitTimeout, kind_of, make_error, message_of
from epload.ranks.messages import read_if_set

DECISION, LAST, FAILURE = b"o", b"e", b"f"
"""The first byte of an outcome. ``LAST``: a decision with which the load has succeeded."""
_MAX_TEXT = 1 << 20
"""Characters of a failure's text; the store accepts values of up to 8 MiB."""


@dataclass(frozen=True)
class Failure:
    """Describes the error that every rank raises."""

    kind: str
    text: str
    rank: int
    clean: bool = False
    """True if all ranks are known to have stopped at the same step, so that groups and buffers can be reused."""
    hard: bool = True
    """True if all have to stop at once, as a rank cannot do its part any more."""

    @classmethod
    def of(cls, error: BaseException, rank: int, clean: bool = False, hard: bool = True) -> Failure:
        """Returns the error with its message only; see :func:`describe` for more."""
        return cls(kind_of(error), _shorten(message_of(error)), rank, clean, hard)

    @classmethod
    def decode(cls, data: bytes) -> Failure:
        return cls(**json.loads(data))

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

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
    kind = kind_of(error) if isinstance(error, LoadError) else LoadError.__name__
    return Failure(kind, _shorten(text), rank, hard=hard)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ... ({len(text)} characters)"


def stack_of(error: BaseException) -> str:
    """Returns the stack of the root cause, innermost call last; empty for a timeout or an ended rank, where it says nothing."""
    while error.__cause__ is not None and error.__cause__.__traceback__ is not None:
        error = error.__cause__
    if isinstance(error, WaitTimeout | RankExited):
        return ""
    return "".join(traceback.format_tb(error.__traceback__)[-12:]).rstrip()


class Outcomes:
    """The outcomes of one attempt of a load. Thread-safe; nothing here waits."""

    def __init__(self, store: Callable[[], Store], prefix: str) -> None:
        """
        Args:
            store: returns a connection.
            prefix: of the attempt's keys.
        """
        self._store = store
        self._prefix = prefix

    def key(self, step: int) -> str:
        return f"{self._prefix}{step}"

    def failure_keys(self, step: int) -> tuple[str, ...]:
        """Returns the keys that a failure in ``step`` may have set, on any rank."""
        return self.key(step), self.key(step + 1), f"{self._prefix}stop"

    def publish(self, step: int, value: bytes) -> bytes:
        """Publishes a decision or a failure as the outcome of ``step``, unless it has one; returns that which it has."""
        return bytes(self._store().compare_set(self.key(step), "", value))  # type: ignore[arg-type]

    def fail(self, step: int, failure: Failure) -> Failure | None:
        """Publishes a failure. Returns what all ranks raise: this one or the first; None if the load has succeeded.

        ``step``: of this rank. If it has been decided, the failure belongs to a later one.
        """
        for at in count(step):
            outcome = self.publish(at, FAILURE + failure.encode())
            if outcome.startswith(LAST):
                return None
            if outcome.startswith(FAILURE):
                first = Failure.decode(outcome[1:])
                if failure.hard and not first.hard:
                    self._store().set(f"{self._prefix}stop", "1")
                return replace(first, hard=first.hard or failure.hard)
        raise AssertionError

    def read(self, step: int) -> bytes:
        """Returns the outcome of ``step``; empty if it has none."""
        return read_if_set(self._store(), self.key(step)) or b""

    def first_failure(self, step: int) -> Failure | None:
        """Returns the first failure published in ``step`` or later, if any."""
        while (outcome := self.read(step)).startswith(DECISION):
            step += 1
        if not outcome.startswith(FAILURE):
            return None
        failure = Failure.decode(outcome[1:])
        return failure if failure.hard or not self.stopped() else replace(failure, hard=True)

    def stopped(self) -> bool:
        """Returns True if a rank has published a hard failure after a soft one."""
        return bool(self._store().check([f"{self._prefix}stop"]))
