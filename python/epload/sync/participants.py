"""Determines the participants of each version: the sender announces it, receivers say that they are ready for it, and the sender
names those that take part.

All of it is in the store of :mod:`epload.sync.store`. Receivers wait inside the store; only the sender's first rank polls it.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store

from epload.checkpoint.manifest import Manifest
from epload.core import threads
from epload.core.log import logger
from epload.errors import LoadError, WaitTimeout, message_of
from epload.ranks.contents import fetch, publish
from epload.ranks.membership import local_network
from epload.ranks.messages import read_if_set
from epload.ranks.single_flight import Call, exclusive
from epload.ranks.topology import Topology, as_topology
from epload.sync.liveness import LEFT, Liveness
from epload.sync.liveness import Participant as Participant
from epload.sync.scope import Scope
from epload.sync.store import answered, tell

T = TypeVar("T")
_BEAT_SECONDS = 2.0
_ACKNOWLEDGMENT_SECONDS = 5.0
"""Maximum seconds that the store outlives the last version: killed ranks do not say that they know how it ended."""
_CLOSED = "the sender has been closed, and sends no more versions"
_RECENT_VERSIONS = 8
"""Number of announcements whose keys stay in the store, for receivers that are behind."""
_WARN_SECONDS, _WARN_AGAIN = 10.0, 60.0
"""Seconds that a sender waits for receivers until it logs which are missing, and until it does so again."""
OFFERS = "offers"
"""Prefix of the keys under which receivers are offered the version that other engines have."""
_MAX_LISTED = 8
"""Engines in an error message."""


@dataclass(frozen=True)
class EngineRank:
    """Identifies the engine, whose ranks commit together, and a rank of it, where ``torch.distributed`` does not."""

    name: str
    """Unique among the engines of a sender."""
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError, TypeError."""
        if not isinstance(self.name, str) or not type(self.rank) is type(self.size) is int:
            raise TypeError(f"expected a name that is a str, and a rank and a size that are ints, got {self}")
        if not self.name or "/" in self.name or not 0 <= self.rank < self.size:
            raise ValueError(f"expected a name without '/', and a rank below size, got {self}")

    def name_node(self, node: str, stage: str) -> str:
        """Returns a name of this rank's node, equal on ranks that share a machine's memory and stage versions alike."""
        return f"{self.name if node else ''} {local_network()} {node} {stage}"


def engine_of(topology: Topology | None, node: str, timeout: timedelta) -> tuple[EngineRank, str]:
    """Returns this rank of the engine that a topology is, by default the job, and its node. Collective over its ranks."""
    topology = as_topology(topology, timeout)
    control, ranks, machine = topology.control, topology.ranks, local_network()
    call = Call("WeightReceiver()", topology)
    with exclusive(call, timeout) if control.store is not None else control.load(timeout), control.guard():
        name, machines = control.agree(
            "joining a sync", None, [secrets.token_hex(4), machine],
            lambda views: [views[ranks[0]][0], [views[rank][1] for rank in ranks]],
        )  # fmt: skip
    # Emulated nodes of one machine are nodes here, too.
    if machine in (other for rank, other in zip(ranks, machines, strict=True) if rank not in topology.node):
        node = node or str(topology.nodes.index(topology.node))
    return EngineRank(name, ranks.index(topology.rank), len(ranks)), node


