"""The control of a topology's ranks: numbers their loads, runs their agreement rounds, and gives each load one outcome.

It works over the process group's key-value store rather than with collectives: agreement then needs no communicator, works in a
job whose only backend is that of a device, does not show in profiles as data transfer, and still works when a process group has
failed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import Store

from epload.errors import LoadError, RankExited, RemoteFailure, WaitTimeout, message_of
from epload.ranks.failure import Alert, Alerts, Failure, Outcomes, describe
from epload.ranks.heartbeat import Position
from epload.ranks.node_connection import NodeConnection
from epload.ranks.processes import LocalProcesses
from epload.ranks.rounds import Round, Rounds, decide_on_reports, encode_report
from epload.ranks.watch import FAILED, Guard, Watch

DEFAULT_TIMEOUT = timedelta(minutes=30)
_PUBLISH_SECONDS, _POLL_SECONDS = 5.0, 0.05
"""Maximum seconds that a stopped rank waits for the failure that stopped it, and seconds between two checks for it."""
_LOOK_SECONDS = 0.1
"""Between two questions to the store whether a rank has failed, from a thread that moves data."""


class Control:
    """Rounds, failures and watch of the ranks of one topology. Every rank calls the same rounds in the same order.

    One thread of a rank runs its rounds. The watch runs in another thread; :meth:`fail`, :meth:`refuse`, :meth:`abort` and
    :meth:`next_load` are thread-safe.
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
        self.name = name
        self.ranks = ranks
        self.rank = rank
        self.coordinator = ranks[0]
        self.timeout = self._default_timeout = DEFAULT_TIMEOUT
        self.agreed: set[bytes] = set()
        """Digests of what all ranks have already found to be equal."""
        self.doing = ""
        """This rank's activity, for the logs and errors of ranks that wait for it."""
        self.progress = 0
        """Grows with the data that this rank has moved. Ranks that wait for it do not time out as long as it grows."""
        self.processes = LocalProcesses()
        self._load = self._attempt = 0
        """Number of the load, and of failures in it so far."""
        self._step = 1
        """Number of the round that this rank is in, or comes to next, in the attempt."""
        self._begun = 0
        """Number of rounds that this rank has begun in the attempt."""
        self._succeeded = False
        """True if this rank has come through the last round of the load."""
        self._lock = threading.Lock()
        self._last_number = 0
        """Returned last by :meth:`next_load`."""
        self._refused: list[tuple[int, tuple[str, ...]]] = []
        """Loads that this rank has refused in another thread, with the keys of their outcome."""
        self._alerts = Alerts()
        self._looking = threading.Lock()
        """Held by a thread that looks for a failure, and until then by a rank that goes on to another round."""
        self._looked = 0.0
        """Value of ``time.monotonic()`` when :meth:`known` last asked the store."""
        self._failure: Failure | None = None
        """The failure with which the present load has ended; None if there is none."""
        self.store = store
        self.place: NodeConnection | None = None
        """None without a store."""
        self.rounds: Rounds | None = None
        if store is not None:
            self.place = NodeConnection(store, ranks, rank)
            self.rounds = Rounds(self.place, self.processes, self._failed)
        self.watch = Watch(self)

    def join_nodes(self, nodes: Iterable[Iterable[int]], token: str) -> None:
        """Connects the ranks of each node, once all ranks know the nodes. See :meth:`NodeConnection.join_nodes`."""
        if self.place is not None:
            with self.watch:
                self.place.join_nodes(nodes, token, self.timeout, self.processes)
            self.rounds = Rounds(self.place, self.processes, self._failed)

    @property
    def position(self) -> Position:
        return self._load, self._attempt, self._begun

    def waits_since(self) -> float:
        """Returns the value of ``time.monotonic()`` when this rank began to wait in a round; 0 if it does not wait."""
        return self.rounds.waits_since if self.rounds is not None else 0.0

    def _failed(self) -> bool:
        return self._prefix in self._alerts

    def must_stop(self) -> bool:
        """Returns True if a rank is known to have published a hard failure of the present attempt."""
        return self._alerts.hard(self._prefix)

    @property
    def _prefix(self) -> str:
        return f"{self._load}.{self._attempt}/"

    @property
    def _outcomes(self) -> Outcomes:
        """The outcomes of the present attempt of the load."""
        return self._outcomes_of(self._prefix)

    def _outcomes_of(self, prefix: str) -> Outcomes:
        assert self.place is not None
        return Outcomes(self.place.free_connection, prefix)

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
        self.doing, self.progress = "", 0
        if self.place is not None:
            self.place.begin_load(number)
        self._start_attempt(number, 0)
        if self.rounds is not None:
            self.rounds.forget(number)
        self._alerts.forget(number)
        with self._lock:
            for refused in [refused for refused in self._refused if refused[0] < number]:
                self.delete_later(refused[1])
                self._refused.remove(refused)

    def end(self) -> None:
        """Ends a load, whatever its outcome."""
        self.timeout = self._default_timeout

    def _start_attempt(self, load: int, attempt: int) -> None:
        """Rounds start anew, under other keys, in a new load and after a failure."""
        if self.place is not None and self.rank == self.coordinator and self._prefix in self._alerts:
            self.delete_later(self._outcomes.failure_keys(self._step))
        with self._looking:  # another thread must not publish under the key of one attempt and the step of another
            self._failure, self._succeeded = None, False
            self._load, self._attempt, self._step, self._begun = load, attempt, 1, 0

    def delete_later(self, keys: Iterable[str]) -> None:
        """Deletes keys that this rank has set when all ranks have come to the next round, and nobody needs them."""
        if self.place is not None:
            self.place.messages.delete_later(keys)

    def refuse(self, number: int, error: Exception) -> Failure:
        """Publishes that this rank takes no part in load ``number``; returns what all ranks raise. Thread-safe.

        For a thread that finds another in a load. The other ranks stop in the first round, so that groups can be reused.
        """
        failure = Failure.of(error, self.rank, clean=True)
        if self.store is None:
            return failure
        prefix = f"{number}.0/"
        try:
            outcomes = self._outcomes_of(prefix)
            with self._lock:
                self._refused.append((number, outcomes.failure_keys(1)))
            first = outcomes.publish(1, failure) or failure
        except RuntimeError:  # the store is lost, which the others notice themselves
            return failure
        self.spread(Alert(prefix, True, first))
        return first

    def abort(self, error: Exception) -> None:
        """Fails the load that another thread is in, with only the error's text. Thread-safe."""
        if self.store is not None:
            with suppress(RuntimeError):  # the store is lost, which all notice themselves
                self._publish(Failure.of(error, self.rank), True)

    def guard(self) -> Guard:
        """A context in which the watch runs, and out of which every rank raises the same error."""
        return Guard(self)

    def open_registry(self) -> None:
        """While ranks rendezvous: the processes of this machine find one another, and are watched from then on."""
        if self.place is not None:
            self.processes.register(self.place.free_connection(), self.rank)

    def close_registry(self) -> None:
        """Closes the registry of this machine's processes, once all ranks have come."""
        self.delete_later(self.processes.close_registry())

    # ---- failures ----

    def known(self) -> Failure | None:
        """The first failure that any rank has published in this load. Asks the store every tenth of a second at most."""
        store, told = self.store, self._alerts.failure(self._prefix)
        soon = time.monotonic() - self._looked < _LOOK_SECONDS and self._prefix not in self._alerts
        if told is not None or store is None or soon:
            return told
        self._looked = time.monotonic()
        return found[0] if (found := self._look(lambda: store)) is not None else None

    def _look(self, connection: Callable[[], Store]) -> tuple[Failure, bool] | None:
        """See :meth:`Outcomes.first`. Thread-safe: this rank does not come to another round meanwhile."""
        with self._looking:
            prefix = self._prefix
            found = Outcomes(connection, prefix).first(self._step)
        if found is not None:
            self.spread(Alert(prefix, found[1], found[0]))
        return found

    def find_failure(self) -> None:
        """Looks for a failure in the store, for the watch of a leader, unless the round receives one anyway."""
        prefix = self._prefix
        if self.place is None or (self.rounds is not None and self.rounds.waits_for_outcome):
            return
        if prefix not in self._alerts:
            self._look(self.place.free_connection)
        elif not self._alerts.hard(prefix) and self._outcomes.stopped():
            self.spread(Alert(prefix, True))

    def spread(self, alert: Alert, sender: int = -1) -> None:
        """An attempt has failed, as ``sender`` of this node says if given: wakes this rank, tells its node. Thread-safe."""
        if self.place is None or (news := self._alerts.add(alert)) is None:
            return
        for rank, link in self.place.links.watch.items():
            if rank != sender:
                link.notify(FAILED, news.encode())
        self.place.alarm.set()
        if alert.hard and alert.prefix == self._prefix:
            self.watch.stop()

    def _publish(self, failure: Failure, hard: bool) -> Failure | None:
        """Publishes a failure of the present attempt; returns as :meth:`fail`."""
        with self._looking:
            if self._succeeded:
                return None
            prefix = self._prefix
            first = self._outcomes.publish(self._step, failure, hard)
        if first is not None:
            self.spread(Alert(prefix, hard, first))
        return first

    def fail(self, error: BaseException, hard: bool = True) -> Failure | None:
        """Publishes a failure; returns what all ranks raise, or None if the load has succeeded on the others. Thread-safe.

        ``hard``: this rank cannot do its part any more, so that all have to stop at once.
        """
        remote = isinstance(error, RemoteFailure)
        try:
            first = self._first(_PUBLISH_SECONDS if remote else 0.0)
            if first is not None and (not hard or self.must_stop()):
                return first
            others = ""
            if first is None and not remote and self.place is not None:
                timed_out, ended = isinstance(error, WaitTimeout), self.processes.ended
                others = self.place.heartbeats.describe(self.ranks, ended, self.doing, find_silent=timed_out)
            failure = describe(error, self.rank, doing=self.doing, others=others)
            return self._publish(failure, hard) if self.store is not None else failure
        except RuntimeError as lost:
            why = f"The other ranks could not be notified, as the store is lost: {message_of(lost)}"
            return Failure(LoadError.__name__, f"{message_of(error)}\n{why}", self.rank)

    def _first(self, seconds: float) -> Failure | None:
        until = time.monotonic() + seconds
        while self.place is not None and not self._succeeded:
            if (told := self._alerts.failure(self._prefix)) is not None:
                return told
            if (found := self._look(self.place.free_connection)) is not None:
                return found[0]
            if time.monotonic() >= until:
                break
            time.sleep(_POLL_SECONDS)  # the store's own wait would block the watch
        return None

    def conclude(self, error: BaseException) -> Failure | None:
        """Ends the present load with ``error``, unless it has failed already. Returns as :meth:`fail`."""
        if self._failure is not None:
            return self._failure
        failure = self.fail(error)
        if failure is not None:
            self._start_attempt(self._load, self._attempt + 1)
            self._failure = failure
        elif self.rounds is not None and not self._succeeded:
            self._succeeded = True
            with suppress(RuntimeError):  # interrupted, perhaps before it had passed the decision on
                round_ = Round("", self.position, self.timeout, self._outcomes, last=True)
                self.rounds.deliver(round_, self._outcomes.read(round_.step))
        return failure

    # ---- rounds ----

    def agree(
        self, what: str, view: str, decide: Callable[[Mapping[int, str]], str], patience: float = 1.0, last: bool = False,
    ) -> str:  # fmt: skip
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
        if self.rounds is None:
            try:
                return decide({self.rank: view})
            except Exception as refusal:
                self._failure = Failure.of(refusal, self.rank, clean=True)
                raise
        with self.watch:
            with self._looking:  # what another thread looks at here is deleted once all ranks have come to this round
                self._begun = self._step
            self.doing = what
            round_ = Round(what, self.position, patience * self.timeout, self._outcomes, last)
            try:
                try:
                    decision = self.rounds.run(round_, view, decide)
                    with self._looking:
                        self._succeeded, self._step = last, self._step + 1
                    return decision
                except (WaitTimeout, RankExited, RemoteFailure) as raised:
                    error = raised
                raise self._shared_error(error)
            except DistNetworkError as lost:
                raise LoadError(f"{what}: the store is lost: {message_of(lost)} (seen by rank {self.rank})") from lost

    def _shared_error(self, error: LoadError) -> Exception:
        """Returns what all ranks raise, after publishing ``error`` if it is this rank's; later rounds belong to a new attempt."""
        failure = self.fail(error) if not isinstance(error, RemoteFailure) else None
        if failure is None:
            failure = self._first(_PUBLISH_SECONDS)
        if failure is None:
            failure = Failure(LoadError.__name__, "another rank failed and ended before it could say why", self.rank)
        self.spread(Alert(self._prefix, not failure.clean))
        shared = failure.error()
        self._start_attempt(self._load, self._attempt + 1)
        self._failure = failure
        return shared

    def settle(
        self, what: str, failure: BaseException | None, view: Any = None,
        decide: Callable[[dict[int, Any]], Any] = lambda views: None, patience: float = 1.0, last: bool = False,
    ) -> Any:  # fmt: skip
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
            messages: by receiver; every rank sends to the same receivers. They stay in the store until
                :meth:`delete_messages`, which a rank calls once all have read theirs.
        """
        if self.place is None:
            return dict(messages)
        prefix = f"{self._prefix}message/{what}"
        self.place.messages.send(prefix, self.rank, messages)
        self.settle(what, None)
        return self.place.messages.receive(prefix, self.rank, self.ranks if self.rank in messages else ())

    def delete_messages(self) -> None:
        """Deletes what this rank has sent in :meth:`exchange`."""
        if self.place is not None:
            self.place.messages.delete_sent()
