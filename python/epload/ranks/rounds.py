"""Agreement rounds: every rank hands a view to the leader of its node, each leader its node's views up a tree, and the root, the
coordinator, makes a decision of all views, for which all leaders look in one key.

Ranks of a node use their links. Leaders poll the store, as a wait inside it can neither be interrupted nor watched: they poll
less often the longer they have waited, and the more nodes there are.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from time import monotonic
from typing import Any, TypeVar

from epload.core.log import logger
from epload.errors import (
    RankExited,
    RemoteFailure,
    WaitTimeout,
    call_order_error,
    is_known,
    kind_of,
    make_error,
    message_of,
)
from epload.ranks.connection import NodeConnection, outcome_keys
from epload.ranks.failure import FAILURE, Failure, stack_of
from epload.ranks.membership import group_equal
from epload.ranks.messages import decode, encode, put, read_if_set

_MIN_POLL, _MAX_POLL, _MIN_POLL_PER_NODE = 0.002, 0.25, 1e-5
"""Minimum and maximum seconds between two looks at the store, and the minimum with very many nodes, for each of them."""
OUTCOME_SECONDS = 2 * _MAX_POLL
"""Seconds after the last round within which all ranks have read its decision in the store."""
FAILURE_SECONDS = 2.0
"""Seconds within which all have read a failure there, also while they move data."""
_MIN_SHARE, _MAX_SHARE, _SHARE_PER_NODE = 1 / 8, 1.0, 1 / 64
"""The time to the next look as a share of the time that a rank has waited: minimum, maximum, and growth with each node."""
_WARN_SECONDS, _WARN_AGAIN = 10.0, 60.0
"""Seconds that a rank waits in a round until it logs for which ranks, and until it does so again."""
_SAMPLES, _MAX_SAMPLE = 8, 10.0
"""Number of times within its limit that a rank looks at the heartbeats of those it waits for, and maximum seconds between two."""
_SAME_CALL, _MAX_WARNING = "to make the same call", 1000
_ADVICE = (
    ". Every rank of the topology has to make each call of epload, in the same order. One that does not may be in another "
    "call or collective, stopped, or not started yet."
)
T = TypeVar("T")
Views = Mapping[str, list[int]]
"""Each distinct view of a round, with the ranks that have it."""
Reduce = Callable[[Views], str]


class Rounds(NodeConnection):
    """Runs one rank's part of rounds, one after the other."""

    def run_round(self, what: str, limit: float, last: bool, view: str, reduce: Reduce) -> str:
        """Returns the coordinator's decision, on every rank.

        Args:
            what: name of the round in error messages.
            limit: maximum seconds without progress that a rank is waited for.
            last: True if the load has succeeded when the round has.

        Raises:
            WaitTimeout: a rank did not come within the limit.
            RankExited: the process of a rank on this machine has ended.
            RemoteFailure: a failure was published, also one of ``reduce`` itself.
        """
        events = self.events
        self._what, self._limit = what, limit
        self._number = "{}.{}/{}".format(*self.at)
        self._key = outcome_keys(self.prefix)[0] if last else self._number
        """Key of the decision; that of the last round is the outcome of the load."""
        self.waits_since = monotonic()
        try:
            with events.round(what, self._number) if events is not None else nullcontext():
                views = self._gather(view) if self.tree.leads else {}
                if self.rank == self.coordinator:
                    decision = self._reduce(views, reduce, last)
                else:
                    self._hand_on(view, views)
                    above = self.coordinator if self.tree.leads else self.tree.leader
                    decision = self._wait(self._decided, lambda: [above])
                    self.release()  # deleted in the next round: after the last one the store may no longer exist
                self._pass_on(decision)
                return decision
        finally:
            self.waits_since, self.doing = 0.0, what
            self.received.pop(self._number, None)

    def _received(self) -> dict[int, bytes]:
        """Returns what other ranks of the node have sent in this round."""
        return self.received.get(self._number, {})

    def _decided(self) -> str | None:
        """Returns the decision if there is one."""
        leader = self.tree.leader
        if leader in self._received():
            return self._received()[leader].decode()
        # A leader that has ended may not have passed the decision on.
        return self._read() if self.tree.leads or leader in self.processes.ended else None

    def _read(self) -> str | None:
        """Returns the decision in the store if there is one. Raises RemoteFailure if the coordinator has refused to make it."""
        store = self.connection()
        if (value := read_if_set(store, self._key)) is None:
            return None
        self._raise_if_failed(value)
        return decode(store, self._key, value).decode()

    def _raise_if_failed(self, value: bytes) -> None:
        if value.startswith(FAILURE):
            self.look()
            raise RemoteFailure("another rank failed")

    def _pass_on(self, decision: str) -> None:
        """Passes a decision on to the other ranks of the node, if this rank leads it."""
        for rank in self.tree.members:
            self.send(rank, self._number, decision.encode(errors="backslashreplace"))

    def _gather(self, view: str) -> Views:
        """Returns the views of the node that this rank leads, and of all nodes below it."""
        tree, store = self.tree, self.connection()
        keys = [f"view/{self._number}/{leader}" for leader in tree.children]

        def missing() -> list[int]:
            absent = [rank for rank in tree.members if rank not in self._received()]
            return absent + [rank for rank, key in zip(tree.children, keys, strict=True) if not store.check([key])]

        def gathered() -> list[bytes] | None:
            if len(self._received()) < len(tree.members) or (keys and not store.check(keys)):
                return None
            return store.multi_get(keys) if keys else []

        values = self._wait(gathered, missing) if tree.members or keys else []
        views: dict[str, list[int]] = defaultdict(list)
        views[view].append(tree.rank)
        for rank, data in self._received().items():
            views[data.decode()].append(rank)
        for key, value in zip(keys, values, strict=True):
            for text, ranks in json.loads(decode(store, key, value)).items():
                views[text] += ranks
        return views

    def _hand_on(self, view: str, views: Views) -> None:
        """Hands this rank's view to the leader of its node, or a leader those of its node to the leader above."""
        assert self.store is not None
        if self.tree.leads:
            self.delete_later(put(self.store, f"view/{self._number}/{self.rank}", json.dumps(views).encode()))
        else:
            self.send(self.tree.leader, self._number, view.encode(errors="backslashreplace"))
        self.delete_released()

    def _reduce(self, views: Views, reduce: Reduce, last: bool) -> str:
        """Takes the part of the coordinator: makes and publishes the decision."""
        assert self.store is not None
        self.release()
        self.delete_released()
        keys: list[str] = []
        try:
            decision = reduce(views)
        except Exception as error:  # all ranks stop at the same step
            self.publish(self.prefix, Failure.of(error, self.rank, clean=True, hard=False))
            value = FAILURE
        else:
            value, keys = encode(self.store, self._key, decision.encode(errors="backslashreplace"))
        self.delete_later([self._key, *keys])
        if last:
            value = self.set_outcome(self.prefix, value)
        else:
            self.store.set(self._key, value)  # type: ignore[arg-type]
        self._raise_if_failed(value)
        return decision

    # ---- waiting ----

    def _wait(self, ready: Callable[[], T | None], missing: Callable[[], list[int]]) -> T:
        """Waits for what ``ready`` returns. ``missing``: returns the ranks that it waits for.

        Those that themselves wait for others have more time than those, so that they can say which are missing.
        """
        nodes, limit = len(self.tree.nodes), self._limit
        sample = min(limit / _SAMPLES, _MAX_SAMPLE)
        least, share = (
            max(_MIN_POLL, _MIN_POLL_PER_NODE * nodes),
            max(_MIN_SHARE, min(_SHARE_PER_NODE * nodes, _MAX_SHARE)),
        )
        last_state, now = None, monotonic()
        began, until, next_sample, next_warning = now, now + limit, now + sample, now + _WARN_SECONDS
        while True:
            self.news.wait(min(max(least, share * (now - began)), _MAX_POLL, sample))
            self.news.clear()
            if (value := ready()) is not None:
                return value
            self._check()
            now = monotonic()
            if now >= next_sample:
                state = self.heartbeats.state(missing(), self.position)
                if last_state not in (None, state):
                    until = now + limit
                last_state, next_sample = state, now + sample
            if now >= next_warning:
                next_warning = now + (_WARN_AGAIN if self._warn(now - began, missing()) else self.heartbeats.interval)
            if now >= until:
                waited_for = missing()
                absent = self._absent(waited_for)
                if absent or now >= until + 0.25 * limit + 2:
                    error = self._timeout(absent or waited_for)
                    error.absent = tuple(absent)
                    raise error

    def _warn(self, seconds: float, missing: Sequence[int]) -> bool:
        """Logs for whom this rank has waited so many seconds, if it is known that a rank has not made the call.

        A rank that waits for another, which itself waits for a third, hears it from its heartbeats. Returns True if it is known.
        """
        absent = self._absent(missing) or list(missing)
        beats = {rank: self.heartbeats.last(rank) for rank in absent}
        outside = [rank for rank, beat in beats.items() if beat is None or beat.load < self.at[0]]
        what = f"{_name(outside)} {_SAME_CALL}"
        if not outside:
            what = ", and for ".join(f"rank {rank}, which {beat.doing}" for rank, beat in beats.items() if beat is not None)
        if _SAME_CALL not in what:
            return False
        self.doing = f"waits for {what}"
        what = what[:_MAX_WARNING]
        logger.warning("rank %d has waited %.0f s in %r for %s%s", self.rank, seconds, self._what, what, _ADVICE)
        return True

    def _check(self) -> None:
        """Raises an error if the round has failed."""
        if self.known_failure() is not None:
            raise RemoteFailure("another rank failed")
        self.check_others()
        # A rank that has read the decision of the last round may end before this one has read it.
        if self.processes.ended and self._read() is None:
            raise RankExited(*min(self.processes.ended.items()))

    def _absent(self, missing: Sequence[int]) -> list[int]:
        """Returns the ranks that have not come: of ``missing``, and of the nodes that those lead."""
        tree, heartbeats, position = self.tree, self.heartbeats, self.position
        absent: list[int] = []
        for leader in missing:
            if not heartbeats.arrived(leader, position):
                ranks = (leader,) if leader in tree.node else tree.node_of[leader]
                absent += [rank for rank in ranks if not heartbeats.arrived(rank, position)]
        return absent

    def _timeout(self, absent: Sequence[int]) -> WaitTimeout:
        limit = f"{self._limit:.0f} s"
        if list(absent) == [self.coordinator]:
            seen = f"(seen by rank {self.rank})"
            return WaitTimeout(f"{self._what}: rank {absent[0]}, the coordinator, made no decision within {limit} {seen}")
        return WaitTimeout(f"{self._what}: {_name(absent)} did not arrive within {limit}")


