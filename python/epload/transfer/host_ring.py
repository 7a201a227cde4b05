"""The staging buffers in host memory, of one rank or of all ranks of a node, paced by the node's board."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import Tensor

from epload.planning.buckets import HEADER_BYTES
from epload.planning.schedule import Roles
from epload.planning.waves import Wave
from epload.ranks.activity import Activity
from epload.transfer.shared_memory import NodeMemory

_ENDED = 1 << 30
"""The count that a rank posts when it takes no further part."""


_STAGES = {"read": "read", "move": "relayed", "check": "checked", "unpack": "unpacked"}
"""The board's stage that each step has done."""


class HostRing:
    """See :class:`~epload.transfer.ring.Ring`."""

    lanes = (("read",), ("move",), ("unpack",))
    checks_moved = True

    def __init__(
        self, memory: NodeMemory, flow: Roles, timeout: timedelta, activity: Activity, waves_before: int = 0
    ) -> None:
        """
        Args:
            memory: with buffers for the largest wave.
            timeout: of one wait for another rank of the node.
            waves_before: number of waves of this sync that went through the same memory before; no rank uses them any more.
        """
        self._memory = memory
        self._flow = flow
        self._timeout = timeout
        self._activity = activity
        self._before = waves_before

    def enter_thread(self) -> None:
        pass

    def wait(self, step: str, wave: Wave) -> None:
        if step in ("read", "move") and (count := wave.index + 1 - len(self._memory.buffers)) > 0:
            self._wait("unpacked", count, self._flow.sharers)
            self._wait("checked", count, self._flow.relays)
        if step == "unpack":
            self._wait("relayed", wave.index + 1, self._flow.relays)
        if step in ("move", "unpack"):
            self._wait("read", wave.index + 1, self._local_readers(wave))

    def done(self, step: str, wave: Wave, last: bool = False) -> None:
        self._post(_STAGES[step], _ENDED if last else wave.index + 1)
        if step == "move":
            # The next wave comes only if no reader aborted this one, and the headers of this one may be in what others received.
            self._wait("relayed", wave.index + 1, self._flow.relays)

    def bucket(self, wave: Wave, i: int) -> Tensor:
        return self.buffer(wave)[wave.begins[i] : wave.ends[i]]

    def buffer(self, wave: Wave) -> Tensor:
        """The whole buffer of a wave."""
        return self._memory.buffers[wave.index % len(self._memory.buffers)]

    def header(self, wave: Wave, i: int) -> Tensor:
        return self.bucket(wave, i)[:HEADER_BYTES]

    def verify(self, wave: Wave, check: Callable[[int], None]) -> None:
        sharers = self._flow.sharers
        for i, number in enumerate(wave.numbers):
            if sharers[number % len(sharers)] == self._flow.rank:
                check(i)
        self._post("verified", wave.index + 1)
        self._wait("verified", wave.index + 1, sharers)

    def stop(self, failed: bool = True) -> None:
        if failed:
            self._memory.board.fail()
        else:
            self._post("unpacked", _ENDED)

    def abandon(self) -> None:
        """Does nothing: once a relay has ended, nothing writes to the buffers."""

    def _local_readers(self, wave: Wave) -> list[int]:
        """The ranks that read buckets of a wave into this buffer."""
        return sorted({self._flow.reader(number) for number in wave.numbers} & set(self._flow.sharers))

    def _post(self, stage: str, count: int) -> None:
        self._memory.board.post(stage, self._before + count)

    def _wait(self, stage: str, count: int, ranks: Sequence[int]) -> None:
        if not ranks:
            return
        names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        with self._activity.waiting(f"{names} has {stage} wave {count - 1}", ranks):
            self._memory.board.wait(stage, self._before + count, ranks, self._timeout)
