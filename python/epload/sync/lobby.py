"""Determines the participants of a sync: the sender offers a version, receivers say that they are ready for it, and the sender
names those that take part.

All of it is in the store of :mod:`epload.sync.store`. A receiver waits without asking; only the sender's first rank, alone, looks
again and again while it waits for receivers.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

from epload.core import threads
from epload.core.log import logger
from epload.errors import LoadError, WaitTimeout, message_of
from epload.ranks.contents import fetch, publish
from epload.ranks.messages import read_if_set
from epload.sync.store import answered

LEASE_SECONDS = 10.0
"""A receiver that has been silent for so long is dropped."""
_BEAT_SECONDS = 2.0
_LEFT = b"left"
"""The last beat of a receiver that leaves."""
_RECENT_OFFERS = 8
"""Number of offers whose keys stay in the store, for receivers that are behind."""
_MAX_LISTED = 8
"""Engines in an error message."""


class Member(NamedTuple):
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
    number: int
    """Unique among the receivers of a sender."""
    joined: int = 0
    """Grows each time that it has left an epoch, of which it then knows nothing any more."""

    def __str__(self) -> str:
        return f"rank {self.rank} of engine {self.engine} (process {self.pid} on {self.host})"


class Participants(NamedTuple):
    """The sender's message once it knows the receivers of an offered version, or that there are none."""

    epoch: int = 0
    members: str = ""
    """Name of the receivers, in the order of their ranks; see :func:`fetch_members`."""
    manifest: str = ""
    """Name of the manifest among the store's contents."""
    senders: int = 0
    """Number of ranks that send; they are numbered before the receivers."""
    failed: str = ""
    """Why the sender has canceled the offer; else empty."""


def publish_members(store: Store, members: Sequence[Member]) -> str:
    """Puts the receivers of an epoch into the store; returns the name for :func:`fetch_members`."""
    return publish(store, json.dumps(members).encode())


def fetch_members(store: Store, name: str, timeout: timedelta) -> tuple[Member, ...]:
    return tuple(Member(*member) for member in json.loads(fetch(store, name, timeout)))


class Attendance:
    """A receiver's side. Its thread tells the sender that the process is alive.

    Calls of the store have a deadline, as a host that has stopped neither answers nor ends a connection.
    """

    def __init__(
        self, store: Store, beats: Store, engine: str, rank: int, size: int, node: str, timeout: timedelta
    ) -> None:
        """
        Args:
            beats: a connection of the thread's own, as a wait blocks the other one.
            timeout: of one call of the store.
        """
        self._store = store
        self._beats = beats
        self._timeout = timeout
        self._over = threading.Event()
        self._accepted: tuple[int, Member] | None = None
        number = answered(lambda: store.add("receivers", 1), timeout)
        self.member = Member(engine, rank, size, node, os.uname().nodename, os.getpid(), number)
        self._alive = f"alive/{number}"
        answered(lambda: beats.set(self._alive, "0"), timeout)
        self._thread = threads.start("epload-lease", self._beat)

    def _beat(self) -> None:
        count = 0
        with suppress(RuntimeError):  # the store is lost, which whoever waits for it hears
            while not self._over.wait(_BEAT_SECONDS):
                count += 1
                self._beats.set(self._alive, str(count))

    def join_again(self) -> None:
        """Makes all that take part with this rank from now on form a new epoch."""
        self.member = self.member._replace(joined=self.member.joined + 1)

    def accept_offer(self, timeout: timedelta) -> tuple[int, int]:
        """Waits for the next offer, or takes the one that is open: this rank is ready to receive it.

        Returns:
            The number of the offer, and the version.

        Raises:
            LoadError: the store is lost, or there is no offer within ``timeout``.
        """
        number = answered(self._next_offer, self._timeout)
        version = json.loads(self._wait(f"offer/{number}", timeout, "no version was offered"))
        if version is None:
            raise LoadError("the sender has been closed, and offers no more versions")
        if self._accepted != (number, self.member):
            line = json.dumps(self.member) + "\n"
            answered(lambda: self._store.append(f"ready/{number}", line), self._timeout)  # type: ignore[attr-defined]
            self._accepted = number, self.member
        return number, version

    def _next_offer(self) -> int:
        number = self._store.add("offers", 0)
        return number if number and not self._store.check([f"go/{number}"]) else number + 1

    def wait_for_participants(self, number: int, timeout: timedelta) -> Participants:
        """Returns the participants of an accepted offer. This rank is not among them if it came too late, or was taken for dead.

        Raises:
            LoadError: the sender has canceled the offer, or as :meth:`accept_offer`.
        """
        why = "a version was offered, but the sender did not begin to send it"
        participants = Participants(*json.loads(self._wait(f"go/{number}", timeout, why)))
        if participants.failed:
            raise LoadError(participants.failed)
        return participants

    def confirm(self, number: int) -> None:
        """Tells the sender that this rank knows how an offer has ended."""
        with suppress(RuntimeError):  # the sender has ended meanwhile
            answered(lambda: self._store.add(f"confirmed/{number}", 1), timedelta(seconds=_BEAT_SECONDS))

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
            answered(lambda: self._beats.set(self._alive, _LEFT), timedelta(seconds=_BEAT_SECONDS))  # type: ignore[arg-type]


