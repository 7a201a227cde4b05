"""Hands the version that engines have on to engines that join, while the trainer trains.

The sender's first rank offers the version that nodes keep in host memory, in a thread. Engines that have none say that they are
ready for it. The thread then calls the ranks that hold it, which send it, in threads of their own, in a generation in which they
are the senders: each byte leaves them once, and goes along the chain of the nodes that join together. Whatever a rank that holds
it is doing meanwhile goes on. If its next version begins to come, it stops sending, and those that join start again.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

from epload.checkpoint.manifest import Manifest
from epload.core import dtypes, threads
from epload.core.attempt import Attempt
from epload.core.default_device import on_cpu
from epload.core.log import logger
from epload.errors import LoadError, message_of
from epload.planning.holdings import NO_PART, Holdings, full_holdings
from epload.ranks.contents import fetch
from epload.ranks.messages import read_if_set
from epload.sync.devices import DeviceAccess
from epload.sync.generation import Generation
from epload.sync.joining import JoinMessage
from epload.sync.liveness import Participant
from epload.sync.node_version import NodeVersion
from epload.sync.participants import (
    OFFERS,
    Announcements,
    Engines,
    Participants,
    ReceiverRendezvous,
    SenderRendezvous,
    Start,
    add_rank,
    answer_of_sender,
    call_key,
    in_order,
    read_engines,
)
from epload.sync.report import SyncReport
from epload.sync.scope import Scope
from epload.sync.store import tell

TIMEOUT = timedelta(seconds=30)
"""Time without progress after which a version that is handed on has failed; then other ranks send it."""
_GATHER_SECONDS = 0.1
"""Seconds that the first engine which is ready waits for others, which then get the version together with it."""
_POLL_SECONDS, _IDLE_SECONDS = 0.02, 0.1
"""Seconds between two looks, and where nothing may happen for long."""
_MIN_PAUSE, _MAX_PAUSE = 0.02, 0.25
"""Seconds between two looks of a receiver that waits for whichever version comes first."""
WAITING = "waiting"
"""Key of the ranks without a version, for which the next one has to wait."""
_FOREVER, _CLOSING = timedelta(days=365), timedelta(seconds=2)
_HOLDERS, _ANSWERS = f"{OFFERS}/holders", f"{OFFERS}/answers"
"""Keys of the ranks that have received what was offered and can hand it on, and of those that answer a call."""
_ANSWER_SECONDS = 2.0
"""Maximum seconds until a rank that is called answers."""
_HOLD_SECONDS = 5.0
"""Maximum seconds until a rank that is called knows that it has the version, as the sender does."""


class Offer(NamedTuple):
    """A version that engines can hand on."""

    version: int
    manifest: str
    """Name among the store's contents of the manifest with the dtypes in which the tensors were received."""
    original: str
    """The same with the sender's own dtypes."""
    verify: bool
    """See :class:`epload.WeightSender`."""


