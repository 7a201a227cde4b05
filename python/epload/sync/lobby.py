"""Determines the participants of a sync: receivers join, the sender offers a version, receivers accept, the sender names them.

All of it is in the store of :mod:`epload.sync.store`. A receiver waits without asking; only the sender's first rank, alone, looks
again and again while it waits for receivers.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from epload.control.messages import read_if_set
from epload.control.waiter import Alarm, Wait, Waiter
from epload.core import threads
from epload.core.log import logger
from epload.errors import LoadError, WaitTimeout, message_of
from epload.sync.store import answered, fetch, post, publish

LEASE_SECONDS = 10.0
"""A receiver that has been silent for so long is dropped."""
_BEAT_SECONDS = 2.0
_KEPT_OFFERS = 8
"""Number of offers whose keys stay in the store, for receivers that are behind."""
_MOST_SHOWN = 8
"""Engines that one message lists."""
_FIRST_POLL, _LAST_POLL, _POLL_SHARE = 0.0005, 0.25, 1 / 8
"""Seconds between two looks of the sender: limits, and the share of the time waited so far."""


@dataclass(frozen=True)
class Member:
    """A receiving rank."""

    engine: str
    """Equal on the ranks that commit together."""
    rank: int
    """Among the engine's."""
    size: int
    """Ranks of the engine."""
    node: str
    """Equal on ranks that share a machine's memory."""
    host: str
    pid: int
    token: str
    """Another one each time that it joins: it then knows nothing of an epoch before."""

    def __str__(self) -> str:
        return f"rank {self.rank} of engine {self.engine} (process {self.pid} on {self.host})"


@dataclass(frozen=True)
class Offer:
    """A version that the sender has ready."""

    number: int
    version: int


@dataclass(frozen=True)
class Participants:
    """The receivers of one epoch, in the order of their ranks."""

    epoch: int
    members: tuple[Member, ...]
    manifest: str
    """Name of the manifest among the store's contents."""
    senders: int
    """Number of ranks that send; they are numbered before the receivers."""


def publish_members(store: Store, members: Sequence[Member]) -> str:
    """Puts the receivers of an epoch into the store; returns the name for :func:`fetch_members`."""
    return publish(store, json.dumps([asdict(member) for member in members]).encode())


def fetch_members(store: Store, name: str, timeout: timedelta) -> tuple[Member, ...]:
    return tuple(Member(**member) for member in json.loads(fetch(store, name, timeout)))