class Participants(NamedTuple):
    """The ranks of a generation: senders are numbered first, then receivers in this order."""

    senders: int
    receivers: tuple[Participant, ...]
    manifest: str
    """Name of the manifest among the store's contents."""
    holders: tuple[Participant, ...] = ()
    """The senders of a version that engines hand on; none if the sender's own ranks send it."""

    def publish(self, store: Store) -> str:
        """Puts them into the store; returns the name for :meth:`fetch`."""
        return publish(store, json.dumps(self).encode())

    @classmethod
    def fetch(cls, store: Store, name: str, timeout: timedelta) -> Participants:
        senders, receivers, manifest, holders = json.loads(fetch(store, name, timeout))
        ranks = (tuple(Participant(*fields) for fields in some) for some in (receivers, holders))
        return cls(senders, next(ranks), manifest, next(ranks))

    def fetch_manifest(self, store: Store, timeout: timedelta) -> tuple[Scope, Manifest]:
        """Returns the part of the sender's model that versions are, and the manifest of its tensors."""
        return Scope.decode(fetch(store, self.manifest, timeout))

    def describe(self) -> str:
        """Says which ranks belong to which job, for error messages."""
        jobs: dict[str, list[int]] = {} if self.holders else {"the sender": list(range(self.senders))}
        for rank, participant in enumerate((*self.holders, *self.receivers), len(jobs.get("the sender", ()))):
            jobs.setdefault(f"engine {participant.engine}", []).append(rank)
        texts = [
            f"rank {ranks[0]} belongs to {job}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]} belong to {job}"
            for job, ranks in jobs.items()
        ]
        more = f", and {len(texts) - _MAX_LISTED} more engines" if len(texts) > _MAX_LISTED else ""
        text = f"{', '.join(texts[:_MAX_LISTED])}{more}."
        return text[0].upper() + text[1:]


class Start(NamedTuple):
    """The sender's message once it knows the receivers of an announced version, or that it is not sent."""

    generation: int = 0
    participants: str = ""
    """Name of the :class:`Participants` in the store."""
    failed: str = ""
    """Why the sender has canceled the version; else empty."""
    key: str = ""
    """Unique among all attempts to send a version, where the next one may be sent as changes to it; else empty."""


class Announcements:
    """A series of announcements in the store, as a receiver sees it: each is open until the sender starts or cancels it."""

    def __init__(self, store: Store, timeout: timedelta) -> None:
        """``timeout``: of one call of the store; calls have a deadline, as a host that has stopped neither answers nor ends a
        connection."""
        self._store = store
        self._timeout = timeout

    def last(self) -> tuple[int, bool]:
        """Returns the number of the last announcement, 0 if there is none, and True if it is open."""

        def ask() -> tuple[int, bool]:
            number = self._store.add("announcements", 0)
            return number, number > 0 and not self._store.check([f"start/{number}"])

        return answer_of_sender(ask, self._timeout)

    def read(self, number: int, timeout: timedelta) -> Any:
        """Returns what is announced under a number, once it is."""
        return json.loads(self._wait(f"announced/{number}", timeout, "no version was announced"))

    def get_ready(self, number: int, participant: Participant) -> None:
        """Says that this rank is ready for an announcement."""
        answer_of_sender(lambda: add_rank(self._store, f"ready/{number}", participant), self._timeout)

    def wait_for_start(self, number: int, timeout: timedelta) -> Start:
        """Returns the sender's decision on an announcement. This rank takes no part if it came too late, or was taken for dead.

        Raises:
            LoadError: the sender has canceled the version, the store is lost, or there is no decision within ``timeout``.
        """
        why = "a version was announced, but the sender did not begin to send it"
        start = Start(*json.loads(self._wait(f"start/{number}", timeout, why)))
        if start.failed:
            raise LoadError(start.failed)
        return start

    def acknowledge(self, number: int = 0) -> None:
        """Tells the sender's first rank that this rank knows how an announced version, by default the last, has ended."""
        with suppress(RuntimeError):  # the sender has ended meanwhile
            answered(
                lambda: self._store.add(f"acknowledged/{number or self._store.add('announcements', 0)}", 1),
                timedelta(seconds=_BEAT_SECONDS),
            )

    def _wait(self, key: str, timeout: timedelta, why: str) -> bytes:
        def wait() -> bytes:
            self._store.wait([key], timeout)
            return self._store.get(key)

        try:
            return answer_of_sender(wait, timeout + timedelta(seconds=_BEAT_SECONDS))
        except DistStoreError:
            raise WaitTimeout(f"{why} within {timeout.total_seconds():.0f} s") from None


