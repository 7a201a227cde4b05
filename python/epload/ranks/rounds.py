"""Agreement rounds: every rank hands a view to the leader of its node, each leader its node's views up a tree, and the root, the
coordinator, makes a decision of all views, for which all leaders wait on one key.

Ranks of a node use their links. A leader's round costs a set, a wait and get, and a delete in the store; a leader with children
waits for all of their views in one call.
"""

from __future__ import annotations

import json
import select
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any

from epload.core.log import logger
from epload.errors import (
    CallOrderError,
    RankExited,
    RemoteFailure,
    WaitTimeout,
    is_known,
    kind_of,
    make_error,
    message_of,
)
from epload.observe.events import Events
from epload.ranks import tree as trees
from epload.ranks.failure import FAILURE, Failure, Outcomes, stack_of
from epload.ranks.heartbeat import Position, State
from epload.ranks.links import Link
from epload.ranks.node_connection import NodeConnection
from epload.ranks.processes import LocalProcesses
from epload.ranks.tree import Bundle
from epload.ranks.waiter import Wait

_MAX_WAIT = 1.0
"""Seconds until a waiting rank looks at what has changed at the latest; nothing of that asks the store."""
_SAMPLES, _MAX_SAMPLE = 8, 10.0
"""Number of times within its limit that a leader reads the heartbeats of those it waits for, and maximum seconds between two."""
_QUIET_SECONDS = 1.0
"""After which a rank whose leader has not come says in the store that it has come itself."""
_FAILED = b"x"
"""Value that replaces a view or a decision after a rank has failed."""


@dataclass(frozen=True)
class Round:
    """One agreement round."""

    what: str
    """Its name in error messages."""
    position: Position
    limit: timedelta
    """Maximum time without progress that a rank is waited for."""
    outcomes: Outcomes
    """The outcomes of the present attempt of a load."""
    last: bool
    """True if the load has succeeded when the round has."""

    @property
    def step(self) -> int:
        return self.position[2]

    @property
    def tag(self) -> str:
        """Tag of the round's messages within a node; with a rank, the key of a leader's views."""
        return f"view/{self.number}"

    @property
    def number(self) -> str:
        """The load, the attempt and the round in it, as text."""
        return "{}.{}/{}".format(*self.position)

    @property
    def patience(self) -> timedelta:
        """Maximum wait for ranks that first have to report which others are missing."""
        return 1.25 * self.limit + timedelta(seconds=2)


class Deadline:
    """The deadline of a wait: limits the time without progress."""

    def __init__(self, limit: timedelta) -> None:
        self._seconds = limit.total_seconds()
        self._until = monotonic() + self._seconds
        self._seen: State | None = None

    def note(self, state: State) -> None:
        """Extends the wait if the state of those that it waits for has changed."""
        if self._seen is not None and state != self._seen:
            self._until = monotonic() + self._seconds
        self._seen = state

    @property
    def left(self) -> float:
        return self._until - monotonic()