class Offers:
    """Offers versions to engines that join. Runs in a thread of the sender's first rank."""

    def __init__(self, connect: Callable[[], Store]) -> None:
        """``connect``: returns a connection to the sender's store, for the thread."""
        self._connect = connect
        self._changed = threading.Condition()
        self._offered: tuple[Offer, tuple[Participant, ...]] | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._joining: tuple[Participant, ...] = ()
        """Ranks to which a version is handed on."""

    def offer(self, offer: Offer, holders: Sequence[Participant]) -> None:
        """``holders``: the ranks whose nodes have the version in host memory."""
        with self._changed:
            self._offered = (offer, tuple(holders)) if holders else None
            self._changed.notify()
        if self._thread is None and holders:
            self._thread = threads.start("epload-offers", self._run)
            atexit.register(self._end)

    def withdraw(self, store: Store) -> Engines:
        """Called before the next version is sent: nobody starts to hand on the one before any more.

        Args:
            store: a connection of the caller.

        Returns:
            The engines that have joined since, or are about to: the next version is for them, too. It does not wait for those to
            which a version is handed on just now.
        """
        with self._changed:
            self._offered = None
            joining = self._joining
        number = store.add(f"{OFFERS}/announcements", 0)
        if joining and store.add(f"{OFFERS}/acknowledged/{number}", 0) == len(joining):
            joining = ()  # they have it, which the thread has yet to see
        busy = {rank.engine for rank in joining}
        keys = [WAITING]
        if number and not store.check([f"{OFFERS}/start/{number}"]):
            keys.insert(0, f"{OFFERS}/ready/{number}")
        waiting = read_if_set(store, WAITING)
        engines = read_engines(store, *keys).items()
        if waiting:
            store.compare_set(WAITING, waiting, "")  # type: ignore[arg-type]  # unless another one waits since
        return {name: ranks for name, ranks in engines if len(ranks) == ranks[0].size and name not in busy}

    def close(self) -> None:
        """Ends the thread."""
        self._end()
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self._end)

    def _end(self) -> None:
        with self._changed:
            self._offered, self._closed = None, True
            self._changed.notify()

    @on_cpu
    def _run(self) -> None:
        try:
            store = self._connect()
            rendezvous = SenderRendezvous(store, 1, OFFERS)
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._offered)
                    if self._closed:
                        return
                    offered = self._offered
                assert offered is not None
                try:
                    self._hand_on(store, rendezvous, *offered)
                except BaseException:
                    with suppress(RuntimeError):
                        rendezvous.start(Start())
                    raise
        except (LoadError, RuntimeError) as error:  # the store has ended
            if not self._closed:
                logger.warning("engines that join have to wait for the next version: %s", message_of(error))

    def _hand_on(self, store: Store, rendezvous: SenderRendezvous, offer: Offer, holders: tuple[Participant, ...]) -> None:
        """Has a version handed on to the engines that are ready for it first."""
        number = rendezvous.announce(offer)
        joining = self._gather(rendezvous, offer, holders)
        answering = self._call(store, number, offer, rendezvous.alive(holders)) if joining else ()
        with self._changed:  # a version that is announced from now on does not wait for these
            self._joining = joining if answering and self._is_offered(offer) else ()
        if not self._joining:
            rendezvous.start(Start())
            self._replace(offer, rendezvous.alive(holders))
            return
        participants = Participants(len(answering), joining, offer.manifest, answering)
        try:
            rendezvous.start(Start(-number, participants.publish(store)))
            everyone = (*joining, *answering)
            while rendezvous.acknowledged() < len(joining) and self._is_offered(offer):
                rendezvous.ready_engines(everyone)
                if len(rendezvous.alive(everyone)) < len(everyone):
                    break
                time.sleep(_POLL_SECONDS)
        finally:
            self._joining = ()
        received = in_order(read_engines(store, f"{_HOLDERS}/{number}"))
        self._replace(offer, (*rendezvous.alive(holders), *received))
        for key in (_HOLDERS, _ANSWERS):
            store.delete_key(f"{key}/{number}")

    def _gather(self, rendezvous: SenderRendezvous, offer: Offer, holders: tuple[Participant, ...]) -> tuple[Participant, ...]:
        """Waits for engines that are ready; returns their ranks, none if the offer is withdrawn."""
        first_seen = 0.0
        while self._is_offered(offer):
            _, complete = rendezvous.ready_engines(holders)
            if complete:
                first_seen = first_seen or time.monotonic()
                if time.monotonic() - first_seen >= _GATHER_SECONDS:
                    return in_order(complete)
            if not rendezvous.alive(holders):
                break
            time.sleep(_POLL_SECONDS if complete else _IDLE_SECONDS)
        return ()

    def _call(self, store: Store, number: int, offer: Offer, holders: tuple[Participant, ...]) -> tuple[Participant, ...]:
        """Calls ranks to hand on a version. Returns those that answer: others may have ended a moment ago."""
        call = json.dumps([number, offer.version])
        store.multi_set([call_key(holder.number) for holder in holders], [call] * len(holders))  # type: ignore[attr-defined]
        until, numbers = time.monotonic() + _ANSWER_SECONDS, set[int]()
        while len(numbers) < len(holders) and time.monotonic() < until and self._is_offered(offer):
            time.sleep(_POLL_SECONDS)
            numbers = {answer.number for answer in in_order(read_engines(store, f"{_ANSWERS}/{number}"))}
        return tuple(holder for holder in holders if holder.number in numbers)

    def _is_offered(self, offer: Offer) -> bool:
        return self._offered is not None and self._offered[0] is offer

    def _replace(self, offer: Offer, holders: tuple[Participant, ...]) -> None:
        """Goes on with other ranks that hold a version, unless the offer was withdrawn."""
        with self._changed:
            if self._is_offered(offer):
                self._offered = (offer, holders) if holders else None