def answer_of_sender(call: Callable[[], T], timeout: timedelta) -> T:
    """Returns the result of a call of the store. Raises LoadError if the store is lost, and DistStoreError as the call does."""
    try:
        return answered(call, timeout)
    except (LoadError, DistStoreError):
        raise
    except RuntimeError as error:
        raise LoadError(f"the sender's store is lost: {message_of(error)}; has the trainer's first rank ended?") from error


def call_key(number: int) -> str:
    """Returns the key on which a thread of a receiver waits for calls. One with no content says that either side is closed."""
    return f"{OFFERS}/call/{number}"


class ReceiverRendezvous:
    """A receiver's side. Its thread notifies the sender that the process is alive."""

    def __init__(self, store: Store, beats: Store, engine: EngineRank, timeout: timedelta) -> None:
        """
        Args:
            beats: a connection of the thread's own, as a wait blocks the other one.
            timeout: of one call of the store.

        Raises:
            LoadError: the store is lost, or does not answer in time.
        """
        self._beats = beats
        self._closed = threading.Event()
        self._ended = False
        """The sender has been closed, and with it its store."""
        self._undecided = 0
        """Number of the announcement for which this rank was ready and whose start it has not read; 0 if there is none."""
        self.versions = Announcements(store, timeout)
        """The versions that the sender sends."""
        number = answer_of_sender(lambda: store.add("receivers", 1), timeout)
        process = f"process {os.getpid()} on {os.uname().nodename}"
        self.participant = Participant(engine.name, engine.rank, engine.size, process, number)
        self._key = f"alive/{number}"
        answer_of_sender(lambda: beats.set(self._key, "0"), timeout)
        self._thread = threads.start("epload-lease", self._beat)

    def _beat(self) -> None:
        count = 0
        with suppress(RuntimeError):  # the store is lost, which calls that wait for it notice
            while not self._closed.wait(_BEAT_SECONDS):
                count += 1
                self._beats.set(self._key, str(count))

    def end(self, store: Store) -> None:
        """Called by a thread that learns that the sender has been closed. ``store``: its connection."""
        self._ended = True
        self._closed.set()
        self._thread.join(_BEAT_SECONDS)
        store.set(self._key, LEFT)  # type: ignore[arg-type]

    def join_again(self) -> None:
        """Makes all that take part with this rank from now on form a new generation."""
        self.participant = self.participant._replace(joined=self.participant.joined + 1)

    def get_ready(self, timeout: timedelta) -> tuple[int, int]:
        """Waits for the next version, or takes the one that is open: this rank is ready to receive it.

        Returns:
            The number of the announcement, and the version.

        Raises:
            LoadError: the sender has been closed, the store is lost, or there is no announcement within ``timeout``.
        """
        last, is_open = self.last()
        number = last if is_open or (last and last == self._undecided) else last + 1
        version = self.versions.read(number, timeout)
        if version is None:
            raise LoadError(_CLOSED)
        self.versions.get_ready(number, self.participant)
        return number, version

    def wait_for_start(self, number: int, timeout: timedelta) -> Start:
        """See :meth:`Announcements.wait_for_start`. After a timeout or an interrupt, the sender still counts on this rank: the
        next call is ready for the same version."""
        self._undecided = number
        try:
            start = self.versions.wait_for_start(number, timeout)
        except LoadError as error:
            self._undecided = number if isinstance(error, WaitTimeout) else 0
            raise
        self._undecided = 0
        return start

    def last(self) -> tuple[int, bool]:
        """See :meth:`Announcements.last`. Raises LoadError also if the sender has been closed."""
        if self._ended:
            raise LoadError(_CLOSED)
        return self.versions.last()

    def close(self) -> None:
        """Leaves: the sender drops this rank."""
        self._closed.set()
        with suppress(RuntimeError):  # this is the thread, in which the garbage collector has found the receiver
            self._thread.join(_BEAT_SECONDS)
        if self._ended:
            return
        tell(lambda: self._beats.set(self._key, LEFT), timedelta(seconds=_BEAT_SECONDS))  # type: ignore[arg-type]