def encode_report(what: str, failure: BaseException | None, view: Any) -> str:
    """Returns a rank's view for :func:`reduce_reports`: the round that it is in, and its failure if it has one."""
    error = None
    if failure is not None:
        stack = "" if is_known(failure) else stack_of(failure)
        error = [kind_of(failure), f"{message_of(failure)}\n{stack}".rstrip("\n")]
    return json.dumps({"at": what, "error": error, "view": view})


def reduce_reports(what: str, views: Views, reduce: Callable[[dict[int, Any]], Any]) -> str:
    """Returns the decision as JSON. Raises the error of the ranks that failed, or LoadError if one is in another round."""
    parsed = [(json.loads(text), ranks) for text, ranks in views.items()]
    reports = dict(sorted((rank, report) for report, ranks in parsed for rank in ranks))
    if any(report["at"] != what for report, _ in parsed):
        logger.info("ranks in different rounds: %s", {rank: report["at"] for rank, report in reports.items()})
        raise call_order_error()
    errors = {rank: report["error"] for rank, report in reports.items() if report["error"]}
    if errors:
        causes = {rank: error for rank, error in errors.items() if error[0] != RemoteFailure.__name__} or errors
        groups = group_equal({rank: text for rank, (_, text) in causes.items()})
        kind, _ = causes[groups[0][0]]
        raise make_error(kind, "\n".join(f"{causes[ranks[0]][1]} [{_name(ranks)}]" for ranks in groups))
    return json.dumps(reduce({rank: report["view"] for rank, report in reports.items()}))


def _name(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
