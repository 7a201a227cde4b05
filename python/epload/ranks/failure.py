"""Defines a failure as all ranks raise it, and how they learn of it.

The outcome of each step of a load is one key of the store: the coordinator's decision, or the first failure, whichever was
published first. A step is a round and what a rank does before it. One compare-and-set writes the key, so that all ranks read the
same outcome, a load cannot both succeed and fail, and a rank that waits for a decision is woken by a failure too.

The first failure published in a load is the one that every rank raises. A *soft* failure is that of a rank that can still do its
part: the readers check for one before each bucket and end the transfer in band. Any other failure is *hard*: every rank's watch
stops what that rank is waiting for.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count

from torch.distributed.distributed_c10d import Store

from epload.errors import LoadError, RankExited, WaitTimeout, kind_of, make_error, message_of

DECISION, LAST, FAILURE = b"o", b"e", b"f"
"""The first byte of an outcome. ``LAST``: a decision with which the load has succeeded."""
_MAX_TEXT = 1 << 20
"""Characters of a failure's text; the store accepts values of up to 8 MiB."""
_MAX_TOLD = 1 << 14
"""Bytes of a message between ranks of a node, which is sent as a whole or not at all."""


@dataclass(frozen=True)
class Failure:
    """Describes the error that every rank raises."""

    kind: str
    text: str
    rank: int
    clean: bool = False
    """True if all ranks are known to have stopped at the same step, so that groups and buffers can be reused."""

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


class Outcomes:
    """The outcomes of one attempt of a load. Thread-safe."""

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
        """Keys that a failure in ``step`` may have set, on any rank."""
        return self.key(step), self.key(step + 1), f"{self._prefix}stop"

    def decide(self, step: int, value: bytes, last: bool) -> bytes:
        """Publishes a decision; returns the outcome that stands."""
        outcome: bytes = self._store().compare_set(self.key(step), "", (LAST if last else DECISION) + value)  # type: ignore[arg-type]
        return outcome

    def publish(self, step: int, failure: Failure, hard: bool = True) -> Failure | None:
        """Returns what all ranks raise: this failure, or the one published first; None if the load has succeeded.

        Args:
            step: of this rank. If it has been decided, the failure belongs to a later one.
            failure: what has happened on this rank.
            hard: this rank cannot do its part any more, so that all have to stop at once.
        """
        text = json.dumps(asdict(failure) | {"hard": hard}).encode()
        for at in count(step):
            outcome = bytes(self._store().compare_set(self.key(at), "", FAILURE + text))  # type: ignore[arg-type]
            if outcome.startswith(LAST):
                return None
            if outcome.startswith(FAILURE):
                first, is_hard = parse(outcome)
                if hard and not is_hard:
                    self._store().set(f"{self._prefix}stop", "1")
                return first
        raise AssertionError

    def first(self, step: int) -> tuple[Failure, bool] | None:
        """The first failure published in ``step`` or later, if any, and whether all have to stop at once."""
        while outcome := self.read(step):
            if outcome.startswith(FAILURE):
                failure, hard = parse(outcome)
                return failure, hard or self.stopped()
            if outcome.startswith(LAST):
                return None
            step += 1
        return None

    def read(self, step: int) -> bytes:
        """The outcome of ``step``; empty if it has none.

        Does not wait, provided that this rank does not come to a later round meanwhile: then the key may be deleted.
        """
        key = self.key(step)
        return self._store().get(key) if self._store().check([key]) else b""

    def stopped(self) -> bool:
        """Returns True if a rank has published a hard failure after a soft one."""
        return bool(self._store().check([f"{self._prefix}stop"]))


def parse(outcome: bytes) -> tuple[Failure, bool]:
    """The failure, and whether it is hard."""
    fields = json.loads(outcome[1:])
    hard = fields.pop("hard")
    return Failure(**fields), hard


@dataclass(frozen=True)
class Alert:
    """Notifies the ranks of a node that an attempt of a load has failed."""

    prefix: str
    """Prefix of the attempt's keys."""
    hard: bool
    """True if all have to stop at once."""
    failure: Failure | None = None
    """The failure, if it is known and short enough for a message; None if it has to be read from the store."""

    def encode(self) -> bytes:
        failure = asdict(self.failure) if self.failure is not None else None
        data = json.dumps([self.prefix, self.hard, failure]).encode()
        return data if len(data) <= _MAX_TOLD else json.dumps([self.prefix, self.hard, None]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Alert:
        prefix, hard, failure = json.loads(data)
        return cls(prefix, hard, Failure(**failure) if failure is not None else None)


class Alerts:
    """The attempts of loads that this rank knows to have failed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Alert] = {}
        """Alerts by the prefix of the attempt."""

    def __contains__(self, prefix: str) -> bool:
        return prefix in self._known

    def hard(self, prefix: str) -> bool:
        """Returns True if all have to stop at once."""
        return (known := self._known.get(prefix)) is not None and known.hard

    def failure(self, prefix: str) -> Failure | None:
        """Returns the failure of the attempt; None if no alert has contained it."""
        return known.failure if (known := self._known.get(prefix)) is not None else None

    def add(self, alert: Alert) -> Alert | None:
        """Merges an alert into what is known; returns the result, or None if the alert adds nothing."""
        with self._lock:
            known = self._known.get(alert.prefix, alert)
            merged = Alert(alert.prefix, known.hard or alert.hard, known.failure or alert.failure)
            if merged == self._known.get(alert.prefix):
                return None
            self._known[alert.prefix] = merged
            return merged

    def forget(self, load: int) -> None:
        """Loads before this one."""
        with self._lock:
            self._known = {prefix: known for prefix, known in self._known.items() if int(prefix.split(".")[0]) >= load}
