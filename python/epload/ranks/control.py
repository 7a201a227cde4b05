"""The control of a topology's ranks: numbers their loads, runs their agreement rounds, and gives each load one outcome.

It works over the process group's key-value store rather than with collectives: agreement then needs no communicator, works in a
job whose only backend is that of a device, does not show in profiles as data transfer, and still works when a process group has
failed.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Any

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import Store

from epload.core.log import logger
from epload.errors import LoadError, RankExited, RemoteFailure, WaitTimeout, message_of
from epload.ranks.connection import DEFAULT_TIMEOUT, outcome_keys
from epload.ranks.failure import Failure, describe
from epload.ranks.messages import decode, put, read_if_set
from epload.ranks.rounds import Rounds, Views, encode_report, reduce_reports
from epload.ranks.watch import Watch

_PUBLISH_SECONDS, _POLL_SECONDS = 5.0, 0.05
"""Maximum seconds that a stopped rank waits for the failure that stopped it, and seconds between two checks for it."""
_RESUMED = "resumed"
"""Key of the number of the load that ranks have begun after one for which they had waited for a rank in vain."""
_RESUMED_SECONDS = 10.0
"""Seconds that such a rank then waits for the others to begin another load."""
_GIVE_UP_SECONDS = 1.0
"""Less than ranks wait for another one before they give a call up, whatever their timeout."""
_EXIT_SECONDS = 0.1
"""Seconds from when a process's connections end until it has ended itself."""
DESTROYED = (
    "the process group with which this topology was made has been destroyed; make a new topology, and new loaders, senders and "
    "receivers"
)
_LOOK_SECONDS = 0.1
"""Minimum seconds between two questions to the store whether a rank has failed, from a thread that moves data."""


