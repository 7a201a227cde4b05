"""Agreement rounds: every rank hands a view to the leader of its node, each leader its node's views up a tree, and the root, the
coordinator, makes a decision of all views, for which all leaders look in one key.

Ranks of a node use their links. Leaders poll the store, as a wait inside it can neither be interrupted nor watched: they poll
less often the longer they have waited, and the more nodes there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any, TypeVar

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
from epload.ranks import tree as trees
from epload.ranks.failure import Failure, stack_of
from epload.ranks.messages import read_if_set
from epload.ranks.place import FAILURE, Place, outcome_keys
from epload.ranks.tree import Bundle

_MIN_POLL, _MAX_POLL = 0.002, 0.25
_MIN_POLL_PER_NODE, _MAX_POLL_PER_NODE = 1e-5, 1 / 8192
"""Seconds to the first look at the store, and at most between two: the larger of a constant and what grows with the nodes."""
_SAMPLES, _MAX_SAMPLE = 8, 10.0
"""Number of times within its limit that a rank looks at the heartbeats of those it waits for, and maximum seconds between two."""
T = TypeVar("T")


@dataclass(frozen=True)
class Round:
    """One agreement round."""

    what: str
    """Its name in error messages."""
    limit: timedelta
    """Maximum time without progress that a rank is waited for."""
    last: bool
    """True if the load has succeeded when the round has."""


class Rounds:
    """Runs one rank's part of rounds."""

    def __init__(self, place: Place, wake: Callable[[], None]) -> None:
        """``wake``: lets the watch send what a link has not taken yet."""
        self._place = place
        self._wake = wake

    @property
    def number(self) -> str:
        """The load, the attempt and the round in it, as text."""
        return "{}.{}/{}".format(*self._place.at)

    @property
    def _tag(self) -> str:
        """Tag of the round's messages within a node; with a rank, the key of a leader's views."""
        return f"view/{self.number}"

    def run(self, round_: Round, view: str, decide: Callable[[Mapping[int, str]], str]) -> str:
        """Returns the coordinator's decision, on every rank.

        Raises:
            WaitTimeout: a rank did not come within the limit.
            RankExited: the process of a rank on this machine has ended.
            RemoteFailure: a failure was published, also one of ``decide`` itself.
        """
        place, events = self._place, self._place.events
        place.waits_since = monotonic()
        try:
            with events.round(round_.what, self.number) if events is not None else nullcontext():
                if not place.tree.leads:
                    return self._participate(round_, view)
                bundle = self._gather(round_, view)
                if place.rank == place.tree.root:
                    return self._decide(round_, bundle, decide)
                place.delete_later(place.messages.put(f"{self._tag}/{place.rank}", trees.encode(bundle)))
                place.messages.delete_released()
                decision = self._wait(round_, lambda: self._read(self._key(round_)), lambda: [place.tree.root])
                self._pass_on(decision)
                place.messages.release()  # deleted in the next round: after the last one the store may no longer exist
                return decision
        finally:
            place.waits_since = 0.0
            place.received.pop(self._tag, None)

    def _key(self, round_: Round) -> str:
        """Returns the key of the decision; that of the last round is the outcome of the load."""
        return outcome_keys(self._place.prefix)[0] if round_.last else self.number

    def _read(self, key: str) -> str | None:
        """Returns the decision if there is one. Raises RemoteFailure if the coordinator has refused to make it."""
        place = self._place
        if (value := read_if_set(place.connection(), key)) is None:
            return None
        if value.startswith(FAILURE):
            place.look()
            raise RemoteFailure("another rank failed")
        return place.messages.decode(key, value).decode()

    def _pass_on(self, decision: str) -> None:
        """A leader passes a decision on to the other ranks of its node."""
        for rank in self._place.tree.members:
            self._send(rank, decision.encode())

    def pass_on_outcome(self) -> None:
        """Does so if this rank was interrupted when the load had succeeded, perhaps before it could."""
        if (decision := self._read(outcome_keys(self._place.prefix)[0])) is not None:
            self._pass_on(decision)

    def _send(self, rank: int, data: bytes) -> None:
        link = self._place.links[rank]
        link.send(self._tag, data)
        if link.unsent:
            self._wake()

    def _participate(self, round_: Round, view: str) -> str:
        """The part of a rank that does not lead its node."""
        place, leader = self._place, self._place.tree.leader
        place.messages.delete_released()
        self._send(leader, view.encode(errors="backslashreplace"))

        def decided() -> str | None:
            if leader in place.received.get(self._tag, {}):
                return place.received[self._tag][leader].decode()
            # A leader that has ended may not have passed the decision on.
            return self._read(self._key(round_)) if leader in place.processes.ended else None

        decision = self._wait(round_, decided, lambda: [leader])
        place.messages.release()
        return decision

    def _gather(self, round_: Round, view: str) -> Bundle:
        """Returns the views of the node that this rank leads, and of all nodes below it."""
        place, tree, store = self._place, self._place.tree, self._place.connection()
        keys = {leader: f"{self._tag}/{leader}" for leader in tree.children}

        def missing() -> list[int]:
            absent = [rank for rank in tree.members if rank not in place.received.get(self._tag, {})]
            return absent + [leader for leader, key in keys.items() if not store.check([key])]

        def gathered() -> list[bytes] | None:
            if len(place.received.get(self._tag, {})) < len(tree.members):
                return None
            if not keys:
                return []
            return store.multi_get([*keys.values()]) if store.check([*keys.values()]) else None

        values = self._wait(round_, gathered, missing) if tree.members or keys else []
        bundles: list[Bundle] = [{view: [place.rank]}]
        bundles += [{data.decode(): [rank]} for rank, data in place.received.get(self._tag, {}).items()]
        for key, value in zip(keys.values(), values, strict=True):
            bundles.append(trees.decode(place.messages.decode(key, value)))
        return trees.merge(bundles)

    def _decide(self, round_: Round, bundle: Bundle, decide: Callable[[Mapping[int, str]], str]) -> str:
        """The part of the coordinator: makes, publishes and passes on the decision."""
        place, key = self._place, self._key(round_)
        place.messages.release()
        place.messages.delete_released()
        try:
            decision = decide(trees.by_rank(bundle))
        except Exception as error:  # all ranks stop at the same step
            place.publish(place.prefix, Failure.of(error, place.rank, clean=True, hard=False))
            value, parts = FAILURE, list[str]()
        else:
            value, parts = place.messages.encode(key, decision.encode(errors="backslashreplace"))
        place.delete_later([key, *parts])
        if round_.last:
            value = place.set_outcome(place.prefix, value)
        else:
            place.messages.store.set(key, value)  # type: ignore[arg-type]
        if value.startswith(FAILURE):
            place.look()
            raise RemoteFailure("another rank failed")
        self._pass_on(decision)
        return decision

    # ---- waiting ----

    def _wait(self, round_: Round, ready: Callable[[], T | None], missing: Callable[[], list[int]]) -> T:
        """Waits for what ``ready`` returns. ``missing``: returns the ranks that it waits for.

        Those that themselves wait for others have more time than those, so that they can say which are missing.
        """
        place, limit = self._place, round_.limit.total_seconds()
        grace = 0.25 * limit + 2
        sample = min(limit / _SAMPLES, _MAX_SAMPLE)
        nodes, now = len(place.tree.nodes), monotonic()
        pause = max(_MIN_POLL, _MIN_POLL_PER_NODE * nodes)
        max_poll = min(max(_MAX_POLL, _MAX_POLL_PER_NODE * nodes), sample)
        until, next_sample, last_state = now + limit, now + sample, None
        while True:
            place.news.wait(pause)
            place.news.clear()
            pause = min(2 * pause, max_poll)
            if (value := ready()) is not None:
                return value
            self._check(round_)
            now = monotonic()
            if now >= next_sample:
                state = place.heartbeats.state(missing(), place.position)
                if last_state not in (None, state):
                    until = now + limit
                last_state, next_sample = state, now + sample
            if now >= until:
                waited_for = missing()
                absent = self._absent(waited_for)
                if absent or now >= until + grace:
                    raise self._timeout(round_, absent or waited_for)

    def _check(self, round_: Round) -> None:
        """Raises an error if the round has failed."""
        place = self._place
        if place.known_failure() is not None:
            raise RemoteFailure("another rank failed")
        # A rank that has read the decision of the last round may end before this one has read it.
        if place.processes.ended and self._read(self._key(round_)) is None:
            raise RankExited(*min(place.processes.ended.items()))

    def _absent(self, missing: Sequence[int]) -> list[int]:
        """Returns the ranks that have not come: of ``missing``, and of the nodes that those lead."""
        place = self._place

        def late(rank: int) -> bool:
            return not place.heartbeats.arrived(rank, place.position)

        absent: list[int] = []
        for rank in filter(late, missing):
            near = rank in place.tree.node
            absent += [rank] if near else filter(late, place.tree.node_of[rank])
        return absent

    def _timeout(self, round_: Round, absent: Sequence[int]) -> WaitTimeout:
        place, limit = self._place, f"{round_.limit.total_seconds():.0f} s"
        if list(absent) == [place.tree.root]:
            who = f"rank {absent[0]}, the coordinator, made no decision within {limit} (seen by rank {place.rank})"
        else:
            who = f"{_name(absent)} did not arrive within {limit}"
        return WaitTimeout(f"{round_.what}: {who}")