Engines = dict[str, list[Participant]]
"""Ranks of each engine that are known, by the engine's name."""


class SenderRendezvous:
    """The side of the sender's first rank."""

    def __init__(self, store: Store, expected: int, prefix: str = "") -> None:
        """
        Args:
            expected: receiving ranks without which nothing is sent at first.
            prefix: of the keys of the announcements.
        """
        self._receivers = store
        self._store = PrefixStore(prefix, store) if prefix else store
        self._expected = expected
        self._required: Engines = {}
        """The engines of the version before; those that are still alive must be ready for the next one."""
        self._liveness = Liveness(store)
        self._next_look = 0.0
        self._number = 0
        """Number of the last announcement."""
        descriptors, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], expected * 4 + 256
        if descriptors < needed:
            text = "%d receiving ranks need at least %d file descriptors in the sender's first rank, which may have %d: ulimit -n"
            logger.warning(text, expected, needed, descriptors)

    def announce(self, version: Any) -> int:
        """Announces a version, or an offer; None says that there will be no more. Returns the number of the announcement."""
        self._number += 1
        self._next_look = 0.0
        if (old := self._number - _RECENT_VERSIONS) > 0:
            for key in ("announced", "ready", "start", "acknowledged"):
                self._store.delete_key(f"{key}/{old}")
        self._store.set(f"announced/{self._number}", json.dumps(version))
        self._store.add("announcements", 1)
        return self._number

    def gather(self, version: int, timeout: timedelta, check: Callable[[], None]) -> tuple[Participant, ...]:
        """Waits for the engines that have to be ready for the announced version: at first so many that their ranks are
        ``expected``, later those of the version before that are still alive. Returns the ranks of all that are ready, ordered.

        Args:
            check: called now and then; may raise.

        Raises:
            LoadError: they are not within ``timeout``; names them.
        """
        began, next_warning = time.monotonic(), _WARN_SECONDS
        while True:
            engines, complete = self.ready_engines()
            waited = time.monotonic() - began
            missing = self._alive(self._required).keys() - complete.keys()
            count = sum(map(len, complete.values()))
            if count >= (1 if self._required else self._expected) and not missing:
                self._required = complete
                return in_order(complete)
            if waited >= min(next_warning, timeout.total_seconds()):
                expected = "all of the engines that are left, and at least one" if self._required else str(self._expected)
                text = (
                    f"version {version}: {count} receiving rank{'s' * (count != 1)} ready after {waited:.0f} s, "
                    f"expected {expected}{self._describe_missing(engines, complete)}"
                )
                if waited >= timeout.total_seconds():
                    raise WaitTimeout(text)
                logger.warning("%s", text)
                next_warning += _WARN_AGAIN
            check()
            time.sleep(min(0.0005 + waited / 8, 0.25))

    def ready_engines(self, others: Iterable[Participant] = ()) -> tuple[Engines, Engines]:
        """Returns the engines of which some ranks are ready for what was announced, and those that are alive and complete.

        Args:
            others: whose beats are looked at, too; see :meth:`alive`.
        """
        engines, now = read_engines(self._store, f"ready/{self._number}"), time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _BEAT_SECONDS
            heard = self._liveness.look([*in_order(engines), *in_order(self._required), *others], now)
            self.require({participant.engine: [participant] for participant in heard} | self._required)
        return engines, {name: ranks for name, ranks in self._alive(engines).items() if len(ranks) == ranks[0].size}

    def check(self, receivers: Sequence[Participant]) -> None:
        """Raises LoadError if one of the receivers that are to take part has left or is silent. Looks now and then."""
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + _BEAT_SECONDS
        self._liveness.look(receivers, now)
        if lost := [receiver for receiver in receivers if receiver.number in self._liveness.lost]:
            raise LoadError(f"{lost[0]} has left or is silent")

    def require(self, engines: Engines) -> None:
        """Says that engines, as far as they are alive, must be ready for the next version, too."""
        if self._required:
            self._required = self._required | engines

    def _alive(self, engines: Engines) -> Engines:
        return {name: ranks for name, ranks in engines.items() if len(self.alive(ranks)) == len(ranks)}

    def alive(self, participants: Iterable[Participant]) -> tuple[Participant, ...]:
        """Returns those that had neither left nor been silent for long when their beats were last looked at."""
        return tuple(participant for participant in participants if participant.number not in self._liveness.lost)

    def _describe_missing(self, engines: Engines, complete: Engines) -> str:
        missing = [(name, ranks[0].size) for name, ranks in (self._alive(self._required) | engines).items()]
        texts = [
            f"; engine {name}: {len(engines.get(name, ()))} of {size} ranks called receive_weights()"
            for name, size in missing
            if name not in complete
        ]
        processes: dict[tuple[str, int], dict[int, str]] = {}
        for participant in self.alive(_read_ranks(self._store, f"ready/{self._number}")):
            processes.setdefault((participant.engine, participant.rank), {})[participant.number] = participant.process
        texts += [
            f"; {' and '.join(twice.values())} are rank {rank} of engine {name}: if they are alive, give each a name of its own"
            for (name, rank), twice in processes.items()
            if len(twice) > 1
        ]
        return "".join(texts[:_MAX_LISTED])

    def start(self, start: Start) -> None:
        """Tells receivers which of them take part in the announced version, or why none does."""
        self._store.set(f"start/{self._number}", json.dumps(start))

    def acknowledged(self) -> int:
        """Returns how many ranks know how what was announced last has ended."""
        return self._store.add(f"acknowledged/{self._number}", 0)

    def end(self, unacknowledged: int) -> None:
        """Says that there are no more versions, once so many ranks know how the last one has ended, for which they need the
        store. Waits a moment until receivers know that, too."""
        until = time.monotonic() + _ACKNOWLEDGMENT_SECONDS
        while self.acknowledged() < unacknowledged and time.monotonic() < until:
            time.sleep(0.025)
        self.announce(None)
        for number in range(1, self._receivers.add("receivers", 0) + 1):
            self._receivers.set(call_key(number), "")
        beats = [f"alive/{participant.number}" for participant in in_order(self._alive(self._required))]
        until = time.monotonic() + _BEAT_SECONDS
        while beats and {*self._receivers.multi_get(beats)} != {LEFT} and time.monotonic() < until:
            time.sleep(0.01)


def add_rank(store: Store, key: str, participant: Participant) -> None:
    """Adds a rank to those of a key; see :func:`read_engines`."""
    store.append(key, json.dumps(participant) + "\n")  # type: ignore[attr-defined]


def read_engines(store: Store, *keys: str) -> Engines:
    """Returns the ranks that have said something, under any of the keys; the last process of each. An engine that was started
    again has the size that its last rank says."""
    ranks = _read_ranks(store, *keys)
    sizes = {rank.engine: rank.size for rank in ranks}
    last = {(rank.engine, rank.rank): rank for rank in ranks if rank.size == sizes[rank.engine]}
    engines: Engines = {}
    for key in sorted(last):
        engines.setdefault(key[0], []).append(last[key])
    return engines


def _read_ranks(store: Store, *keys: str) -> list[Participant]:
    lines = b"".join(read_if_set(store, key) or b"" for key in keys)
    return [Participant(*json.loads(line)) for line in lines.splitlines()]


def in_order(engines: Engines) -> tuple[Participant, ...]:
    """Returns the ranks of all engines, engine by engine."""
    return tuple(rank for engine in sorted(engines) for rank in engines[engine])
