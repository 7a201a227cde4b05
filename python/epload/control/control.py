"""Agreement between ranks, over the process group's key-value store.

The store is used rather than a collective so that agreement costs no communicator, works in a job whose only backend is a
device's, shows up in no profile as data, and can still speak when a group has died. One round is one set and one get a rank,
and W gets on the coordinator (the topology's first rank).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import Store

from epload.control.failure import Failure, FailureStore, describe, stack_of
from epload.control.processes import Registry
from epload.control.watch import Beats, Watch
from epload.core.log import logger
from epload.errors import (
    CallOrderError,
    LoadError,
    RankExited,
    RemoteFailure,
    WaitTimeout,
    is_known,
    kind_of,
    make_error,
    message_of,
)

DEFAULT_TIMEOUT = timedelta(minutes=30)

_SHORTEST, _LONGEST, _SHARE = 0.0002, 1.0, 1 / 8
"""Seconds between two looks into the store for what a round waits for, and what share of the time that it has waited. Not the
store's own wait: a TCPStore prints a warning whenever one times out."""
_FIRST_LOOK = 0.05
"""Seconds that a rank waits before it looks also whether another has failed; then twice as long, up to every second."""
_VALUE_BYTES = 4 << 20
"""In one value of the store, which takes no more than 8 MiB."""
_PARTS = "#"
"""Starts a value that says in how many parts a text is."""
_TELLING = timedelta(seconds=5)
"""How long a rank that was stopped waits to hear why."""


