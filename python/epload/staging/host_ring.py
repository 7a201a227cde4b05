"""The staging buffers in host memory, of one rank or of all ranks of a node, paced by the node's board."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor

from epload.control.activity import Activity
from epload.planning.buckets import HEADER_BYTES
from epload.planning.schedule import Roles
from epload.planning.waves import Wave
from epload.staging.shared_memory import NodeMemory

_ENDED = 1 << 30
"""The count that a rank posts when it takes no further part."""


class HostRing:
    """See :class:`~epload.staging.ring.Ring`."""

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

    def acquire(self, wave: Wave) -> None:
        if (count := wave.index + 1 - len(self._memory.buffers)) > 0:
            self._wait("unpacked", count, self._flow.sharers)
            self._wait("checked", count, self._flow.relays)

    def bucket(self, wave: Wave, i: int) -> Tensor:
        return self.buffer(wave)[wave.begins[i] : wave.ends[i]]

    def buffer(self, wave: Wave) -> Tensor:
        """The whole buffer of a wave."""
        return self._memory.buffers[wave.index % len(self._memory.buffers)]

    read_buffer = bucket

    def ready(self, wave: Wave) -> None:
        self._post("read", wave.index + 1)

    def begin_move(self, wave: Wave) -> None:
        self.acquire(wave)
        self._wait("read", wave.index + 1, self._local_readers(wave))

    sent = bucket

    def moved(self, wave: Wave) -> None:
        self._post("relayed", wave.index + 1)
        # The next wave comes only if no reader aborted this one, and the headers of this one may be in what others received.
        self._wait("relayed", wave.index + 1, self._flow.relays)

    def header(self, wave: Wave, i: int) -> Tensor:
        return self.bucket(wave, i)[:HEADER_BYTES]

    def checked(self, wave: Wave, last: bool) -> None:
        self._post("checked", _ENDED if last else wave.index + 1)

    def begin_unpack(self, wave: Wave) -> None:
        self._wait("relayed", wave.index + 1, self._flow.relays)
        self._wait("read", wave.index + 1, self._local_readers(wave))

    def to_verify(self, wave: Wave) -> list[int]:
        sharers = self._flow.sharers
        return [i for i, number in enumerate(wave.numbers) if sharers[number % len(sharers)] == self._flow.rank]

    def verified(self, wave: Wave) -> None:
        self._post("verified", wave.index + 1)
        self._wait("verified", wave.index + 1, self._flow.sharers)

    def unpacked(self, wave: Wave) -> None:
        self._post("unpacked", wave.index + 1)

    def release(self, wave: Wave) -> None:
        pass

    def finish(self) -> None:
        pass  # a mover returns when messages have been sent

    def end(self) -> None:
        self._post("unpacked", _ENDED)

    def fail(self) -> None:
        self._memory.board.fail()

    def drained(self) -> bool:
        return False  # other ranks may still write to it

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