class Joining:
    """A receiver that has no version yet, or an older one, and may get that of other engines."""

    def __init__(self, store: Store, rendezvous: ReceiverRendezvous, timeout: timedelta) -> None:
        self._store = store
        self._rendezvous = rendezvous
        self._timeout = timeout
        self._offers = Announcements(PrefixStore(OFFERS, store), timeout)

    def find_offer(
        self, after: int, only: int | None, holdings_of: Callable[[Scope, Manifest], Holdings], timeout: timedelta
    ) -> tuple[int, Offer] | None:
        """Waits until a version is open, or one that other engines have. Returns the offer of these, with its number; None if
        this rank has to wait for the sender's next version, as it does also before the sender's first.

        Args:
            after: version that this rank has.
            only: the only version that is right; None for any.
            holdings_of: returns what this rank needs of the sender's tensors. Raises ModelMismatch.
        """
        pause, until = _MIN_PAUSE, time.monotonic() + timeout.total_seconds()
        while time.monotonic() < until:
            last, is_open = self._rendezvous.last()
            if not last or is_open:
                break
            number, is_offered = self._offers.last()
            if is_offered:
                offer = Offer(*self._offers.read(number, self._timeout))
                if only in (None, offer.version) and offer.version > after and self._is_same(offer, holdings_of):
                    return number, offer
            if pause == _MIN_PAUSE:  # versions are open for a moment only: the next one waits for this rank
                answer_of_sender(lambda: add_rank(self._store, WAITING, self._rendezvous.participant), self._timeout)
            if is_offered:
                break
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)
        return None

    def _is_same(self, offer: Offer, holdings_of: Callable[[Scope, Manifest], Holdings]) -> bool:
        """Returns True if what engines have is what the sender would send to this rank."""
        scope, original = Scope.decode(fetch(self._store, offer.original, self._timeout))
        holdings = holdings_of(scope, original)
        _, received = Scope.decode(fetch(self._store, offer.manifest, self._timeout))
        columns = zip(original.names, holdings.class_of.tolist(), original.dtypes, received.dtypes, strict=True)
        for name, number, of_sender, of_engines in columns:
            if number == NO_PART or of_sender == of_engines:
                continue
            if holdings.classes[number].dtype != of_engines:
                logger.info(
                    "waiting for the sender's next version, as other engines have %s in %s",
                    name,
                    dtypes.name(of_engines),
                )
                return False
        return True

    def get_ready(self, number: int) -> tuple[Start, Participants] | None:
        """Takes part in an offer; returns None if this rank came too late for it, or it was withdrawn. Raises LoadError."""
        participant = self._rendezvous.participant
        self._offers.get_ready(number, participant)
        if self._offers.last()[0] != number:
            return None
        start = self._offers.wait_for_start(number, self._timeout)
        if not start.participants:
            return None
        participants = Participants.fetch(self._store, start.participants, self._timeout)
        return (start, participants) if participant in participants.receivers else None

    def end(self, number: int, received: bool, holds: bool) -> None:
        """Says how the offer in which this rank has taken part has ended. ``holds``: whether it can hand the version on."""
        keys = [WAITING] * received + [f"{_HOLDERS}/{number}"] * (received and holds)
        with suppress(RuntimeError):  # the sender has ended meanwhile
            for key in keys:
                add_rank(self._store, key, self._rendezvous.participant)
        self._offers.acknowledge(number)


