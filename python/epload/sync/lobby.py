"""Determines the participants of a sync: receivers join, the sender offers a version, receivers accept, the sender names them.

All of it is in the store of :mod:`epload.sync.store`. A receiver waits without asking; only the sender's first rank, alone, looks
again and again while it waits for receivers.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

from epload.core import threads
from epload.core.log import logger
from epload.errors import LoadError, WaitTimeout, message_of
from epload.ranks.messages import read_if_set
from epload.sync.store import answered, fetch, post, publish

LEASE_SECONDS = 10.0
"""A receiver that has been silent for so long is dropped."""
_BEAT_SECONDS = 2.0
_KEPT_OFFERS = 8
"""Number of offers whose keys stay in the store, for receivers that are behind."""
_MOST_SHOWN = 8
"""Engines that one message lists."""


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
    """Equal on ranks that share a machine's memory, and receive together."""
    host: str
    pid: int
    token: str
    """Another one each time that it joins: it then knows nothing of an epoch before."""

    @classmethod
    def of_process(cls, engine: str, rank: int, size: int, node: str) -> Member:
        """Returns this process as a new member."""
        return cls(engine, rank, size, node, os.uname().nodename, os.getpid(), secrets.token_hex(4))

    def __str__(self) -> str:
        return f"rank {self.rank} of engine {self.engine} (process {self.pid} on {self.host})"


@dataclass(frozen=True)
class Offer:
    """A version that the sender has ready."""

    number: int
    version: int


@dataclass(frozen=True)
class Participants:
    """The sender's message once it knows the receivers of an offered version, or that there are none."""

    epoch: int = 0
    members: str = ""
    """Name of the receivers, in the order of their ranks; see :func:`fetch_members`."""
    manifest: str = ""
    """Name of the manifest among the store's contents."""
    senders: int = 0
    """Number of ranks that send; they are numbered before the receivers."""
    failed: str = ""
    """Why the sender has given up the offer; else empty."""


def publish_members(store: Store, members: Sequence[Member]) -> str:
    """Puts the receivers of an epoch into the store; returns the name for :func:`fetch_members`."""
    return publish(store, json.dumps([asdict(member) for member in members]).encode())


def fetch_members(store: Store, name: str, timeout: timedelta) -> tuple[Member, ...]:
    return tuple(Member(**member) for member in json.loads(fetch(store, name, timeout)))


class Attendance:
    """A receiver's side. Its thread tells the sender that the process is alive.

    Calls of the store have a deadline, as a host that has stopped neither answers nor ends a connection.
    """

    def __init__(self, store: Store, beats: Store, member: Member, timeout: timedelta) -> None:
        """
        Args:
            beats: a connection of the thread's own, as a wait blocks the other one.
            timeout: of one call of the store.
        """
        self._store = store
        self._beats = beats
        self._timeout = timeout
        self._over = threading.Event()
        self._accepted: Offer | None = None
        """Accepted offer whose participants are not known yet."""
        self.join(member)
        self._thread = threads.start("epload-lease", self._beat)

    def join(self, member: Member) -> None:
        """Joins as a member, which takes the place of the one before, if any."""
        self.member, self._accepted = member, None
        self.number, self._next = answered(self._join, self._timeout)

    def _join(self) -> tuple[int, int]:
        """Returns this rank's number among all that have joined, and that of the next offer."""
        number = self._store.add("members", 1)
        post(self._store, f"member/{number}", asdict(self.member))
        posted = self._store.add("offers", 0)
        # Not the key that others wait for: looking at it would wake them.
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
        message = json.loads(self._wait(f"offer/{self._next}", timeout, "no version was offered"))
        if "over" in message:
            raise LoadError("the sender has been closed, and offers no more versions")
        offer = Offer(self._next, message["version"])
        answered(lambda: self._store.add(f"accepted/{offer.number}/{self.member.engine}", 1), self._timeout)
        self._accepted = offer
        return offer

    def wait_for_participants(self, offer: Offer, timeout: timedelta) -> Participants:
        """Returns the participants of an accepted offer. This rank is not among them if it came too late, or was taken for dead.

        Raises:
            LoadError: the sender has given up the offer, or as :meth:`accept_offer`.
        """
        why = f"version {offer.version} was offered, but the sender did not begin to send it"
        participants = Participants(**json.loads(self._wait(f"go/{offer.number}", timeout, why)))
        self._accepted, self._next = None, offer.number + 1
        if participants.failed:
            raise LoadError(participants.failed)
        return participants

    def confirm(self, offer: Offer) -> None:
        """Tells the sender that this rank knows how the offer has ended."""
        with suppress(RuntimeError):  # the sender has ended meanwhile
            answered(lambda: self._store.add(f"confirmed/{offer.number}", 1), timedelta(seconds=_BEAT_SECONDS))

    def _wait(self, key: str, timeout: timedelta, why: str) -> bytes:
        def wait() -> bytes:
            self._store.wait([key], timeout)
            return self._store.get(key)

        try:
            return answered(wait, timeout + timedelta(seconds=_BEAT_SECONDS))
        except LoadError:
            raise
        except DistStoreError:
            raise WaitTimeout(f"{why} within {timeout.total_seconds():.0f} s") from None
        except RuntimeError as error:
            raise LoadError(
                f"the sender's store is lost: {message_of(error)}; has the trainer's first rank ended?"
            ) from error

    def close(self) -> None:
        """Leaves: the sender drops this rank."""
        self._over.set()
        self._thread.join(_BEAT_SECONDS)
        with suppress(RuntimeError):
            answered(lambda: post(self._beats, f"left/{self.number}", True), timedelta(seconds=_BEAT_SECONDS))


