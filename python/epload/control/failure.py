"""How a failure reaches every rank: through the store, which can speak when groups have died.

Of all that is told in one load, the first counts: it is what every rank raises. A rank that can still go on with its part tells
*softly*, and the readers, which look once per bucket, end the transfer in band; any other failure is *hard*, and every rank's
watch stops what that rank is doing.
"""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from epload.errors import LoadError, RankExited, WaitTimeout, kind_of, make_error, message_of

_LOOK = 0.05
"""Seconds between two looks for a failure that must be there soon."""
_MAX_TEXT = 1 << 20
"""Characters of a failure's text; the store takes no value of more than 8 MiB."""
_ENDED = "ended"
"""The outcome of a load that has ended well; of any other it is the first failure."""


@dataclass(frozen=True)
class Failure:
    """What went wrong, as every rank raises it."""

    kind: str
    text: str
    rank: int
    clean: bool = False
    """Whether all ranks are known to have stopped at the same step, so that groups and buffers can be used again."""

    def __post_init__(self) -> None:
        if len(self.text) > _MAX_TEXT:
            object.__setattr__(self, "text", f"{self.text[:_MAX_TEXT]} ... ({len(self.text)} characters)")

    def error(self) -> Exception:
        return make_error(self.kind, self.text)


def describe(error: BaseException, rank: int, doing: str = "", others: str = "") -> Failure:
    """``doing``: what the rank was at; ``others``: what else to tell."""
    if not isinstance(error, Exception):
        text = f"rank {rank} was interrupted ({type(error).__name__})"
    else:
        text = message_of(error)
        if not isinstance(error, LoadError):
            kind = "" if text.startswith(type(error).__name__) else f"{type(error).__name__}: "
            text = f"rank {rank}: {kind}{text}"
    if doing and not isinstance(error, LoadError):
        text += f" (rank {rank} was at: {doing})"
    if others:
        text += f"\n{others}"
    if stack := stack_of(error):
        text += f"\nWhere it happened, on rank {rank}:\n{stack}"
    # Not a caller's mistake, whatever was raised: those are told in rounds, before anything moves.
    return Failure(kind_of(error) if isinstance(error, LoadError) else LoadError.__name__, text, rank)


def stack_of(error: BaseException) -> str:
    """The stack of the root cause, innermost call last; none for waiting in vain, where it says nothing."""
    while error.__cause__ is not None and error.__cause__.__traceback__ is not None:
        error = error.__cause__
    if isinstance(error, WaitTimeout | RankExited):
        return ""
    return "".join(traceback.format_tb(error.__traceback__)[-12:]).rstrip()


class FailureStore:
    """The place in a store where the outcome of one load is told, once. Methods may be called by any thread."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._outcome, self._stop = f"{prefix}outcome", f"{prefix}stop"

    @property
    def keys(self) -> tuple[str, ...]:
        return self._outcome, self._stop

    def tell(self, failure: Failure, hard: bool = True) -> Failure | None:
        """Returns what all ranks raise: this failure, or one that was told before; None if the load has ended well."""
        first = self._settle(json.dumps(asdict(failure)))
        if hard and first is not None:
            self._store.set(self._stop, "1")
        return first

    def end(self) -> bool:
        """The load has ended well, unless a failure was told before: then False."""
        return self._settle(_ENDED) is None

    def first(self, patience: timedelta | None = None) -> Failure | None:
        """The first failure told, if any; waits ``patience`` for one."""
        if not self._store.check([self._outcome]):
            if patience is None:
                return None
            until = time.monotonic() + patience.total_seconds()
            while not self._store.check([self._outcome]):  # not the store's own wait, which would hold up the watch
                if time.monotonic() >= until:
                    return None
                time.sleep(_LOOK)
        return _parse(self._store.get(self._outcome))

    def _settle(self, text: str) -> Failure | None:
        """One step of the store, so that no rank can be interrupted, or die, in the middle of it."""
        return _parse(self._store.compare_set(self._outcome, "", text))

    def stopped(self) -> bool:
        """Whether a failure was told after which some rank cannot go on."""
        return bool(self._store.check([self._stop]))


def _parse(outcome: bytes) -> Failure | None:
    text = outcome.decode()
    return None if text == _ENDED else Failure(**json.loads(text))