class Control(Rounds):
    """Rounds, failures and watch of the ranks of one topology. Every rank calls the same rounds in the same order.

    One thread of a rank runs its rounds. The watch runs in another thread; :meth:`fail`, :meth:`refuse`, :meth:`abort`,
    :meth:`activity` and :meth:`next_load` are thread-safe.
    """

    def __init__(self, store: Store | None, ranks: tuple[int, ...], rank: int, name: str = "") -> None:
        """
        Args:
            store: prefixed for this control alone, equally on all ranks (see :mod:`epload.ranks.rendezvous`); None for a
                single rank.
            ranks: global ranks; the first is the coordinator.
            rank: this process's.
            name: unique among the controls of a job.

        Raises:
            ValueError: several ranks, but no store.
        """
        if store is None and len(ranks) > 1:
            raise ValueError(f"{len(ranks)} ranks cannot agree without a store; call init_process_group first")
        super().__init__(store, ranks, rank)
        self.name = name
        self.agreed: set[str] = set()
        """Digests of what all ranks have already found to be equal."""
        self.failure: Failure | None = None
        """The failure with which the present load has ended on all ranks; None if there is none."""
        self.succeeded = False
        """True if this rank has come through the last round of the load."""
        self._numbers = count(1)
        self._process = os.getpid()
        self.rejoined = 0
        """Number of calls in which ranks came together again after one had missed a call. What they made together before that is
        no longer the same on all."""
        self.ended = time.monotonic()
        """Value of ``time.monotonic()`` when the last load ended."""
        self._looked = 0.0
        """Value of ``time.monotonic()`` when :meth:`published_failure` last asked the store."""
        self._activities: dict[str, str] = {}
        """Activity of each thread of this load, by the name of the thread."""
        self.watch = Watch(self, self.fail)

    def next_load(self) -> int:
        """Returns the number of the next load. Every rank takes one for each load, also for one that it refuses. Thread-safe.

        Raises LoadError in a child that the rank's process has forked: both would take the same number.
        """
        if self.store is not None and os.getpid() != self._process:
            raise LoadError(
                f"process {os.getpid()} was forked from rank {self.rank}, whose part it cannot take: call epload in process "
                f"{self._process}, or call init_process_group() and make a topology in a process started by spawn"
            )
        return next(self._numbers)

    def begin(self, timeout: timedelta | None = None, number: int | None = None) -> None:
        """Begins a load, on all ranks. Whatever the outcome of the last one on each of them, they are in step again, also if one
        of them did not come to it.

        Args:
            timeout: until :meth:`end`.
            number: from :meth:`next_load`, which is called here if it is None.
        """
        number = number if number is not None else self.next_load()
        self.timeout = timeout if timeout is not None else DEFAULT_TIMEOUT
        self.doing, self.progress, self._activities = "", 0, {}
        absent = self.failure.absent if self.failure is not None else ()
        self.rejoined += bool(absent)
        if self.store is not None:
            with suppress(RuntimeError):  # the store is lost, which the first round says
                if time.monotonic() - self.ended > min(self.timeout.total_seconds() / 2, _GIVE_UP_SECONDS):
                    number = self._catch_up(number)
                if absent and self.rank not in absent:
                    self.store.set(_RESUMED, str(number))
        self._start_attempt(number, 0)
        self.clear_before(number)

    def end(self) -> None:
        """Ends a load, whatever its outcome."""
        self.timeout = DEFAULT_TIMEOUT
        self.ended = time.monotonic()

    @contextmanager
    def load(self, timeout: timedelta) -> Iterator[None]:
        """A context that is one load, as :meth:`begin`, :meth:`guard` and :meth:`end`."""
        self.begin(timeout)
        try:
            with self.guard():
                yield
        finally:
            self.end()

    def _catch_up(self, number: int) -> int:
        """Returns the number of the load that the others are in if they have waited for this rank in vain in load ``number``: it
        takes part in their present one if that begins soon. Else it is only late, and raises what they have raised."""
        store = self.store  # a connection for each rank would be many
        assert store is not None
        first, until = number, time.monotonic() + _RESUMED_SECONDS
        self._start_attempt(number, 0)
        while (failure := self.look(store)) is not None and self.rank in failure.absent:
            if (resumed := int(read_if_set(store, _RESUMED) or 0)) > number:
                number = resumed
                self._start_attempt(number, 0)  # which may have failed in the same way
            elif time.monotonic() > until:
                break
            else:
                time.sleep(_POLL_SECONDS)
        if number > first:
            self._numbers = count(number + 1)
            self.rejoined += 1
            logger.warning("rank %d has missed %d of the other ranks' calls, and joins them again", self.rank, number - first)
        return number

    def _start_attempt(self, load: int, attempt: int) -> None:
        """Rounds start anew, under other keys, in a new load and after a failure."""
        if self.rank == self.coordinator and self.known_failure() is not None:
            self.delete_later(outcome_keys(self.prefix))
        self.failure, self.succeeded = None, False
        self.at = load, attempt, 1

    # ---- activity ----

    @contextmanager
    def activity(self, what: str) -> Iterator[None]:
        """A context in which the calling thread does something; ``doing`` is what all threads do. Thread-safe."""
        thread = threading.current_thread().name
        with self._lock:
            before = self._activities.get(thread, "")
            self._activities[thread] = what
            self.doing = ", ".join(filter(None, self._activities.values()))
        yield  # an error leaves what the thread was doing in place, for its own text
        with self._lock:
            self._activities[thread] = before

    @contextmanager
    def working(self, what: str) -> Iterator[Callable[[int], None]]:
        """A context for work between two rounds, whose function is called as bytes are done: they count as progress, and it
        raises RemoteFailure if another rank has failed."""
        stop = threading.Event()
        self.doing = what

        def done(nbytes: int) -> None:
            self.progress += nbytes + 1
            if stop.is_set():
                raise RemoteFailure("another rank failed")

        with self.stopping(stop.set):
            yield done

    # ---- failures ----

    def refuse(self, number: int, error: Exception) -> Failure:
        """Publishes that this rank takes no part in load ``number``; returns what all ranks raise. Thread-safe.

        For a thread that finds another in a load. The other ranks stop in the first round, so that groups can be reused.
        """
        failure = Failure.of(error, self.rank, clean=True)
        with suppress(RuntimeError):  # the store is lost, which the others notice themselves
            return self.publish(f"{number}.0/", failure) or failure
        return failure

    def abort(self, error: Exception, alone: bool = False) -> None:
        """Fails the load that another thread is in, with only the error's text; ``alone``: also one of a single rank without a
        store. Thread-safe."""
        if alone and self.store is None:
            self.notice(self.prefix, Failure.of(error, self.rank))
        with suppress(Exception):  # the store is lost, which all notice themselves, or was let go of
            self.publish(self.prefix, Failure.of(error, self.rank))

    def published_failure(self) -> Failure | None:
        """Returns the first failure that any rank has published in this load. Asks the store every tenth of a second at most."""
        failure = self.known_failure()
        if failure is not None or self.store is None or time.monotonic() - self._looked < _LOOK_SECONDS:
            return failure
        self._looked = time.monotonic()
        return self.look(self.store)  # a connection for each rank that reads would be many

    def fail(self, error: BaseException, hard: bool = True) -> Failure | None:
        """Publishes a failure; returns what all ranks raise, or None if the load has succeeded on the others. Thread-safe.

        ``hard``: this rank cannot do its part any more, so that all have to stop at once.
        """
        remote, prefix = isinstance(error, RemoteFailure), self.prefix
        try:
            first = self._wait_for_failure(_PUBLISH_SECONDS if remote else 0.0)
            if first is not None and (first.hard or not hard):
                return first
            if remote and first is None and (ended := self.processes.ended):  # which nobody says if none is left that waits
                error, remote = RankExited(*min(ended.items())), False
            others = ""
            if first is None and not remote and self.store is not None:
                timed_out, ended = isinstance(error, WaitTimeout), self.processes.ended
                others = self.heartbeats.describe(self.ranks, ended, self.doing, timed_out)
            return self.publish(prefix, describe(error, self.rank, hard, doing=self.doing, others=others))
        except (RuntimeError, OSError) as lost:
            text = f"{text}\n" if (text := self._describe_ended()) else ""
            why = f"{text}The other ranks could not be notified, as the store is lost: {message_of(lost)}"
            failure = Failure(LoadError.__name__, f"{message_of(error)}\n{why}", self.rank)
            self.notice(prefix, failure)  # those of this node can be
            return failure

    def _describe_ended(self) -> str:
        """Says which rank of this machine has ended, perhaps with the store that it served just now; empty if none has."""
        time.sleep(_EXIT_SECONDS)
        self.processes.look(at_once=True)
        ended = self.processes.ended
        return str(RankExited(*min(ended.items()))) if ended else ""

    def _wait_for_failure(self, seconds: float) -> Failure | None:
        """Returns the failure of the present attempt. Waits for one for some seconds at most, and only until a rank has ended."""
        until = time.monotonic() + seconds
        while self.store is not None and not self.succeeded:
            failure = self.known_failure() or self.look()
            if failure is not None or self.processes.ended or time.monotonic() >= until:
                return failure
            time.sleep(_POLL_SECONDS)
        return None

    def _finish(self, error: BaseException, hard: bool = True) -> Failure | None:
        """Ends the present attempt with ``error``: later rounds belong to another one. Returns as :meth:`fail`."""
        failure = self.fail(error, hard)
        if failure is not None:
            self._start_attempt(self.at[0], self.at[1] + 1)
            self.failure = failure
        elif self.store is not None and not self.succeeded:
            self.succeeded = True
            with suppress(RuntimeError):  # interrupted in the last round, perhaps before it had passed the decision on
                if (decision := self._read()) is not None:
                    self._pass_on(decision)
        return failure

    @contextmanager
    def guard(self) -> Iterator[None]:
        """A context in which the watch runs, and out of which every rank raises the same error."""
        with ExitStack() as stack:
            try:
                stack.enter_context(self.watch)  # may fail while the other ranks wait for this one
                yield
            except BaseException as error:
                failure = self.failure or self._finish(error)
                # None: the load has succeeded on all ranks, and this one was interrupted while it returned.
                if failure is not None and isinstance(error, Exception):
                    shared = failure.error()
                    try:
                        if type(shared) is not type(error) or str(shared) != str(error):
                            # From a StopIteration, contextlib would take it for Python's own conversion of that.
                            raise shared from None if isinstance(error, StopIteration) else error
                    finally:
                        del shared  # whose traceback has this frame
                raise

    # ---- rounds ----

    def _is_alone(self) -> bool:
        """Returns True for a control of one rank without a store. Raises LoadError if it has let go of its store."""
        if self.store is None and len(self.ranks) > 1:
            raise LoadError(DESTROYED)
        return self.store is None

    def agree(
        self, what: str, failure: BaseException | None, view: Any = None,
        reduce: Callable[[dict[int, Any]], Any] = lambda views: None, patience: float = 1.0, last: bool = False,
    ) -> Any:  # fmt: skip
        """Runs a round: returns, on every rank, what the coordinator's ``reduce`` made of all ranks' views. Any rank may report
        that it failed: then every rank raises that error.

        Args:
            what: name of the round, for error messages.
            failure: this rank's. When several ranks failed, the text has each distinct message with the ranks that reported it.
            view: this rank's, a JSON value.
            reduce: called with the view of each rank; returns a JSON value.
            patience: multiplies the timeout, for a round that ranks come to after a timeout of their own.
            last: the load has succeeded when the round has.

        Raises:
            LoadError: a rank did not come within the timeout, published a failure, or ``reduce`` raised; with the same text
                on every rank that is alive.
        """
        report = encode_report(what, failure, view)
        # Its frames would keep the model until a garbage collection.
        while failure is not None and failure.__traceback__ is not None:
            failure.__traceback__ = None
            failure = failure.__cause__ or failure.__context__

        def reduce_all(views: Views) -> str:
            return reduce_reports(what, views, reduce)

        if self._is_alone():
            try:
                return json.loads(reduce_all({report: [self.rank]}))
            except Exception as refusal:
                self.failure = Failure.of(refusal, self.rank, clean=True)
                raise
        with self.watch:
            self.doing = what
            try:
                decision = self.run_round(what, patience * self.timeout.total_seconds(), last, report, reduce_all)
            except (WaitTimeout, RankExited, RemoteFailure) as error:
                published = self._finish(error, hard=not isinstance(error, RemoteFailure))
                # Without a failure, the round was the last one, and has been decided meanwhile.
                decision = (self._read() if published is None else None) or ""
                if not decision:
                    raise (published or Failure.of(error, self.rank)).error() from None
            except DistNetworkError as lost:
                why = f"; {text}" if (text := self._describe_ended()) else ""
                raise LoadError(f"{what}: the store is lost: {message_of(lost)} (seen by rank {self.rank}){why}") from lost
            load, attempt, step = self.at
            self.succeeded, self.at = last, (load, attempt, step + 1)
            return json.loads(decision)

    def exchange(self, what: str, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """A round in which every rank may send bytes to any other; returns what was sent to this rank, by sender.

        ``messages``: by receiver; every rank sends to the same receivers.
        """
        if self._is_alone():
            return dict(messages)
        store = self.store
        assert store is not None
        prefix, sent = f"{self.prefix}message/{what}", list[str]()
        for receiver, message in messages.items():
            sent += put(store, f"{prefix}/{self.rank}/{receiver}", message)
        try:
            self.agree(what, None)
        finally:
            self.delete_later(sent)
        keys = {sender: f"{prefix}/{sender}/{self.rank}" for sender in self.ranks if self.rank in messages}
        return {sender: decode(store, key, store.get(key)) for sender, key in keys.items()}