class Rounds:
    """Runs one rank's part of rounds."""

    def __init__(self, place: NodeConnection, processes: LocalProcesses, failed: Callable[[], bool]) -> None:
        """``failed``: whether the present attempt is known to have failed."""
        self._tree = place.tree
        self._links = place.links.rounds
        self._messages = place.messages
        self._heartbeats = place.heartbeats
        self._alarm = place.alarm
        self._waiter = place.waiter
        self._processes = processes
        self._failed = failed
        self._received: dict[str, dict[int, bytes]] = {}
        """Messages by tag and sender."""
        self.waits_since = 0.0
        """Value of ``monotonic()`` when this rank began to wait in the present round; 0 if it does not wait."""
        self.waits_for_outcome = False
        """True if the waiter is about to tell the outcome of the present step."""
        self.events: Events | None = None
        """Records the rounds; None if they are not recorded."""

    def run(self, round_: Round, view: str, decide: Callable[[Mapping[int, str]], str]) -> str:
        """Returns the coordinator's decision, on every rank.

        Raises:
            WaitTimeout: a rank did not come within the limit.
            RankExited: the process of a rank on this machine has ended.
            RemoteFailure: a failure was published, also one of ``decide`` itself.
        """
        events = self.events
        with events.round(round_.what, round_.number) if events is not None else nullcontext():
            return self._run(round_, view, decide)

    def _run(self, round_: Round, view: str, decide: Callable[[Mapping[int, str]], str]) -> str:
        self.waits_since = monotonic()
        try:
            if not self._tree.leads:
                return self._participate(round_, view)
            bundle = self._gather(round_, view)
            outcome = self._decide(round_, bundle, decide) if self._tree.rank == self._tree.root else None
            if outcome is None:
                self._messages.post(self._key(round_, self._tree.rank), trees.encode(bundle))
                self._messages.delete_released()
                outcome = self._wait_for_outcome(round_)
                if not outcome.startswith(FAILURE):  # to a round that has failed, not all ranks may have come yet
                    self._messages.release()  # deleted in the next round: after the last one the store may no longer exist
            return self.deliver(round_, outcome)
        finally:
            self.waits_since = 0.0
            self._received.pop(round_.tag, None)

    def forget(self, load: int) -> None:
        """Messages of loads before this one, which have failed."""
        for tag in [tag for tag in self._received if int(tag.split("/")[1].split(".")[0]) < load]:
            del self._received[tag]

    def deliver(self, round_: Round, outcome: bytes) -> str:
        """A leader passes a decision on to the other ranks of its node. Returns the decision."""
        if outcome.startswith(FAILURE):
            raise RemoteFailure("another rank failed")
        decision = self._messages.decode(round_.outcomes.key(round_.step), outcome[1:])
        data = decision.encode(errors="backslashreplace")
        for rank in self._tree.members:
            self._send(round_, rank, data)
        return decision

    def _send(self, round_: Round, rank: int, data: bytes) -> None:
        """Sends a message to a rank of this node. If that rank's process has ended, the watch detects it."""
        deadline, link = Deadline(round_.limit), self._links[rank]

        def wait() -> None:
            self._check(round_)
            deadline.note(self._heartbeats.near([rank], round_.position))
            if deadline.left <= 0:
                raise WaitTimeout(
                    f"{round_.what}: rank {rank} took no message for {round_.limit.total_seconds():.0f} s"
                )
            poll = select.poll()
            poll.register(link, select.POLLOUT)
            poll.register(self._alarm, select.POLLIN)
            poll.poll(1e3 * _MAX_WAIT)
            self._alarm.clear()

        with suppress(OSError):
            link.send(round_.tag, data, wait)

    def _key(self, round_: Round, rank: int) -> str:
        return f"{round_.tag}/{rank}"

    # ---- a rank that does not lead its node ----

    def _participate(self, round_: Round, view: str) -> str:
        leader = self._tree.leader
        self._messages.delete_released()
        self._send(round_, leader, view.encode(errors="backslashreplace"))
        deadline, posted = Deadline(round_.limit), False
        while leader not in self._received.get(round_.tag, {}):
            if leader in self._processes.ended and (outcome := round_.outcomes.read(round_.step)):
                return self.deliver(round_, outcome)  # the leader has ended, perhaps before it could pass it on
            self._check(round_)
            state = self._heartbeats.near([leader], round_.position)
            deadline.note(state)
            come = any(number >= 0 for *_, number in state)
            if not come and not posted and monotonic() - self.waits_since >= _QUIET_SECONDS:
                self._heartbeats.post(round_.position)
                posted = True
            if deadline.left <= 0 and not (come and self._grace(round_, deadline)):
                raise self._timeout(round_, [leader])
            self._sleep(deadline.left)
        self._messages.release()
        return self._received[round_.tag][leader].decode()

    def _grace(self, round_: Round, deadline: Deadline) -> bool:
        """Returns True if there is time left for a rank that waits for others itself, and has to say which it misses."""
        return deadline.left > -(round_.patience - round_.limit).total_seconds()

    def _timeout(self, round_: Round, absent: Sequence[int]) -> WaitTimeout:
        limit = f"{round_.limit.total_seconds():.0f} s"
        if list(absent) == [self._tree.root]:
            who = f"rank {absent[0]}, the coordinator, made no decision within {limit} (seen by rank {self._tree.rank})"
        else:
            who = f"{_name(absent)} did not arrive within {limit}"
        return WaitTimeout(f"{round_.what}: {who}")

    # ---- leaders ----

    def _gather(self, round_: Round, view: str) -> Bundle:
        """The views of this rank's node and of all nodes below it."""
        deadline = Deadline(round_.limit)
        members = set(self._tree.members)
        while missing := sorted(members - self._received.get(round_.tag, {}).keys()):
            self._check(round_)
            deadline.note(self._heartbeats.near(missing, round_.position))
            if deadline.left <= 0:
                raise self._timeout(round_, [*missing, *self._absent_below(round_)])
            self._sleep(deadline.left)
        bundles: list[Bundle] = [{view: [self._tree.rank]}]
        bundles += [{data.decode(): [rank]} for rank, data in self._received.get(round_.tag, {}).items()]
        if self._tree.children:
            keys = [self._key(round_, node[0]) for node in self._tree.children]
            values = self._wait(round_, keys, deadline)
            if _FAILED in values:
                raise RemoteFailure("another rank failed")
            bundles += [trees.decode(self._messages.decode(*each)) for each in zip(keys, values, strict=True)]
        return trees.merge(bundles)

    def _decide(self, round_: Round, bundle: Bundle, decide: Callable[[Mapping[int, str]], str]) -> bytes:
        self._messages.release()
        self._messages.delete_released()
        outcomes, step = round_.outcomes, round_.step
        try:
            ranks = sorted(self._tree.leader_of)
            decision = decide(trees.by_rank(bundle, ranks))
        except Exception as error:  # all ranks stop at the same step
            outcomes.publish(step, Failure.of(error, self._tree.rank, clean=True), hard=False)
            return FAILURE
        key = outcomes.key(step)
        self._messages.delete_later([key])
        return outcomes.decide(step, self._messages.encode(key, decision), round_.last)

    def _wait_for_outcome(self, round_: Round) -> bytes:
        self.waits_for_outcome = True
        try:
            deadline = Deadline(round_.patience)
            return self._wait(round_, [round_.outcomes.key(round_.step)], deadline)[0]
        finally:
            self.waits_for_outcome = False

    def _wait(self, round_: Round, keys: list[str], deadline: Deadline) -> list[bytes]:
        """The values of ``keys``: of the outcome, or of the views of the nodes below."""
        assert self._waiter is not None
        wait = self._waiter.wait_for(keys)
        every = min(round_.limit.total_seconds() / _SAMPLES, _MAX_SAMPLE)
        next_sample = monotonic() + every
        try:
            while not wait.done:
                self._sleep(min(deadline.left, next_sample - monotonic()))
                if wait.done:
                    break
                self._check(round_)
                if monotonic() >= next_sample:
                    next_sample = monotonic() + every
                    deadline.note(self._heartbeats.far(self._missing(round_), round_.position))
                if deadline.left <= 0:
                    self._give_up(round_, deadline)
            return wait.result()
        finally:
            self._end(wait)

    def _give_up(self, round_: Round, deadline: Deadline) -> None:
        """Raises WaitTimeout, unless all that are missing wait for others in turn and have time left to say so."""
        if self.waits_for_outcome:
            raise self._timeout(round_, [self._tree.root])
        absent = self._absent_below(round_)
        if not absent and not self._grace(round_, deadline):
            absent = self._missing(round_)
        if absent:
            raise self._timeout(round_, absent)

    def _missing(self, round_: Round) -> list[int]:
        """The leaders that this rank waits for."""
        if self.waits_for_outcome:
            return [self._tree.root]
        leaders = [node[0] for node in self._tree.children]
        return [leader for leader in leaders if not self._messages.has(self._key(round_, leader))]

    def _absent_below(self, round_: Round) -> list[int]:
        """The ranks that have not come, of the nodes below whose leaders have not come either."""
        late = [rank for rank in self._missing(round_) if not self._heartbeats.arrived(rank, round_.position)]
        nodes = [node for node in self._tree.children if node[0] in late]
        return [rank for node in nodes for rank in node if not self._heartbeats.arrived(rank, round_.position)]

    def _end(self, wait: Wait) -> None:
        """Ends a wait for views that nobody will hand in; that for an outcome ends with the failure."""
        if not wait.done and not self.waits_for_outcome:
            wait.given_up = True
            self._messages.fill(wait.keys, _FAILED)

    # ---- both ----

    def _check(self, round_: Round) -> None:
        """Raises if the round has failed."""
        if self._failed():
            raise RemoteFailure("another rank failed")
        if ended := dict(self._processes.ended):
            rank, pid = min(ended.items())
            # A rank that has read the decision of the last round may end before this one has read it.
            outcome = round_.outcomes.read(round_.step)
            if not outcome:
                raise RankExited(rank, pid)
            if outcome.startswith(FAILURE):
                raise RemoteFailure("another rank failed")

    def _sleep(self, seconds: float) -> None:
        """Until something arrives or the alarm is set; then takes in what has arrived."""
        poll = select.poll()
        poll.register(self._alarm, select.POLLIN)
        links: dict[int, tuple[int, Link]] = {}
        for rank, link in self._links.items():
            if not link.closed:
                poll.register(link, select.POLLIN)
                links[link.fileno()] = rank, link
        ready = {fd for fd, _ in poll.poll(1e3 * min(max(seconds, 0.0), _MAX_WAIT))}
        if ready - links.keys():
            self._alarm.clear()
        for fd in ready & links.keys():
            rank, link = links[fd]
            for tag, data in link.receive():
                self._received.setdefault(tag, {})[rank] = data