class Attendance:
    """A receiver's side. Its thread tells the sender that the process is alive.

    Calls of the store have a deadline, as a host that has stopped neither answers nor ends a connection.
    """

    def __init__(self, store: Store, connect: Callable[[], Store], member: Member, timeout: timedelta) -> None:
        """
        Args:
            connect: makes another connection.
            timeout: of one call of the store.
        """
        self._store = store
        self._member = member
        self._timeout = timeout
        self._alarm = Alarm()
        self._alarm.open()
        self._waiter = Waiter(connect(), self._alarm)
        self._waiter.start()
        self._waits: dict[str, Wait] = {}
        """Unfinished waits, by key: a wait cannot be taken back, and the next one comes after it."""
        self._beats = connect()
        self._over = threading.Event()
        self._accepted: Offer | None = None
        """Accepted offer whose participants are not known yet."""
        self._members: tuple[str, tuple[Member, ...]] = ("", ())
        """Receivers of the last offer, after their name in the store."""
        self.number, self._next = answered(self._join, timeout)
        self._thread = threads.start("epload-lease", self._beat)

    def rejoin(self, member: Member) -> None:
        """Joins as another member, which takes the place of this one, over the same connections: the store may take seconds to
        accept new ones."""
        self._member, self._accepted = member, None
        self.number, self._next = answered(self._join, self._timeout)

    def _join(self) -> tuple[int, int]:
        """This rank's number among all that have joined, and that of the next offer."""
        number = self._store.add("members", 1)
        post(self._store, f"member/{number}", asdict(self._member))
        posted = self._store.add("offers", 0)
        return number, posted if posted and read_if_set(self._store, f"closed/{posted}") is None else posted + 1

    def _beat(self) -> None:
        count = 0
        with suppress(RuntimeError):  # the store is lost, which whoever waits for it hears
            while not self._over.is_set():
                count += 1
                self._beats.set(f"alive/{self.number}", str(count))
                self._over.wait(_BEAT_SECONDS)

    def accept_offer(self, timeout: timedelta) -> Offer:
        """Waits for the next offer, or takes the one that is open: this rank is ready to receive it.

        Raises:
            LoadError: the store is lost, or there is no offer within ``timeout``.
        """
        if self._accepted is not None:  # a call before this has waited in vain for what comes of it
            return self._accepted
        said = json.loads(self._wait(f"offer/{self._next}", timeout, "no version was offered"))
        if "over" in said:
            raise LoadError("the sender has been closed, and offers no more versions")
        offer = Offer(self._next, said["version"])
        answered(lambda: self._accept(offer), self._timeout)
        self._accepted = offer
        return offer

    def _accept(self, offer: Offer) -> None:
        if self._store.add(f"accepted/{offer.number}/{self._member.engine}", 1) == self._member.size:
            self._store.add(f"accepted/{offer.number}", 1)

    def wait_for_participants(self, offer: Offer, timeout: timedelta) -> Participants | None:
        """Returns the participants; None if this rank came too late for this offer, or was taken for dead.

        Raises:
            LoadError: the sender has given up the offer; the store is lost; or nothing was said within ``timeout``.
        """
        why = f"version {offer.version} was offered, but the sender did not begin to send it"
        said = json.loads(self._wait(f"go/{offer.number}", timeout, why))
        self._accepted, self._next = None, offer.number + 1
        if "failed" in said:
            raise LoadError(said["failed"])
        if said["members"] != self._members[0]:
            members = answered(lambda: fetch_members(self._store, said["members"], timeout), self._timeout)
            self._members = said["members"], members
        members = self._members[1]
        if self._member not in members:
            return None
        return Participants(said["epoch"], members, said["manifest"], said["senders"])

    def confirm(self, offer: Offer) -> None:
        """This rank knows how the offer has ended."""
        with suppress(RuntimeError):  # the sender has ended meanwhile
            answered(lambda: self._store.add(f"confirmed/{offer.number}", 1), timedelta(seconds=_BEAT_SECONDS))

    def _wait(self, key: str, timeout: timedelta, why: str) -> bytes:
        wait = self._waits.get(key)
        if wait is None:
            wait = self._waits[key] = self._waiter.wait_for([key])
        until = time.monotonic() + timeout.total_seconds()
        poll = select.poll()
        poll.register(self._alarm.fileno(), select.POLLIN)
        while not wait.done:
            left = until - time.monotonic()
            if left <= 0:
                raise WaitTimeout(f"{why} within {timeout.total_seconds():.0f} s")
            poll.poll(1e3 * min(left, 1.0))
            self._alarm.clear()
        del self._waits[key]
        try:
            return wait.result()[0]
        except RuntimeError as error:
            raise LoadError(
                f"the sender's store is lost: {message_of(error)}; has the trainer's first rank ended?"
            ) from error

    def close(self) -> None:
        """Leaves: the sender drops this rank. A wait that has timed out keeps its thread until it ends inside the store."""
        self._over.set()
        for wait in self._waits.values():
            wait.given_up = True
        with suppress(RuntimeError):
            answered(lambda: post(self._store, f"left/{self.number}", True), timedelta(seconds=_BEAT_SECONDS))
        self._waiter.stop()
        self._alarm.close()
        self._thread.join(_BEAT_SECONDS)


