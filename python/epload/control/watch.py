"""A rank's watch over a load: tells the others that it lives and where it stands, and hears when one of them fails.

It runs in a thread of its own, so that a rank that computes, reads or waits for a message hears and is heard all the same.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed.distributed_c10d import Store

from epload.control.processes import ProcessWatch
from epload.core import threads
from epload.core.log import logger
from epload.errors import LoadError, RankExited, message_of

if TYPE_CHECKING:
    from epload.control.control import Control

SECONDS = 1.0
"""Between two beats."""
_FILES = "raise the limit on open files (ulimit -n)"
_MAX_RANKS = 32
"""So many are described in an error."""
_QUIET_BEATS = 5
"""A rank says where it stands when it has made no progress for so many beats, then after twice as many, and so on."""


class Beats:
    """Where ranks say that they live. Written by a rank's watch, read by whoever waits for that rank."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._count = 0

    def post(self, round_: int, progress: int, doing: str) -> None:
        self._count += 1
        self._store.set(f"beat/{self._rank}", json.dumps([self._count, round_, progress, doing]))

    def read(self, ranks: Sequence[int]) -> dict[int, list[Any]]:
        """Count, round, progress and doing of each rank that has ever beaten."""
        keys = {rank: f"beat/{rank}" for rank in ranks}
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def signs(self, ranks: Sequence[int], round_: int) -> list[tuple[int, ...]]:
        """Changes as long as any of ``ranks`` moves data, or itself waits in the round ``round_``."""
        beats = self.read(ranks)
        return [(rank, beat[2], beat[0] if beat[1] >= round_ else -1) for rank, beat in sorted(beats.items())]

    def describe(self, ranks: Sequence[int], gone: Mapping[int, int], doing: str, fresh: bool) -> str:
        """The last known state of each rank, ``doing`` being this one's. ``fresh``: takes two beats to see which are silent."""
        before = self.read(ranks)
        if not before:  # nobody watches
            return ""
        silent = set()
        if fresh:
            time.sleep(2.2 * SECONDS)
            now = self.read(ranks)
            quiet = {rank for rank, beat in now.items() if rank in before and before[rank][0] == beat[0]}
            silent = quiet - set(gone) - {self._rank}
            before |= now
        before[self._rank] = [0, 0, 0, doing]
        first = [*sorted(set(gone) & set(ranks)), *sorted(silent)]
        shown = [*first, *(rank for rank in ranks if rank not in first)][:_MAX_RANKS]
        lines = []
        for rank in sorted(shown):
            beat = before.get(rank)
            state = (beat[3] or "nothing yet") if beat else "never heard of"
            note = ", has ended" if rank in gone else ", silent: stopped, or cut off" if rank in silent else ""
            lines.append(f"  rank {rank}: {state}{note}")
        more = f"\n  and {len(ranks) - len(shown)} more" if len(shown) < len(ranks) else ""
        return "Last known of each rank:\n" + "\n".join(lines) + more


class Stoppable(Protocol):
    """What waits, and is told to end when another rank has failed; a ``Board`` is one."""

    def fail(self) -> None: ...


class Watch:
    """Watches over one operation at a time; a context manager, which may be entered again inside. Each topology has one."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._guarded: list[Stoppable] = []
        self._wake = -1
        self._quiet, self._seen = 0, (-1, "")
        self._over = False
        self._depth = 0
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        if self._depth == 0 and self._control.beats is not None:
            self._start()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._thread is not None:
            self._over = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)
            self._thread = None

    def _start(self) -> None:
        """Raises LoadError if this rank cannot have a watch: without one, it would not hear that others have failed."""
        self._over = False
        try:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        except OSError as error:
            raise LoadError(
                f"rank {self._control.rank} cannot watch over the other ranks: {message_of(error)}; {_FILES}"
            ) from error
        try:
            self._thread = threads.start("epload-watch", self._run)
        except BaseException as error:
            os.close(self._wake)
            if isinstance(error, LoadError):
                raise LoadError(f"rank {self._control.rank} cannot watch over the other ranks: {error}") from error
            raise

    @contextmanager
    def guards(self, waiting: Stoppable) -> Iterator[None]:
        """Meanwhile, ``waiting.fail()`` is called when a rank fails that cannot go on, or the store is lost."""
        self._guarded.append(waiting)
        try:
            yield
        finally:
            self._guarded.remove(waiting)

    def _run(self) -> None:
        control = self._control
        neighbors, watched = ProcessWatch(()), 0
        try:
            while not self._over:
                self._beat()
                control.find_neighbors()
                if len(control.neighbors) > watched:
                    neighbors.close()
                    neighbors, watched = ProcessWatch(control.neighbors), len(control.neighbors)
                neighbors.wait(self._wake, SECONDS)
                if neighbors.gone.keys() - control.gone.keys():
                    control.gone = dict(neighbors.gone)
                    control.alarm.set()
        except OSError as error:
            control.fail(
                LoadError(f"rank {control.rank} cannot watch over the other ranks: {message_of(error)}; {_FILES}")
            )
            self._stop()
            control.alarm.set()
        except Exception as error:  # the store is lost, and with it the way to hear of anything
            if not self._over:
                logger.warning("rank %d can no longer watch over the load: %s", control.rank, message_of(error))
                self._stop()
                control.alarm.set()
        finally:
            neighbors.close()

    def _beat(self) -> None:
        control = self._control
        assert control.beats is not None
        assert control.desk is not None
        control.beats.post(control.round, control.progress, control.doing)
        self._say_where(control.progress, control.doing)
        if self._guarded:
            for rank, process in sorted(control.gone.items()):
                control.fail(RankExited(rank, process))
            if control.desk.stopped():
                self._stop()

    def _stop(self) -> None:
        for waiting in list(self._guarded):
            waiting.fail()

    def _say_where(self, progress: int, doing: str) -> None:
        """After 5 s without progress, then after 10 s, 20 s and so on."""
        self._quiet = self._quiet + 1 if (progress, doing) == self._seen else 0
        self._seen = (progress, doing)
        beats = self._quiet // _QUIET_BEATS
        if doing and self._quiet % _QUIET_BEATS == 0 and beats > 0 and beats & (beats - 1) == 0:
            logger.info("rank %d %s, %.0f s", self._control.rank, doing, self._quiet * SECONDS)