class Lobby:
    """The side of the sender's first rank."""

    def __init__(self, store: Store, expected: int) -> None:
        """``expected``: receiving ranks without which nothing is sent at first."""
        self._store = store
        self._expected = expected
        self._required: dict[str, list[Member]] = {}
        """The engines of the version before; those that are still alive must be ready for the next one."""
        self._beats: dict[int, tuple[bytes, float]] = {}
        """Last beat of each receiver, and the time at which it was first seen."""
        self._lost: set[int] = set()
        """Numbers of the receivers that have left or are silent."""
        self._offers = 0

    def offer(self, version: int) -> int:
        """Offers a version; returns the number of the offer."""
        self._offers += 1
        if (old := self._offers - _RECENT_OFFERS) > 0:
            for key in ("offer", "ready", "go", "confirmed"):
                self._store.delete_key(f"{key}/{old}")
        self._store.set(f"offer/{self._offers}", json.dumps(version))
        self._store.add("offers", 1)
        return self._offers

    def end(self) -> None:
        """Tells whoever waits for a version that there will be no more."""
        self._store.set(f"offer/{self._offers + 1}", json.dumps(None))

    def gather(self, version: int, timeout: timedelta, check: Callable[[], None]) -> tuple[Member, ...]:
        """Waits until all engines are ready for the last offer that have to be: at first so many that their ranks are
        ``expected``, later those of the version before that are still alive. Returns the ranks of all that are, ordered.

        Args:
            check: called now and then; may raise.

        Raises:
            LoadError: they are not within ``timeout``; names them.
        """
        began, looked = time.monotonic(), 0.0
        while True:
            engines = self._called()
            waited = time.monotonic() - began
            if waited >= looked:
                looked = waited + _BEAT_SECONDS
                self._find_lost([member for ranks in (*engines.values(), *self._required.values()) for member in ranks])
            ready = {
                name: ranks for name, ranks in engines.items() if self._alive(ranks) and len(ranks) == ranks[0].size
            }
            if self._enough(ready):
                self._required = ready
                return tuple(member for engine in sorted(ready) for member in ready[engine])
            if waited >= timeout.total_seconds():
                raise WaitTimeout(self._describe_missing(version, engines, ready, timeout))
            check()
            time.sleep(min(max(waited / 8, 0.0005), 0.25))

    def _called(self) -> dict[str, list[Member]]:
        """Returns the ranks that have called receive_weights() since the last offer; the last process of each."""
        lines = read_if_set(self._store, f"ready/{self._offers}") or b""
        members = (Member(*json.loads(line)) for line in lines.splitlines())
        last = {(member.engine, member.rank): member for member in members}
        engines: dict[str, list[Member]] = {}
        for key in sorted(last):
            engines.setdefault(key[0], []).append(last[key])
        return engines

    def _alive(self, ranks: Sequence[Member]) -> bool:
        return not any(member.number in self._lost for member in ranks)

    def _enough(self, ready: dict[str, list[Member]]) -> bool:
        if not self._required:
            return sum(map(len, ready.values())) >= self._expected
        return bool(ready) and all(name in ready for name, ranks in self._required.items() if self._alive(ranks))

    def _find_lost(self, members: Sequence[Member]) -> None:
        now = time.monotonic()
        by_number = {member.number: member for member in members}
        beats = self._store.multi_get([f"alive/{number}" for number in by_number]) if by_number else []
        for (number, member), beat in zip(by_number.items(), beats, strict=True):
            last, seen = self._beats.get(number, (None, now))
            seen = seen if beat == last else now
            self._beats[number] = beat, seen
            lost = beat == _LEFT or now - seen >= LEASE_SECONDS
            if lost and number not in self._lost:
                logger.warning("engine %s takes part no more: %s has left or is silent", member.engine, member)
            (self._lost.add if lost else self._lost.discard)(number)

    def _describe_missing(
        self, version: int, called: dict[str, list[Member]], ready: dict[str, list[Member]], timeout: timedelta
    ) -> str:
        required = {name: ranks for name, ranks in self._required.items() if self._alive(ranks)}
        missing = [(name, ranks[0].size) for name, ranks in (required | called).items() if name not in ready]
        lines = [
            f"; engine {name}: {len(called.get(name, ()))} of {size} ranks called receive_weights()"
            for name, size in missing[:_MAX_LISTED]
        ]
        count = sum(map(len, ready.values()))
        expected = "all of the engines that are left, and at least one" if self._required else self._expected
        return (
            f"version {version}: {count} receiving ranks are ready after {timeout.total_seconds():.0f} s, expected "
            f"{expected}{''.join(lines)}"
        )

    def close(self, participants: Participants) -> None:
        """Tells receivers which of them take part in the last offer, or why none does."""
        self._store.set(f"go/{self._offers}", json.dumps(participants))

    def wait_for_confirmation(self, ranks: int, seconds: float) -> None:
        """Waits, before the store ends, until so many receivers know how the last offer has ended; ``seconds`` at most."""
        until = time.monotonic() + seconds
        while self._store.add(f"confirmed/{self._offers}", 0) < ranks and time.monotonic() < until:
            time.sleep(0.025)


def describe_ranks(senders: int, members: Sequence[Member]) -> str:
    """Says which ranks of an epoch are whose, for error messages."""
    engines: dict[str, list[int]] = {}
    for rank, member in enumerate(members, senders):
        engines.setdefault(member.engine, []).append(rank)
    listed = [f"{ranks[0]} to {ranks[-1]} engine {engine}'s" for engine, ranks in list(engines.items())[:_MAX_LISTED]]
    more = f", and {len(engines) - _MAX_LISTED} more engines" if len(engines) > _MAX_LISTED else ""
    return f"Ranks 0 to {senders - 1} are the sender's, {', '.join(listed)}{more}."