class Lobby:
    """The side of the sender's first rank."""

    def __init__(self, store: Store, expected: int) -> None:
        """``expected``: receiving ranks without which nothing is sent at first."""
        self._store = store
        self._expected = expected
        self._members: dict[int, Member] = {}
        """Members by number; only the last of a rank that joined again, since no rank would come for the one before."""
        self._numbers: dict[tuple[str, int], int] = {}
        """Numbers of members, by engine and rank."""
        self._seen = 0
        self._gone: set[int] = set()
        """Numbers of members that have left."""
        self._silent: set[int] = set()
        """Numbers of members that were silent, or had left, when last checked."""
        self._beats: dict[int, tuple[bytes | None, float]] = {}
        """The last beat of a member, and when it was first seen."""
        self._required: tuple[str, ...] | None = None
        """Engines without which no version is sent; None before the first one."""
        self._offers = 0

    def offer(self, version: int) -> Offer:
        self._offers += 1
        if (old := self._offers - _KEPT_OFFERS) > 0:
            for key in ("offer", "go", "closed", "accepted", "confirmed"):
                self._store.delete_key(f"{key}/{old}")
        post(self._store, f"offer/{self._offers}", {"version": version})
        self._store.add("offers", 1)
        return Offer(self._offers, version)

    def end(self) -> None:
        """There will be no more versions: whoever waits for one hears that."""
        post(self._store, f"offer/{self._offers + 1}", {"over": True})

    def gather(self, offer: Offer, timeout: timedelta, check: Callable[[], None]) -> tuple[Member, ...]:
        """Waits until all engines have accepted that have to: at first so many that their ranks are ``expected``, later those of
        the version before that are still alive. Returns the ranks of all that have, ordered.

        Args:
            check: called now and then; may raise.

        Raises:
            LoadError: they have not within ``timeout``; names them.
        """
        began, looked = time.monotonic(), -1.0
        while True:
            self._read_new()
            accepted = self._accepted(offer)
            waited = time.monotonic() - began
            if self._enough(accepted):
                self._required = tuple(accepted)
                return tuple(member for engine in sorted(accepted) for member in accepted[engine])
            if waited >= timeout.total_seconds():
                raise WaitTimeout(self._describe_missing(offer, accepted, timeout))
            check()
            if waited - looked >= _BEAT_SECONDS:
                looked = waited
                self._drop_silent()
            time.sleep(min(max(_POLL_SHARE * waited, _FIRST_POLL), _LAST_POLL))

    def wait_for_confirmation(self, offer: Offer, ranks: int, seconds: float) -> None:
        """Before the store ends: waits until so many receivers know how the offer has ended, so long at most."""
        until = time.monotonic() + seconds
        while self._store.add(f"confirmed/{offer.number}", 0) < ranks and time.monotonic() < until:
            time.sleep(_LAST_POLL / 10)

    def close(self, offer: Offer, value: dict[str, Any]) -> None:
        """Says who takes part in an offer, or why nobody does."""
        post(self._store, f"closed/{offer.number}", True)
        post(self._store, f"go/{offer.number}", value)

    def _read_new(self) -> None:
        count = self._store.add("members", 0)
        while self._seen < count:
            value = read_if_set(self._store, f"member/{self._seen + 1}")
            if value is None:
                break
            self._seen += 1
            member = Member(**json.loads(value))
            replaced = self._numbers.get((member.engine, member.rank))
            if replaced is not None:
                del self._members[replaced]
                self._beats.pop(replaced, None)
            self._members[self._seen] = member
            self._numbers[member.engine, member.rank] = self._seen

    def _engines(self) -> dict[str, dict[int, int]]:
        """The numbers of members by rank, of each engine of which no rank has left or is silent."""
        found: dict[str, dict[int, int]] = {}
        for number, member in self._members.items():
            found.setdefault(member.engine, {})[member.rank] = number
        lost = self._gone | self._silent
        return {engine: numbers for engine, numbers in found.items() if lost.isdisjoint(numbers.values())}

    def _accepted(self, offer: Offer) -> dict[str, list[Member]]:
        if not self._store.add(f"accepted/{offer.number}", 0):
            return {}
        counts = {engine: self._store.add(f"accepted/{offer.number}/{engine}", 0) for engine in self._engines()}
        self._read_new()  # after that: a rank that has joined anew did so before it accepted
        found = {}
        for engine, numbers in self._engines().items():
            members = [self._members[number] for _, number in sorted(numbers.items())]
            if counts.get(engine, 0) >= members[0].size == len(members):
                found[engine] = members
        return found

    def _enough(self, accepted: dict[str, list[Member]]) -> bool:
        if self._required is None:
            return sum(map(len, accepted.values())) >= self._expected
        engines = self._engines()
        return bool(accepted) and all(engine in accepted for engine in self._required if engine in engines)

    def _drop_silent(self) -> None:
        """Drops engines of which a rank has left, until it joins again, and for as long as one is silent."""
        now = time.monotonic()
        before, self._silent = self._silent, set()
        for engine, numbers in self._engines().items():
            lost = []
            for number in numbers.values():
                beat = read_if_set(self._store, f"alive/{number}")
                last = self._beats.get(number)
                if last is None or last[0] != beat:
                    self._beats[number] = beat, now
                elif now - last[1] >= LEASE_SECONDS:
                    lost.append(number)
                if read_if_set(self._store, f"left/{number}") is not None:
                    lost.append(number)
                    self._gone.add(number)
            if lost:
                self._silent.update(lost)
                if not before.issuperset(lost):
                    names = ", ".join(str(self._members[number]) for number in sorted(set(lost)))
                    logger.warning(
                        "engine %s takes part no more: %s left, or was silent for %.0f s", engine, names, LEASE_SECONDS
                    )

    def _describe_missing(self, offer: Offer, accepted: dict[str, list[Member]], timeout: timedelta) -> str:
        engines = self._engines()
        lines = []
        for engine, numbers in list(engines.items())[:_MOST_SHOWN]:
            if engine not in accepted:
                size = self._members[next(iter(numbers.values()))].size
                ready = self._store.add(f"accepted/{offer.number}/{engine}", 0)
                lines.append(
                    f"engine {engine}: {len(numbers)} of {size} ranks joined, {ready} called receive_weights()"
                )
        ranks = sum(map(len, accepted.values()))
        wanted = self._expected if self._required is None else "all of the engines that are left, and at least one"
        return (
            f"version {offer.version}: {ranks} receiving ranks are ready after {timeout.total_seconds():.0f} s, expected {wanted}"
            + "".join(f"; {line}" for line in lines)
        )


def this_process(engine: str, rank: int, size: int, node: str) -> Member:
    return Member(engine, rank, size, node, os.uname().nodename, os.getpid(), secrets.token_hex(4))
