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
from epload.errors import LoadError, RankExited, limit_hint, message_of
from epload.ranks import heartbeat
from epload.ranks.connection import FAILED, NodeConnection
from epload.ranks.failure import Failure

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

    def __init__(self, node: NodeConnection, fail: Callable[[BaseException], object]) -> None:
        """``fail``: publishes a failure."""
        self._node = node
        self._fail = fail
        self._last_activity, self._quiet, self._log_at = (-1, ""), 0, _QUIET_HEARTBEATS
        self._depth = 0
        self._until: float | None = None
        """Value of ``time.monotonic()`` when the thread ends at the latest; None until it has to end."""
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._depth == 0 and self._node.store is not None:
            self._start()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._thread is not None:
            self._until = time.monotonic() + _FLUSH_SECONDS
            self._node.wake()
            self._thread.join()
            self._thread = None

    def _start(self) -> None:
        """Raises LoadError if a thread cannot run: without it, this rank would not notice that others have failed."""
        self._until = None
        try:
            if self._node.wake_fd < 0:
                self._node.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread = threads.start("epload-watch", self._run)
        except (OSError, LoadError) as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> LoadError:
        return LoadError(f"rank {self._node.rank} cannot watch over the other ranks: {message_of(error)}{limit_hint(error)}")

    def _run(self) -> None:
        node = self._node
        try:
            self._watch()
        except Exception as error:
            if not isinstance(error, RuntimeError):
                self._fail(self._explain(error))
            elif self._until is None:  # the store is lost, and with it any news of other ranks
                logger.warning("rank %d can no longer watch over the load: %s", node.rank, message_of(error))
            node.stop()
            node.news.set()

    def _watch(self) -> None:
        node, now = self._node, time.monotonic()
        look_seconds = min(1.0 + _LOOK_PER_NODE * len(node.tree.nodes), _MAX_LOOK) * heartbeat.INTERVAL
        # Ranks that come together receive from one another in the first round: most loads are over before this says anything.
        next_beat = now + min(_FIRST_BEAT, node.timeout.total_seconds() / 4)
        next_look = now + look_seconds
        ended = 0
        while not self._is_over():
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + heartbeat.INTERVAL
                self._beat()
            if now >= next_look:
                next_look = now + look_seconds
                if node.tree.leads:
                    node.look()
            self._listen(min(next_beat, next_look))
            if len(node.processes.ended) > ended:
                ended = len(node.processes.ended)
                node.news.set()
                self._report_ended()

    def _is_over(self) -> bool:
        if self._until is None:
            return False
        return time.monotonic() >= self._until or not any(link.unsent for link in self._node.links.values())

    def _listen(self, until: float) -> None:
        """Waits for messages and :meth:`NodeConnection.wake`, receives and sends what is there, and looks for ended processes."""
        node = self._node
        links = {rank: link for rank, link in node.links.items() if not link.closed}
        poll = select.poll()
        poll.register(node.wake_fd, select.POLLIN)
        for link in links.values():
            poll.register(link.fileno(), select.POLLIN | select.POLLOUT * bool(link.unsent))
        poll.poll(1e3 * max(0.0, min(until, node.processes.next_look) - time.monotonic()))
        node.processes.look()
        with suppress(BlockingIOError):
            os.eventfd_read(node.wake_fd)
        for rank, link in links.items():
            link.flush()
            for tag, data in link.receive():
                self._receive(rank, tag, data)

    def _receive(self, rank: int, tag: str, data: bytes) -> None:
        node = self._node
        if tag == BEAT:
            node.heartbeats.receive(rank, data)
        elif tag == FAILED:
            prefix, _, outcome = data.partition(b" ")
            if (failure := Failure.decode(outcome)) is not None:
                node.notice(prefix.decode(), failure, rank)
                if node.tree.leads:  # the rank may have had no connection to the store
                    with suppress(RuntimeError, OSError):
                        node.publish(prefix.decode(), failure)
        else:
            node.received.setdefault(tag, {})[rank] = data
            node.news.set()

    def _beat(self) -> None:
        node, position = self._node, self._node.position
        beat = node.heartbeats.beat(position, node.progress, node.doing)
        for link in node.links.values():
            link.send(BEAT, beat, optional=True)
        self._log_activity(node.progress, node.doing)
        waits = 0 < node.waits_since <= time.monotonic() - heartbeat.INTERVAL
        # A rank whose leader has not come says in the store that it has come itself.
        if node.tree.leads or (waits and not node.heartbeats.arrived(node.tree.leader, position)):
            node.heartbeats.post(position, waits)
        self._report_ended()

    def _report_ended(self) -> None:
        if self._node.stops:  # in a round, which may have been decided before, the rank itself does
            for other, pid in sorted(self._node.processes.ended.items()):
                self._fail(RankExited(other, pid))

    def _log_activity(self, progress: int, doing: str) -> None:
        """Logs it after 5 s without progress, then after 10 s, 20 s and so on."""
        if (progress, doing) != self._last_activity:
            self._last_activity, self._quiet, self._log_at = (progress, doing), 0, _QUIET_HEARTBEATS
            return
        self._quiet += 1
        if doing and self._quiet == self._log_at:
            self._log_at *= 2
            logger.info("rank %d %s, %.0f s", self._node.rank, doing, self._quiet * heartbeat.INTERVAL)