class Control:
    """Rounds of agreement among the ranks of one topology. Every rank calls the same rounds in the same order.

    One thread of a rank runs its rounds; the watch, while it is entered, beats from another.
    """

    def __init__(self, store: Store | None, ranks: tuple[int, ...], rank: int, name: str = "") -> None:
        """``store``: in a place of this control's own, which all ``ranks`` know (see :mod:`epload.meeting`); may be None for a
        single rank."""
        if store is None and len(ranks) > 1:
            raise ValueError(f"{len(ranks)} ranks cannot agree without a store; call init_process_group first")
        self.name = name
        """Of ``store``'s place; no other control of the job has it."""
        self.ranks = ranks
        self.rank = rank
        self.coordinator = ranks[0]
        self.timeout = DEFAULT_TIMEOUT
        self.agreed: set[bytes] = set()
        """Digests of what all ranks have already found to be the same."""
        self.doing = ""
        """What this rank is at, for those who wait for it."""
        self.progress = 0
        """Grows with what this rank has done; whoever waits for it is patient as long as it does."""
        self.gone: Mapping[int, int] = {}
        """Process id of each rank of this machine whose process has ended."""
        self.alarm = threading.Event()
        """Set by the watch to wake a rank that waits in a round: a process has ended, or the store is lost."""
        self.neighbors: list[tuple[int, str]] = []
        """The other ranks on this machine, each with its process."""
        self.registry: Registry | None = None
        """Where more of them may yet appear, while ranks meet."""
        self._load = self._failures = self._round = 0
        self._taken = 0
        """The last load number given out; see :meth:`take`."""
        self._lock = threading.Lock()
        self._usual = self.timeout
        self._refused: list[tuple[int, tuple[str, ...]]] = []
        """On the coordinator: loads that another thread was refused, with the keys of their desks."""
        self._failure: Failure | None = None
        self._letters: list[str] = []
        """Keys of what this rank has sent to others."""
        self._posted: list[str] = []
        """Keys that this rank has set in rounds, and on the coordinator those of desks before this one. Each rank deletes its
        own, so that a round costs it the same however many ranks there are."""
        self._passed: list[str] = []
        """Those of them that nobody waits for any more."""
        self._last: tuple[str, str] | None = None
        """On the coordinator: key and text of the verdict that ends the load."""
        self._store = store
        own = _own_connection(store) if store is not None else None
        self._own = own
        """So that the watch, and whoever tells of a failure, need not wait for a round's call to the store."""
        self.beats = Beats(own, rank) if own is not None else None
        self.desk = FailureStore(own, self._prefix) if own is not None else None
        self.watch = Watch(self)

    @property
    def round(self) -> int:
        """Number of the round that this rank is in, or was in last."""
        return self._round

    @property
    def _prefix(self) -> str:
        return f"{self._load}.{self._failures}/"

    @property
    def store(self) -> Store | None:
        """The place of this control's ranks in the job's store."""
        return self._store

    def take(self) -> int:
        """The number of the next load. Every rank takes one for each load, also for one that it refuses. Thread-safe."""
        with self._lock:
            self._taken += 1
            return self._taken

    def begin(self, timeout: timedelta | None = None, number: int | None = None) -> None:
        """Before each load, on all ranks: forgets how the last one ended, also if it ended differently for some.

        ``timeout`` holds until :meth:`end`. ``number``: from :meth:`take`, which is called here if it is None.
        """
        number = number if number is not None else self.take()
        self.timeout = timeout if timeout is not None else self._usual
        self.gone = {}
        self.alarm.clear()
        self.doing, self.progress = "", 0
        self._posted += self._letters  # of a load that failed: another rank may be reading them still
        self._letters = []
        self._turn(number, 0)
        with self._lock:
            for refused in [refused for refused in self._refused if refused[0] < number]:
                self._posted += refused[1]
                self._refused.remove(refused)

    def end(self) -> None:
        """After each load, however it ended."""
        self.timeout = self._usual

    def _turn(self, load: int, failures: int) -> None:
        self._failure = self._last = None
        if self.desk is not None and self.rank == self.coordinator and (self._round > 0 or self._failures > 0):
            self._posted += self.desk.keys
        self._load, self._failures, self._round = load, failures, 0
        if self._own is not None:
            self.desk = FailureStore(self._own, self._prefix)

    def refuse(self, number: int, error: Exception) -> Failure:
        """Tells all ranks that this one does not take part in load ``number``; returns what all of them raise.

        For a thread that found another in a load. The others stop in the first round, so that groups can be used again.
        """
        failure = Failure(kind_of(error), message_of(error), self.rank, clean=True)
        if self._own is None:
            return failure
        desk = FailureStore(self._own, f"{number}.0/")
        if self.rank == self.coordinator:
            with self._lock:
                self._refused.append((number, desk.keys))
        try:
            return desk.tell(failure) or failure
        except RuntimeError:  # the store is lost, which the others see by themselves
            return failure

    def break_off(self, error: Exception) -> None:
        """Fails the load that is under way in another thread, with no more than the error's text."""
        if self.desk is None:
            return
        with suppress(RuntimeError):  # the store is lost, which all see by themselves
            self.desk.tell(Failure(kind_of(error), message_of(error), self.rank))

    def guard(self) -> _Guard:
        """A context in which this rank is watched and watches, and out of which every rank raises the same error."""
        return _Guard(self)

    def enter_registry(self) -> Registry:
        """By ranks that meet: lets the others of this machine find this process, and the watch find theirs."""
        assert self._own is not None
        self.registry = Registry(self._own, self.rank)
        return self.registry

    def leave_registry(self, registry: Registry) -> None:
        """When all ranks have come."""
        self.registry = None
        self.neighbors = registry.look()
        self.keep(registry.keys)

    def find_neighbors(self) -> None:
        """By the watch: looks who has come since."""
        if (registry := self.registry) is not None:
            self.neighbors = registry.look()

    def keep(self, keys: Sequence[str]) -> None:
        """Keys that this rank has set and that nobody needs when all ranks have come to the next round: deletes them then."""
        self._posted += keys

    def known(self) -> Failure | None:
        """The first failure that any rank has told in this load. For the thread that runs the rounds."""
        return self.desk.first() if self.desk is not None else None

    def fail(self, error: BaseException, hard: bool = True) -> Failure | None:
        """Tells all ranks of a failure; returns what all of them raise, or None if the load has ended well for the others.

        ``hard``: this rank cannot go on with its part, so that all have to stop at once.
        """
        told = isinstance(error, RemoteFailure)
        try:
            first = self.desk.first(_TELLING if told else None) if self.desk is not None else None
            if first is not None and not hard:
                return first
            others = ""
            if first is None and not told and self.beats is not None:
                others = self.beats.describe(self.ranks, self.gone, self.doing, fresh=isinstance(error, WaitTimeout))
            failure = describe(error, self.rank, doing=self.doing, others=others)
            return self.desk.tell(failure, hard) if self.desk is not None else failure
        except RuntimeError as lost:
            text = f"{message_of(error)}\nThe other ranks could not be told, as the store is lost: {message_of(lost)}"
            return Failure(LoadError.__name__, text, self.rank)

    def conclude(self, error: BaseException) -> Failure | None:
        """After anything that ended a load on this rank: tells the others unless they know. As :meth:`fail`."""
        if self._failure is not None:
            return self._failure
        failure = self.fail(error)
        with suppress(RuntimeError):
            if failure is None and self._last is not None:
                self._post(*self._last)  # interrupted after it had ended the load, perhaps before the others heard
            elif failure is not None and self._store is not None:  # only so that nobody has to look for the failure
                mine = "verdict" if self.rank == self.coordinator else self.rank
                self._post(f"{self._prefix}{self._round + 1}/{mine}", "x")
        if failure is not None:
            self._turn(self._load, self._failures + 1)
            self._failure = failure
        return failure

    def agree(
        self,
        what: str,
        view: str,
        decide: Callable[[Mapping[int, str]], str],
        patience: float = 1.0,
        last: bool = False,
    ) -> str:
        """Returns, on every rank, what the coordinator's ``decide`` made of all ranks' views.

        ``patience`` multiplies the timeout, for a round that ranks come to after a timeout of their own. With ``last``, the
        load has ended well when the round has.

        Raises:
            LoadError: a rank did not arrive within the timeout, one told of a failure, or ``decide`` raised; the same text
                on every rank that is alive.
        """
        if self._store is None:
            try:
                return decide({self.rank: view})
            except Exception as error:
                self._failure = self._refusal(error)
                raise
        self._round += 1
        self.doing = what
        prefix = f"{self._prefix}{self._round}/"
        limit = patience * self.timeout
        try:
            if self.rank == self.coordinator:
                verdict = self._judge(prefix, what, view, decide, limit, last)
                self._post(f"{prefix}verdict", verdict)
            else:
                verdict = self._hear(prefix, what, view, limit)
        except DistNetworkError as error:
            raise LoadError(f"{what}: the store is lost: {message_of(error)} (seen by rank {self.rank})") from error
        if verdict == "x":
            raise self._raised(None)
        return verdict[1:]

    def _judge(
        self,
        prefix: str,
        what: str,
        view: str,
        decide: Callable[[Mapping[int, str]], str],
        limit: timedelta,
        last: bool,
    ) -> str:
        assert self._store is not None
        assert self.desk is not None
        others = [rank for rank in self.ranks if rank != self.rank]
        absent = self._await(prefix, others, limit)
        if absent:
            raise self._raised(
                WaitTimeout(f"{what}: {_ranks(absent)} did not arrive within {limit.total_seconds():.0f} s")
            )
        posted = self._store.multi_get([f"{prefix}{rank}" for rank in others]) if others else []
        heard = {other: self._whole(f"{prefix}{other}", value) for other, value in zip(others, posted, strict=True)}
        views = {rank: view if rank == self.rank else heard[rank] for rank in self.ranks}
        self._delete(self._posted)  # all ranks have come to this round, and need nothing from before
        if "x" in views.values():
            return "x"
        try:
            verdict = "o" + decide(views)
        except Exception as error:
            self.desk.tell(self._refusal(error), hard=False)
            return "x"
        if not last:
            return verdict
        self._last = f"{prefix}verdict", verdict
        return verdict if self.desk.end() else "x"

    def _refusal(self, error: Exception) -> Failure:
        """Of what all ranks wanted, in a round: they stop at the same step."""
        return Failure(kind_of(error), message_of(error), self.rank, clean=True)

    def _hear(self, prefix: str, what: str, view: str, limit: timedelta) -> str:
        assert self._store is not None
        self._post(f"{prefix}{self.rank}", view)
        self._delete(self._passed)
        # Longer than the coordinator waits, so that its text is the one raised.
        limit = 1.25 * limit + timedelta(seconds=2)
        if self._await(prefix, ["verdict"], limit):
            raise self._raised(
                WaitTimeout(
                    f"{what}: rank {self.coordinator}, which coordinates, gave no verdict within "
                    f"{limit.total_seconds():.0f} s (seen by rank {self.rank})"
                )
            )
        verdict = self._whole(f"{prefix}verdict", self._store.get(f"{prefix}verdict"))
        # Deleted in the next round: after the last one the store may be gone.
        self._passed, self._posted = self._posted, []
        return verdict

    def _await(self, prefix: str, keys: Sequence[int | str], limit: timedelta) -> list[int]:
        """Returns when all keys are there, or, after ``limit`` without progress, the ranks that it waits for in vain."""
        assert self._store is not None
        names = [f"{prefix}{key}" for key in keys]
        began = monotonic()
        until = began + limit.total_seconds()
        seen, look = None, _FIRST_LOOK
        while names and not self._store.check(names):
            waited = monotonic() - began
            alarmed = self.alarm.wait(min(max(_SHARE * waited, _SHORTEST), _LONGEST))
            if waited < look and not alarmed:
                continue
            self.alarm.clear()
            look = waited + min(waited, _LONGEST)
            missing = [key for key in keys if not self._store.check([f"{prefix}{key}"])]
            ranks = [self.coordinator if key == "verdict" else int(key) for key in missing]
            if self.known() is not None:
                raise self._raised(None)
            # A rank that has heard the verdict of the last round may end before this one has.
            for rank, process in sorted(self.gone.items()):
                if not self._store.check(names):
                    raise self._raised(RankExited(rank, process))
            if self.beats is not None:
                now = self.beats.signs(ranks, self._round)
                if seen is not None and now != seen:
                    until = monotonic() + limit.total_seconds()
                seen = now
            if monotonic() >= until:
                return ranks
        return []

    def _raised(self, error: BaseException | None) -> Exception:
        """The failure that all ranks raise, after telling them of ``error``; later rounds start afresh."""
        failure = self.fail(error) if error is not None else None
        if failure is None and self.desk is not None:
            failure = self.desk.first(_TELLING)
        if failure is None:
            failure = Failure(LoadError.__name__, "another rank failed and ended before it could say why", self.rank)
        raised = failure.error()
        self._turn(self._load, self._failures + 1)
        self._failure = failure
        return raised

    def _post(self, key: str, text: str) -> None:
        assert self._store is not None
        data = text.encode(errors="backslashreplace")
        if len(data) > _VALUE_BYTES:
            parts = [data[at : at + _VALUE_BYTES] for at in range(0, len(data), _VALUE_BYTES)]
            for number, part in enumerate(parts):
                self._posted.append(f"{key}/{number}")
                self._store.set(f"{key}/{number}", part)  # type: ignore[arg-type]
            data = f"{_PARTS}{len(parts)}".encode()
        self._posted.append(key)
        self._store.set(key, data)  # type: ignore[arg-type]

    def _whole(self, key: str, value: bytes) -> str:
        """The text that was posted under ``key``, where ``value`` was found."""
        assert self._store is not None
        if not value.startswith(_PARTS.encode()):
            return value.decode()
        parts = [self._store.get(f"{key}/{number}") for number in range(int(value[len(_PARTS) :]))]
        return b"".join(parts).decode()

    def _delete(self, keys: list[str]) -> None:
        """Deletes keys, and empties the list of them."""
        assert self._store is not None
        for key in keys:
            self._store.delete_key(key)
        keys.clear()

    def deal(self, what: str, letters: Mapping[int, bytes]) -> dict[int, bytes]:
        """A round in which every rank may send bytes to any other; returns what was sent to this one, by sender.

        ``letters``: by receiver; every rank writes to the same receivers. They stay in the store until :meth:`forget_letters`,
        which a rank calls once all have read theirs.
        """
        if self._store is None:
            return dict(letters)
        prefix = f"{self._prefix}letter/{what}"
        for receiver, letter in letters.items():
            parts = range(0, len(letter), _VALUE_BYTES) or range(1)
            for part in parts:
                key = f"{prefix}/{self.rank}/{receiver}/{part // _VALUE_BYTES}"
                self._store.set(key, bytes([part == parts[-1]]) + letter[part : part + _VALUE_BYTES])  # type: ignore[arg-type]
                self._letters.append(key)
        self.settle(what, None)
        if self.rank not in letters:
            return {}
        return {sender: self._read_letter(f"{prefix}/{sender}/{self.rank}") for sender in self.ranks}

    def _read_letter(self, prefix: str) -> bytes:
        assert self._store is not None
        letter, last, part = b"", 0, 0
        while not last:
            last, *_ = data = self._store.get(f"{prefix}/{part}")
            letter += data[1:]
            part += 1
        return letter

    def forget_letters(self) -> None:
        if self._letters:
            self._delete(self._letters)

    def settle(
        self,
        what: str,
        failure: BaseException | None,
        view: Any = None,
        decide: Callable[[dict[int, Any]], Any] = lambda views: None,
        patience: float = 1.0,
        last: bool = False,
    ) -> Any:
        """A round in which any rank may report that it failed: then every rank raises that error.

        ``view`` and what ``decide`` returns are JSON values. When several ranks failed, the text has each distinct message
        with the ranks that gave it.
        """
        error = None
        if failure is not None:
            stack = "" if is_known(failure) else stack_of(failure)
            error = [kind_of(failure), message_of(failure) + (f"\n{stack}" if stack else "")]

        def judge(raw: Mapping[int, str]) -> str:
            views = {rank: json.loads(text) for rank, text in raw.items()}
            if any(view["at"] != what for view in views.values()):
                logger.info("ranks in different steps: %s", {rank: view["at"] for rank, view in views.items()})
                raise CallOrderError
            failed = {rank: view["error"] for rank, view in views.items() if view["error"]}
            if failed:
                causes = {rank: error for rank, error in failed.items() if error[0] != RemoteFailure.__name__} or failed
                raise make_error(next(iter(causes.values()))[0], _together(causes))
            return json.dumps(decide({rank: view["view"] for rank, view in views.items()}))

        return json.loads(
            self.agree(what, json.dumps({"at": what, "error": error, "view": view}), judge, patience, last)
        )