def encode_report(what: str, failure: BaseException | None, view: Any) -> str:
    """Returns a rank's view for :func:`decide_on_reports`: the round that it is in, and its failure if it has one."""
    error = None
    if failure is not None:
        stack = "" if is_known(failure) else stack_of(failure)
        error = [kind_of(failure), message_of(failure) + (f"\n{stack}" if stack else "")]
    return json.dumps({"at": what, "error": error, "view": view})


def decide_on_reports(what: str, texts: Mapping[int, str], decide: Callable[[dict[int, Any]], Any]) -> str:
    """Returns the decision as JSON. Raises the error of the ranks that failed, or CallOrderError if one is in another round."""
    parsed = {text: json.loads(text) for text in set(texts.values())}
    reports = {rank: parsed[text] for rank, text in texts.items()}
    if any(report["at"] != what for report in parsed.values()):
        logger.info("ranks in different rounds: %s", {rank: report["at"] for rank, report in reports.items()})
        raise CallOrderError
    failed = {rank: report["error"] for rank, report in reports.items() if report["error"]}
    if failed:
        causes = {rank: error for rank, error in failed.items() if error[0] != RemoteFailure.__name__} or failed
        ranks_of: dict[str, list[int]] = {}
        for rank, (_, text) in causes.items():
            ranks_of.setdefault(text, []).append(rank)
        merged = "\n".join(f"{text} [{_name(ranks)}]" for text, ranks in ranks_of.items())
        raise make_error(next(iter(causes.values()))[0], merged)
    return json.dumps(decide({rank: report["view"] for rank, report in reports.items()}))


def _name(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