def encode_report(what: str, failure: BaseException | None, view: Any) -> str:
    """A rank's view for :func:`decide_on_reports`: the round that it is in, and its failure if it has one."""
    error = None
    if failure is not None:
        stack = "" if is_known(failure) else stack_of(failure)
        error = [kind_of(failure), message_of(failure) + (f"\n{stack}" if stack else "")]
    return json.dumps({"at": what, "error": error, "view": view})


def decide_on_reports(what: str, texts: Mapping[int, str], decide: Callable[[dict[int, Any]], Any]) -> str:
    """The decision as JSON. Raises the error of the ranks that failed, or CallOrderError if a rank is in another round."""
    parsed = {text: json.loads(text) for text in set(texts.values())}
    reports = {rank: parsed[text] for rank, text in texts.items()}
    if any(report["at"] != what for report in parsed.values()):
        logger.info("ranks in different rounds: %s", {rank: report["at"] for rank, report in reports.items()})
        raise CallOrderError
    failed = {rank: report["error"] for rank, report in reports.items() if report["error"]}
    if failed:
        causes = {rank: error for rank, error in failed.items() if error[0] != RemoteFailure.__name__} or failed
        raise make_error(next(iter(causes.values()))[0], _merge(causes))
    return json.dumps(decide({rank: report["view"] for rank, report in reports.items()}))


def _name(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _merge(failed: Mapping[int, tuple[str, str]]) -> str:
    """Each distinct message with the ranks that reported it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, (_, text) in failed.items():
        ranks_of.setdefault(text, []).append(rank)
    return "\n".join(f"{text} [{_name(ranks)}]" for text, ranks in ranks_of.items())
