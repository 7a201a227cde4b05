"""The control of a topology's ranks: numbers their loads, runs their agreement rounds, and gives each load one outcome.

It works over the process group's key-value store rather than with collectives: agreement then needs no communicator, works in a
job whose only backend is that of a device, does not show in profiles as data transfer, and still works when a process group has
failed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import Store

from epload.control.failure import Failure, FailureStore, describe
from epload.control.heartbeat import Heartbeats
from epload.control.messages import MessageStore
from epload.control.processes import LocalProcesses
from epload.control.rounds import FAILED, Round, Rounds, decide_on_reports, encode_report
from epload.control.watch import Watch
from epload.errors import LoadError, RankExited, RemoteFailure, WaitTimeout, message_of

DEFAULT_TIMEOUT = timedelta(minutes=30)
_PUBLISH_TIMEOUT = timedelta(seconds=5)
"""How long a rank that was stopped waits for the failure that stopped it."""


class Control:
    """Rounds, failures and watch of the ranks of one topology. Every rank calls the same rounds in the same order.

    One thread of a rank runs its rounds. The watch runs in another thread; :meth:`fail`, :meth:`refuse`, :meth:`abort` and
    :meth:`next_load` are thread-safe.
    """

    def __init__(self, store: Store | None, ranks: tuple[int, ...], rank: int, name: str = "") -> None:
        """
        Args:
            store: prefixed for this control alone, equally on all ranks (see :mod:`epload.cluster.rendezvous`); None for a
                single rank.
            ranks: global ranks; the first is the coordinator.
            rank: this process's.
            name: unique among the controls of a job.

        Raises:
            ValueError: several ranks, but no store.
        """
        if store is None and len(ranks) > 1:
            raise ValueError(f"{len(ranks)} ranks cannot agree without a store; call init_process_group first")
        self.name = name
        self.ranks = ranks
        self.rank = rank
        self.coordinator = ranks[0]
        self.timeout = DEFAULT_TIMEOUT
        self.agreed: set[bytes] = set()
        """Digests of what all ranks have already found to be equal."""
        self.doing = ""
        """This rank's activity, for the logs and errors of ranks that wait for it."""
        self.progress = 0
        """Grows with the data that this rank has moved. Ranks that wait for it do not time out as long as it grows."""
        self.processes = LocalProcesses()
        self.alarm = threading.Event()
        """Set by the watch to wake a rank that waits in a round: a process has ended, or the store is lost."""
        self._default_timeout = self.timeout
        self._load = self._attempt = self._round = 0
        """Number of the load, of failures in it so far, and of rounds since."""
        self._lock = threading.Lock()
        self._last_number = 0
        """Returned last by :meth:`next_load`."""
        self._refused: list[tuple[int, tuple[str, ...]]] = []
        """On the coordinator: loads refused in another thread, with the keys of their outcome."""
        self._failure: Failure | None = None
        """With which the present load has ended."""
        self.store = store
        self._connection: Store | None = None
        """To the same store: the watch, or a thread that publishes a failure, must not wait for a call of a round."""
        self.rounds: Rounds | None = None
        self.messages: MessageStore | None = None
        self.heartbeats: Heartbeats | None = None
        self.failures: FailureStore | None = None
        """Outcome of the present attempt of a load."""
        if store is not None:
            self._connection = _clone(store)
            self.messages = MessageStore(store)
            self.heartbeats = Heartbeats(self._connection, rank)
            self.failures = FailureStore(self._connection, self._prefix)
            self.rounds = Rounds(ranks, rank, self.messages, self.heartbeats, self.processes, self.alarm)
        self.watch = Watch(self)

    @property
    def round(self) -> int:
        """Number of the round that this rank is in, or was in last."""
        return self._round

    @property
    def _prefix(self) -> str:
        return f"{self._load}.{self._attempt}/"

    def next_load(self) -> int:
        """The number of the next load. Every rank takes one for each load, also for one that it refuses. Thread-safe."""
        with self._lock:
            self._last_number += 1
            return self._last_number

    def begin(self, timeout: timedelta | None = None, number: int | None = None) -> None:
        """Begins a load, on all ranks. Whatever the outcome of the last one on each of them, they are in step again.

        Args:
            timeout: until :meth:`end`.
            number: from :meth:`next_load`, which is called here if it is None.
        """
        number = number if number is not None else self.next_load()
        self.timeout = timeout if timeout is not None else self._default_timeout
        self.processes.ended = {}
        self.alarm.clear()
        self.doing, self.progress = "", 0
        if self.messages is not None:
            self.messages.keep_sent()  # of a load that failed
        self._start_attempt(number, 0)
        with self._lock:
            for refused in [refused for refused in self._refused if refused[0] < number]:
                self.delete_later(refused[1])
                self._refused.remove(refused)

    def end(self) -> None:
        """Ends a load, whatever its outcome."""
        self.timeout = self._default_timeout

    def _start_attempt(self, load: int, attempt: int) -> None:
        """Rounds start anew, under other keys, in a new load and after a failure."""
        self._failure = None
        if self.rounds is not None:
            self.rounds.final = None
        if self.failures is not None and self.rank == self.coordinator and (self._round > 0 or self._attempt > 0):
            self.delete_later(self.failures.keys)
        self._load, self._attempt, self._round = load, attempt, 0
        if self._connection is not None:
            self.failures = FailureStore(self._connection, self._prefix)

    def delete_later(self, keys: Iterable[str]) -> None:
        """Deletes keys that this rank has set when all ranks have come to the next round, and nobody needs them."""
        if self.messages is not None:
            self.messages.delete_later(keys)

    def refuse(self, number: int, error: Exception) -> Failure:
        """Publishes that this rank takes no part in load ``number``; returns what all ranks raise. Thread-safe.

        For a thread that finds another in a load. The other ranks stop in the first round, so that groups can be reused.
        """
        failure = Failure.of(error, self.rank, clean=True)
        if self._connection is None:
            return failure
        failures = FailureStore(self._connection, f"{number}.0/")
        if self.rank == self.coordinator:
            with self._lock:
                self._refused.append((number, failures.keys))
        try:
            return failures.publish(failure) or failure
        except RuntimeError:  # the store is lost, which the others notice themselves
            return failure

    def abort(self, error: Exception) -> None:
        """Fails the load that another thread is in, with only the error's text. Thread-safe."""
        if self.failures is None:
            return
        with suppress(RuntimeError):  # the store is lost, which all notice themselves
            self.failures.publish(Failure.of(error, self.rank))

    def guard(self) -> _Guard:
        """A context in which the watch runs, and out of which every rank raises the same error."""
        return _Guard(self)

    def open_registry(self) -> None:
        """While ranks rendezvous: the processes of this machine find one another, and are watched from then on."""
        if self._connection is not None:
            self.processes.register(self._connection, self.rank)

    def close_registry(self) -> None:
        """When all ranks have come."""
        self.delete_later(self.processes.close_registry())

    def known(self) -> Failure | None:
        """The first failure that any rank has published in this load. For the thread that runs the rounds."""
        return self.failures.first() if self.failures is not None else None

    def fail(self, error: BaseException, hard: bool = True) -> Failure | None:
        """Publishes a failure; returns what all ranks raise, or None if the load has succeeded on the others. Thread-safe.

        ``hard``: this rank cannot do its part any more, so that all have to stop at once.
        """
        remote = isinstance(error, RemoteFailure)
        try:
            first = self.failures.first(_PUBLISH_TIMEOUT if remote else None) if self.failures is not None else None
            if first is not None and not hard:
                return first
            others = ""
            if first is None and not remote and self.heartbeats is not None:
                timed_out = isinstance(error, WaitTimeout)
                others = self.heartbeats.describe(self.ranks, self.processes.ended, self.doing, find_silent=timed_out)
            failure = describe(error, self.rank, doing=self.doing, others=others)
            return self.failures.publish(failure, hard) if self.failures is not None else failure
        except RuntimeError as lost:
            text = (
                f"{message_of(error)}\nThe other ranks could not be notified, as the store is lost: {message_of(lost)}"
            )
            return Failure(LoadError.__name__, text, self.rank)

    def conclude(self, error: BaseException) -> Failure | None:
        """Ends the present load with ``error``, unless it has failed already. Returns as :meth:`fail`."""
        if self._failure is not None:
            return self._failure
        failure = self.fail(error)
        with suppress(RuntimeError):
            if self.messages is not None and self.rounds is not None:
                if failure is None and self.rounds.final is not None:
                    self.messages.post(*self.rounds.final)  # interrupted, perhaps before it had posted the decision
                elif failure is not None:  # ends the others' wait in the next round sooner than the outcome would
                    key = "decision" if self.rank == self.coordinator else self.rank
                    self.messages.post(f"{self._prefix}{self._round + 1}/{key}", FAILED)
        if failure is not None:
            self._start_attempt(self._load, self._attempt + 1)
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
        """Runs a round: returns, on every rank, what the coordinator's ``decide`` made of all ranks' views.

        Args:
            what: name of the round, for error messages.
            view: this rank's.
            decide: called with the view of each rank.
            patience: multiplies the timeout, for a round that ranks come to after a timeout of their own.
            last: the load has succeeded when the round has.

        Raises:
            LoadError: a rank did not come within the timeout, published a failure, or ``decide`` raised; with the same text
                on every rank that is alive.
        """
        if self.rounds is None or self.failures is None:
            try:
                return decide({self.rank: view})
            except Exception as refusal:
                self._failure = Failure.of(refusal, self.rank, clean=True)
                raise
        self._round += 1
        self.doing = what
        limit = patience * self.timeout
        round_ = Round(what, self._round, f"{self._prefix}{self._round}/", limit, self.failures, last)
        error: LoadError | None = None
        try:
            try:
                return self.rounds.run(round_, view, decide)
            except (WaitTimeout, RankExited) as own:
                error = own
            except RemoteFailure:
                pass
            raise self._shared_error(error)
        except DistNetworkError as lost:
            raise LoadError(f"{what}: the store is lost: {message_of(lost)} (seen by rank {self.rank})") from lost

    def _shared_error(self, error: LoadError | None) -> Exception:
        """What all ranks raise, after publishing ``error`` if it is not None; later rounds start anew."""
        failure = self.fail(error) if error is not None else None
        if failure is None and self.failures is not None:
            failure = self.failures.first(_PUBLISH_TIMEOUT)
        if failure is None:
            failure = Failure(LoadError.__name__, "another rank failed and ended before it could say why", self.rank)
        shared = failure.error()
        self._start_attempt(self._load, self._attempt + 1)
        self._failure = failure
        return shared

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
        with the ranks that reported it. Other arguments are those of :meth:`agree`.
        """
        report = encode_report(what, failure, view)
        return json.loads(
            self.agree(what, report, lambda reports: decide_on_reports(what, reports, decide), patience, last)
        )

    def exchange(self, what: str, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """A round in which every rank may send bytes to any other; returns what was sent to this rank, by sender.

        Args:
            what: name of the round.
            messages: by receiver; every rank sends to the same receivers. They stay in the store until
                :meth:`delete_messages`, which a rank calls once all have read theirs.
        """
        if self.messages is None:
            return dict(messages)
        prefix = f"{self._prefix}message/{what}"
        for receiver, message in messages.items():
            self.messages.send(f"{prefix}/{self.rank}/{receiver}", message)
        self.settle(what, None)
        if self.rank not in messages:
            return {}
        return {sender: self.messages.receive(f"{prefix}/{sender}/{self.rank}") for sender in self.ranks}

    def delete_messages(self) -> None:
        """Deletes what this rank has sent in :meth:`exchange`."""
        if self.messages is not None:
            self.messages.delete_sent()


class _Guard:
    """See :meth:`Control.guard`."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self.failure: Failure | None = None
        """With which the operation has failed on all ranks; None if it has not, or has succeeded on the others."""

    def __enter__(self) -> _Guard:
        try:
            self._control.watch.__enter__()
        except BaseException as error:  # the other ranks wait for this one
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
        """Publishes the error, and raises what the other ranks raise if that is another one."""
        self.failure = self._control.conclude(error)
        # None: the load has succeeded on all ranks, and this one was interrupted while it returned.
        if self.failure is None or not isinstance(error, Exception):
            return
        shared = self.failure.error()
        if (type(shared), str(shared)) != (type(error), str(error)):
            raise shared from error


def _clone(store: Store) -> Store:
    """Another connection to the store, as a call on one blocks all threads that use it."""
    clone: Callable[[], Store] = getattr(store, "clone", lambda: store)
    return clone()