class Holder:
    """Hands on the version that a receiver's node has in host memory. Its thread waits for calls, of which the last says that the
    sender has been closed."""

    def __init__(self, calls: Store, rendezvous: ReceiverRendezvous, node: str, verify: bool) -> None:
        """
        Args:
            calls: a connection to the sender's store, for the thread alone.
            rendezvous: that of this rank.
            node: equal on ranks that share a machine's memory.
            verify: see :class:`epload.WeightSender`.
        """
        self._calls = calls
        self._rendezvous = rendezvous
        self._participant = rendezvous.participant
        self._key = call_key(self._participant.number)
        self._node = node
        self._verify = verify
        self._changed = threading.Condition()
        self._version: tuple[int, NodeVersion] | None = None
        self._generation: Generation | None = None
        """The generation in which a version is handed on."""
        self._closed = False
        self._thread = threads.start("epload-hand-on", self._run)

    def hold(self, version: int, node_version: NodeVersion) -> None:
        """Says that a version has come as a whole."""
        with self._changed:
            self._version = version, node_version
            self._changed.notify_all()

    def release(self) -> None:
        """Called before anything changes the memory of the node: what is on its way out of it counts no more."""
        with self._changed:
            self._version = None

    def close(self, store: Store) -> None:
        """Ends the thread. ``store``: a connection of the caller."""
        self.release()
        self._closed = True
        if (generation := self._generation) is not None:
            generation.control.abort(LoadError("a rank that hands on a version has left"))
        if self._thread.is_alive():
            tell(lambda: store.set(self._key, ""), _CLOSING)  # unless the sender's store has ended, and with it the wait
            with suppress(RuntimeError):  # this is the thread, in which the garbage collector has found the receiver
                self._thread.join(_CLOSING.total_seconds())

    @on_cpu
    def _run(self) -> None:
        with suppress(RuntimeError):  # the sender's store has ended
            store = self._calls
            while not self._closed:
                store.wait([self._key], _FOREVER)
                content = store.get(self._key)
                store.delete_key(self._key)
                if not content:  # the end
                    if not self._closed:
                        self._rendezvous.end(store)
                    return
                number, version = json.loads(content)
                try:
                    self._hand_on(store, number, version)
                except Exception as error:  # those that join get the same error, and start again
                    logger.warning("version %d was not handed on: %s", version, message_of(error))

    def _hand_on(self, store: Store, number: int, version: int) -> None:
        """Answers a call. ``number``: of the offer."""
        current = self._wait_for(version)
        add_rank(store, f"{_ANSWERS}/{number}", self._participant)
        start = Announcements(PrefixStore(OFFERS, store), TIMEOUT).wait_for_start(number, TIMEOUT)
        if not start.participants:
            return
        participants = Participants.fetch(store, start.participants, TIMEOUT)
        numbers = [holder.number for holder in participants.holders]
        if self._participant.number not in numbers:
            return  # it has answered too late
        _, manifest = participants.fetch_manifest(store, TIMEOUT)
        contents = Attempt(lambda: current[1].contents(manifest))
        message = JoinMessage(f"holder {self._node}", self._verify, DeviceAccess())

        def check() -> None:
            if self._version is not current:
                raise LoadError(f"a rank that hands on version {version} receives the next one")

        holdings = contents.result[0] if contents.result is not None else full_holdings((), ())
        self._generation = generation = Generation(
            store, TIMEOUT, start.generation, participants, numbers.index(self._participant.number), message, manifest,
            holdings, contents.failure, node_version=None,
        )  # fmt: skip
        try:
            report = SyncReport(version=version)
            generation.sync(start, contents.value[1], report, check=check)
            logger.info("handed on: %s", report.summary)
        finally:
            self._generation = None
            generation.close()

    def _wait_for(self, version: int) -> tuple[int, NodeVersion]:
        """Returns what this rank holds. Raises LoadError if that is not the version."""
        with self._changed:
            self._changed.wait_for(lambda: self._version and self._version[0] >= version, _HOLD_SECONDS)
            if self._version is None or self._version[0] != version:
                raise LoadError(f"a rank that was to hand on version {version} no longer has it")
            return self._version
