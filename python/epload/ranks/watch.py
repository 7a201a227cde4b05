"""A rank's watch over a load: sends heartbeats, notices ended processes, and stops what the rank waits for when another fails.

It runs in a thread of its own, so that it works while the rank computes, reads or waits for a message. It receives all messages
of its node. The leader of a node looks for failures in the store every 1 to 1.5 s, and notifies the other ranks of the node.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from epload.core import threads
from epload.core.log import logger
from epload.errors import LoadError, RankExited, message_of
from epload.ranks import heartbeat
from epload.ranks.links import Link
from epload.ranks.place import FAILED, Place

_ULIMIT_HINT = "raise the limit on open files (ulimit -n)"
_FIRST_BEAT = 0.5
"""Seconds from the begin of a load to a rank's first heartbeat."""
_LOOK_PER_NODE, _MAX_LOOK = 1 / 128, 1.5
"""Growth, with each node, of the time between a leader's checks for a failure, and maximum of that time; in intervals."""
_QUIET_HEARTBEATS = 5
"""A rank logs its activity after so many heartbeats without progress, then after twice as many, and so on."""
_FLUSH_SECONDS = 5.0
"""Maximum seconds that the end of a watch waits for other ranks to take what this one has sent."""
BEAT = "beat"
"""Tag of a heartbeat."""


class Watch:
    """A reentrant context manager, in which the watch's thread runs. Each control has one."""

    def __init__(self, place: Place, fail: Callable[[BaseException], object]) -> None:
        """``fail``: publishes a failure."""
        self._place = place
        self._fail = fail
        self._wake = -1
        self._quiet, self._seen = 0, (-1, "")
        self._depth = 0
        self._until: float | None = None
        """Value of ``time.monotonic()`` when the thread ends at the latest; None until it has to end."""
        self._thread: threading.Thread | None = None
        self._next_beat = self._next_look = 0.0

    def __enter__(self) -> None:
        if self._depth == 0 and self._place.store is not None:
            self._start()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._thread is not None:
            self._until = time.monotonic() + _FLUSH_SECONDS
            self.wake()
            self._thread.join()
            self._thread = None

    def __del__(self) -> None:
        if self._wake >= 0:
            os.close(self._wake)

    def _start(self) -> None:
        """Raises LoadError if a thread cannot run: without it, this rank would not notice that others have failed."""
        self._until = None
        try:
            if self._wake < 0:
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread = threads.start("epload-watch", self._run)
        except OSError as error:
            raise self._error(f"{message_of(error)}; {_ULIMIT_HINT}") from error
        except LoadError as error:
            raise self._error(str(error)) from error

    def _error(self, cause: str) -> LoadError:
        return LoadError(f"rank {self._place.rank} cannot watch over the other ranks: {cause}")

    def wake(self) -> None:
        """Lets the thread send what a link has not taken yet."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        place, began = self._place, time.monotonic()
        # Ranks that come together hear of one another in the first round: most loads are over before this says anything.
        self._next_beat = began + min(_FIRST_BEAT, place.timeout.total_seconds() / 4)
        self._next_look = began + self._look_seconds
        ended = 0
        try:
            while not self._is_over():
                now = time.monotonic()
                if now >= self._next_beat:
                    self._next_beat = now + heartbeat.INTERVAL
                    self._beat()
                if now >= self._next_look:
                    self._next_look = now + self._look_seconds
                    if place.tree.leads:
                        place.look()
                self._listen(min(self._next_beat, self._next_look))
                if len(place.processes.ended) > ended:
                    ended = len(place.processes.ended)
                    place.news.set()
                    self._report_ended()
        except OSError as error:
            self._fail(self._error(f"{message_of(error)}; {_ULIMIT_HINT}"))
            place.stop()
            place.news.set()
        except Exception as error:  # the store is lost, and with it any news of other ranks
            if self._until is None:
                logger.warning("rank %d can no longer watch over the load: %s", place.rank, message_of(error))
                place.stop()
                place.news.set()

    @property
    def _look_seconds(self) -> float:
        return min(1.0 + _LOOK_PER_NODE * len(self._place.tree.nodes), _MAX_LOOK) * heartbeat.INTERVAL

    def _is_over(self) -> bool:
        if self._until is None:
            return False
        return time.monotonic() >= self._until or not any(link.unsent for link in self._place.links.values())

    def _listen(self, until: float) -> None:
        """Waits for messages, ended processes and :meth:`wake`; receives and sends what is there."""
        place = self._place
        links = {rank: link for rank, link in place.links.items() if not link.closed}
        events = {link.fileno(): select.POLLIN | select.POLLOUT * link.unsent for link in links.values()}
        place.processes.wait(events | {self._wake: select.POLLIN}, until - time.monotonic())
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        for rank, link in links.items():
            link.flush()
            self._receive(rank, link)

    def _receive(self, rank: int, link: Link) -> None:
        place = self._place
        for tag, data in link.receive():
            if tag == BEAT:
                place.heartbeats.hear(rank, data)
            elif tag == FAILED:
                place.hear_failure(rank, data)
            else:
                place.received.setdefault(tag, {})[rank] = data
                place.news.set()

    def _beat(self) -> None:
        place, heartbeats = self._place, self._place.heartbeats
        position = place.position
        sent = heartbeats.beat(position, place.progress, place.doing)
        for link in place.links.values():
            link.send(BEAT, sent, optional=True)
        self._log_activity(place.progress, place.doing)
        waits = 0 < place.waits_since <= time.monotonic() - heartbeat.INTERVAL
        # A rank whose leader has not come says in the store that it has come itself.
        if place.tree.leads or (waits and not heartbeats.arrived(place.tree.leader, position)):
            heartbeats.post(position, waits)
        self._report_ended()

    def _report_ended(self) -> None:
        if self._place.moves_data:  # in a round, which may have been decided before, the rank itself does
            for other, pid in sorted(self._place.processes.ended.items()):
                self._fail(RankExited(other, pid))

    def _log_activity(self, progress: int, doing: str) -> None:
        """Logs it after 5 s without progress, then after 10 s, 20 s and so on."""
        self._quiet = self._quiet + 1 if (progress, doing) == self._seen else 0
        self._seen = (progress, doing)
        times, rest = divmod(self._quiet, _QUIET_HEARTBEATS)
        if doing and rest == 0 and times > 0 and times & (times - 1) == 0:
            logger.info("rank %d %s, %.0f s", self._place.rank, doing, self._quiet * heartbeat.INTERVAL)