@dataclass
class _Joined:
    """A receiving rank, as the sender sees it."""

    number: int
    member: Member
    beat: bytes | None = None
    """The last one."""
    seen: float = field(default_factory=time.monotonic)
    """Time at which the beat was first seen."""
    left: bool = False
    silent: bool = False


class Lobby:
    """The side of the sender's first rank."""

    def __init__(self, store: Store, expected: int) -> None:
        """``expected``: receiving ranks without which nothing is sent at first."""
        self._store = store
        self._expected = expected
        self._joined: dict[tuple[str, int], _Joined] = {}
        """Members by engine and rank; only the last of a rank that joined again, since no rank would come for the one before."""
        self._count = 0
        """Number of members that have joined so far."""
        self._required: tuple[str, ...] | None = None
        """Engines without which no version is sent; None before the first one."""
        self._offers = 0

    def offer(self, version: int) -> Offer:
        self._offers += 1
        if (old := self._offers - _KEPT_OFFERS) > 0:
            for key in ("offer", "go", "closed", "confirmed"):
                self._store.delete_key(f"{key}/{old}")
        post(self._store, f"offer/{self._offers}", {"version": version})
        self._store.add("offers", 1)
        return Offer(self._offers, version)

    def end(self) -> None:
        """Tells whoever waits for a version that there will be no more."""
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
                self._find_silent()
            time.sleep(min(max(waited / 8, 0.0005), 0.25))

    def wait_for_confirmation(self, offer: Offer, ranks: int, seconds: float) -> None:
        """Waits, before the store ends, until so many receivers know how the offer has ended, for ``seconds`` at most."""
        until = time.monotonic() + seconds
        while self._store.add(f"confirmed/{offer.number}", 0) < ranks and time.monotonic() < until:
            time.sleep(0.025)

    def close(self, offer: Offer, participants: Participants) -> None:
        """Tells receivers which of them take part in an offer, or why none does."""
        post(self._store, f"closed/{offer.number}", True)
        post(self._store, f"go/{offer.number}", asdict(participants))

    def _read_new(self) -> None:
        while self._count < self._store.add("members", 0):
            value = read_if_set(self._store, f"member/{self._count + 1}")
            if value is None:
                break
            self._count += 1
            member = Member(**json.loads(value))
            self._joined[member.engine, member.rank] = _Joined(self._count, member)

    def _engines(self) -> dict[str, list[Member]]:
        """Returns the ranks that have joined, of each engine of which none has left or is silent."""
        engines: dict[str, list[Member]] = {}
        for key in sorted(self._joined):
            engines.setdefault(key[0], []).append(self._joined[key].member)
        lost = {engine for (engine, _), joined in self._joined.items() if joined.left or joined.silent}
        return {engine: members for engine, members in engines.items() if engine not in lost}

    def _accepted(self, offer: Offer) -> dict[str, list[Member]]:
        counts = {engine: self._ready(offer, engine) for engine in self._engines()}
        self._read_new()  # after that: a rank that has joined anew did so before it accepted
        engines = self._engines().items()
        return {engine: ranks for engine, ranks in engines if counts.get(engine, 0) >= ranks[0].size == len(ranks)}

    def _ready(self, offer: Offer, engine: str) -> int:
        """Returns the number of an engine's ranks that have accepted an offer."""
        return self._store.add(f"accepted/{offer.number}/{engine}", 0)

    def _enough(self, accepted: dict[str, list[Member]]) -> bool:
        if self._required is None:
            return sum(map(len, accepted.values())) >= self._expected
        engines = self._engines()
        return bool(accepted) and all(engine in accepted for engine in self._required if engine in engines)

    def _find_silent(self) -> None:
        """Finds ranks that have left, whose engines are dropped until they join again, and ranks that are silent."""
        now = time.monotonic()
        for joined in self._joined.values():
            if joined.left:
                continue
            before = joined.silent
            if (beat := read_if_set(self._store, f"alive/{joined.number}")) != joined.beat:
                joined.beat, joined.seen = beat, now
            joined.silent = now - joined.seen >= LEASE_SECONDS
            joined.left = read_if_set(self._store, f"left/{joined.number}") is not None
            if (joined.left or joined.silent) and not before:
                logger.warning(
                    "engine %s takes part no more: %s left, or was silent for %.0f s",
                    joined.member.engine, joined.member, LEASE_SECONDS,
                )  # fmt: skip

    def _describe_missing(self, offer: Offer, accepted: dict[str, list[Member]], timeout: timedelta) -> str:
        missing = [(engine, ranks) for engine, ranks in self._engines().items() if engine not in accepted]
        lines = [
            f"; engine {engine}: {len(ranks)} of {ranks[0].size} ranks joined, {self._ready(offer, engine)} called "
            "receive_weights()"
            for engine, ranks in missing[:_MOST_SHOWN]
        ]
        ready = sum(map(len, accepted.values()))
        expected = self._expected if self._required is None else "all of the engines that are left, and at least one"
        return (
            f"version {offer.version}: {ready} receiving ranks are ready after {timeout.total_seconds():.0f} s, expected "
            f"{expected}{''.join(lines)}"
        )


def describe_ranks(senders: int, members: Sequence[Member]) -> str:
    """Says which ranks of an epoch are whose, for error messages."""
    engines: dict[str, list[int]] = {}
    for rank, member in enumerate(members, senders):
        engines.setdefault(member.engine, []).append(rank)
    listed = [f"{ranks[0]} to {ranks[-1]} engine {engine}'s" for engine, ranks in list(engines.items())[:_MOST_SHOWN]]
    more = f", and {len(engines) - _MOST_SHOWN} more engines" if len(engines) > _MOST_SHOWN else ""
    return f"Ranks 0 to {senders - 1} are the sender's, {', '.join(listed)}{more}."
