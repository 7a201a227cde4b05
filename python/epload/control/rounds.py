"""Agreement rounds: every rank posts a view, the coordinator makes a decision of all views, and every rank reads the decision.

A round costs one set and one get per rank, and as many gets as there are ranks on the coordinator.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any

from epload.control.failure import Failure, FailureStore, stack_of
from epload.control.heartbeat import Heartbeats
from epload.control.messages import MessageStore
from epload.control.processes import LocalProcesses
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

_MIN_POLL, _MAX_POLL, _POLL_SHARE = 0.0002, 1.0, 1 / 8
"""Seconds between two checks for the keys that a round waits for: limits, and the share of the time waited so far. A round polls,
as a TCPStore prints a warning whenever its own wait times out."""
_FIRST_CHECK = 0.05
"""Seconds until a waiting rank first checks whether another has failed. The pauses between checks double, up to a second."""
FAILED = "x"
"""Posted in place of a view or a decision by a rank that has failed; any other decision starts with ``_OK``."""
_OK = "o"


@dataclass(frozen=True)
class Round:
    """One agreement round."""

    what: str
    """Its name in error messages."""
    number: int
    """In the present attempt of a load."""
    prefix: str
    """Of the round's keys."""
    limit: timedelta
    """How long the coordinator waits without progress."""
    failures: FailureStore
    last: bool
    """Whether the load has succeeded when the round has."""

    @property
    def decision_key(self) -> str:
        return f"{self.prefix}decision"


class Rounds:
    """Runs one rank's part of rounds: the coordinator's or a participant's."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        messages: MessageStore,
        heartbeats: Heartbeats,
        processes: LocalProcesses,
        alarm: threading.Event,
    ) -> None:
        """The first of ``ranks`` is the coordinator. ``alarm``: set to wake a rank that waits in a round."""
        self._ranks = ranks
        self._rank = rank
        self._messages = messages
        self._heartbeats = heartbeats
        self._processes = processes
        self._alarm = alarm
        self.final: tuple[str, str] | None = None
        """On the coordinator: key and text of the decision with which the load has succeeded."""

    def run(self, round_: Round, view: str, decide: Callable[[Mapping[int, str]], str]) -> str:
        """Returns the coordinator's decision, on every rank.

        Raises:
            WaitTimeout: a rank did not come within the limit.
            RankExited: the process of a rank on this machine has ended.
            RemoteFailure: a failure was published, also one of ``decide`` itself.
        """
        coordinates = self._rank == self._ranks[0]
        decision = self._coordinate(round_, view, decide) if coordinates else self._participate(round_, view)
        if decision == FAILED:
            raise RemoteFailure("another rank failed")
        return decision[len(_OK) :]

    def _coordinate(self, round_: Round, view: str, decide: Callable[[Mapping[int, str]], str]) -> str:
        others = [rank for rank in self._ranks if rank != self._rank]
        keys = {f"{round_.prefix}{rank}": rank for rank in others}
        if absent := self._wait(round_, keys, round_.limit):
            raise WaitTimeout(
                f"{round_.what}: {_name(absent)} did not arrive within {round_.limit.total_seconds():.0f} s"
            )
        posted = dict(zip(others, self._messages.read_all(list(keys)), strict=True)) | {self._rank: view}
        views = {rank: posted[rank] for rank in self._ranks}
        self._messages.release()
        self._messages.delete_released()
        decision = self._decide(round_, views, decide)
        self._messages.post(round_.decision_key, decision)
        return decision

    def _decide(self, round_: Round, views: dict[int, str], decide: Callable[[Mapping[int, str]], str]) -> str:
        if FAILED in views.values():
            return FAILED
        try:
            decision = _OK + decide(views)
        except Exception as error:  # all ranks stop at the same step
            round_.failures.publish(Failure.of(error, self._rank, clean=True), hard=False)
            return FAILED
        if not round_.last:
            return decision
        self.final = round_.decision_key, decision
        return decision if round_.failures.end() else FAILED

    def _participate(self, round_: Round, view: str) -> str:
        self._messages.post(f"{round_.prefix}{self._rank}", view)
        self._messages.delete_released()
        # Longer than the coordinator waits, so that its text is the one raised.
        limit = 1.25 * round_.limit + timedelta(seconds=2)
        coordinator = self._ranks[0]
        if self._wait(round_, {round_.decision_key: coordinator}, limit):
            raise WaitTimeout(
                f"{round_.what}: rank {coordinator}, the coordinator, made no decision within "
                f"{limit.total_seconds():.0f} s (seen by rank {self._rank})"
            )
        decision = self._messages.read(round_.decision_key)
        self._messages.release()  # deleted in the next round: after the last one the store may no longer exist
        return decision

    def _wait(self, round_: Round, rank_of: Mapping[str, int], limit: timedelta) -> list[int]:
        """Waits until all keys are set.

        Args:
            rank_of: for each key, the rank that sets it.
            limit: time without progress.

        Returns:
            The ranks that are missing after ``limit``; empty if all keys are set.
        """
        keys = list(rank_of)
        began = monotonic()
        until = began + limit.total_seconds()
        seen, next_check = None, _FIRST_CHECK
        while keys and not self._messages.has(keys):
            waited = monotonic() - began
            alarmed = self._alarm.wait(min(max(_POLL_SHARE * waited, _MIN_POLL), _MAX_POLL))
            if waited < next_check and not alarmed:
                continue
            self._alarm.clear()
            next_check = waited + min(waited, _MAX_POLL)
            missing = [rank for key, rank in rank_of.items() if not self._messages.has([key])]
            if round_.failures.first() is not None:
                raise RemoteFailure("another rank failed")
            # A rank that has read the decision of the last round may end before this one has read it.
            for rank, pid in sorted(self._processes.ended.items()):
                if not self._messages.has(keys):
                    raise RankExited(rank, pid)
            now = self._heartbeats.progress(missing, round_.number)
            if seen is not None and now != seen:
                until = monotonic() + limit.total_seconds()
            seen = now
            if monotonic() >= until:
                return missing
        return []


def encode_report(what: str, failure: BaseException | None, view: Any) -> str:
    """A rank's view for :func:`decide_on_reports`: the round that it is in, and its failure if it has one."""
    error = None
    if failure is not None:
        stack = "" if is_known(failure) else stack_of(failure)
        error = [kind_of(failure), message_of(failure) + (f"\n{stack}" if stack else "")]
    return json.dumps({"at": what, "error": error, "view": view})


def decide_on_reports(what: str, texts: Mapping[int, str], decide: Callable[[dict[int, Any]], Any]) -> str:
    """The decision as JSON. Raises the error of the ranks that failed, or CallOrderError if a rank is in another round."""
    reports = {rank: json.loads(text) for rank, text in texts.items()}
    if any(report["at"] != what for report in reports.values()):
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
