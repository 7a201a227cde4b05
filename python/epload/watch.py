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
from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import Store

from epload.errors import Ended, text_of
from epload.log import logger
from epload.neighbours import Neighbours, machine_and_process

if TYPE_CHECKING:
    from epload.control import Control
    from epload.node_memory import Board

SECONDS = 1.0
"""Between two beats."""
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

    def introduce(self) -> None:
        """By this, those on the same machine notice when this process ends."""
        self._store.set(f"process/{self._rank}", machine_and_process())

    def introduced(self, ranks: Sequence[int]) -> list[tuple[int, str]]:
        """Those of ``ranks`` that have introduced themselves, each with its process."""
        keys = {rank: f"process/{rank}" for rank in ranks}
        return [(rank, self._store.get(key).decode()) for rank, key in keys.items() if self._store.check([key])]

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


class Watch:
    """Watches over one load at a time; a context manager. Keeps what it needs for the next one."""

    def __init__(self, control: Control, node: Sequence[int]) -> None:
        """``node``: ranks that may be on this machine."""
        self._control = control
        self._node = [rank for rank in node if rank != control.rank]
        self._boards: list[Board] = []
        self._wake = -1
        self._quiet, self._seen = 0, (-1, "")
        self._over = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        if self._control.beats is not None:
            self._over = False
            self._wake = os.eventfd(0, os.EFD_CLOEXEC)
            self._thread = threading.Thread(target=self._run, name="epload-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._over = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)
            self._thread = None

    @contextmanager
    def guards(self, board: Board) -> Iterator[None]:
        """Meanwhile, whatever waits on ``board`` is stopped when a rank fails that cannot go on."""
        self._boards.append(board)
        try:
            yield
        finally:
            self._boards.remove(board)

    def _run(self) -> None:
        beats = self._control.beats
        assert beats is not None
        neighbours, met = Neighbours(()), 0
        try:
            beats.introduce()
            while not self._over:
                self._beat()
                if met < len(self._node):
                    introduced = beats.introduced(self._node)
                    if len(introduced) > met:
                        neighbours.close()
                        neighbours, met = Neighbours(introduced), len(introduced)
                neighbours.wait(self._wake, SECONDS)
                self._control.gone = neighbours.gone
        except Exception as error:  # the store is lost, and with it the way to hear of anything
            if not self._over:
                logger.warning("rank %d can no longer watch over the load: %s", self._control.rank, text_of(error))
                self._stop()
        finally:
            neighbours.close()

    def _beat(self) -> None:
        control = self._control
        assert control.beats is not None
        assert control.desk is not None
        control.beats.post(control.round, control.progress, control.doing)
        self._say_where(control.progress, control.doing)
        if self._boards:
            for rank, process in sorted(control.gone.items()):
                control.fail(Ended(rank, process))
            if control.desk.stopped():
                self._stop()

    def _stop(self) -> None:
        for board in list(self._boards):
            board.fail()

    def _say_where(self, progress: int, doing: str) -> None:
        """After 5 s without progress, then after 10 s, 20 s and so on."""
        self._quiet = self._quiet + 1 if (progress, doing) == self._seen else 0
        self._seen = (progress, doing)
        beats = self._quiet // _QUIET_BEATS
        if doing and self._quiet % _QUIET_BEATS == 0 and beats > 0 and beats & (beats - 1) == 0:
            logger.info("rank %d %s, %.0f s", self._control.rank, doing, self._quiet * SECONDS)