class _Guard:
    """See :meth:`Control.guard`."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self.failure: Failure | None = None
        """How the operation failed on all ranks; None if it did not, or has ended well for the others."""

    def __enter__(self) -> _Guard:
        try:
            self._control.watch.__enter__()
        except BaseException as error:  # the others have a watch, and wait for this rank
            self._raise(error)
            raise
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self._raise(error)
        finally:
            self._control.watch.__exit__()

    def _raise(self, error: BaseException) -> None:
        """Tells the others, and raises what they raise if that is not this very error."""
        self.failure = self._control.conclude(error)
        # None: it has ended well on all ranks, this one too but for its return, and the others keep all.
        if self.failure is None or not isinstance(error, Exception):
            return
        raised = self.failure.error()
        if (type(raised), str(raised)) != (type(error), str(error)):
            raise raised from error


def _own_connection(store: Store) -> Store:
    """Since a wait on one connection keeps all other threads from it."""
    clone: Callable[[], Store] = getattr(store, "clone", lambda: store)
    return clone()


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _together(failed: Mapping[int, tuple[str, str]]) -> str:
    said: dict[str, list[int]] = {}
    for rank, (_, text) in failed.items():
        said.setdefault(text, []).append(rank)
    return "\n".join(f"{text} [{_ranks(ranks)}]" for text, ranks in said.items())
