"""The staging buffers in host memory, of one rank or of all ranks of a node, as a ring that the node's progress counters pace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import Tensor

from epload.planning.buckets import HEADER_BYTES
from epload.planning.waves import Wave
from epload.transfer.context import TransferContext
from epload.transfer.shared_memory import STEPS, NodeMemory

_ENDED = 1 << 30
"""The count that a rank posts when it takes no further part."""


class HostRing:
    """Holds reading, moving and unpacking, which go through the waves in order, each at its own pace, back until the buffer that
    they are about to use is in the right state.

    Methods that wait raise RemoteFailure after :meth:`stop`, and WaitTimeout where another rank takes too long.
    """

    threads: tuple[tuple[str, ...], ...] = (("read",), ("move",), ("unpack",))
    """The steps of each thread, which takes them in turn for each wave. The last thread is the calling one."""
    checks_moved = True
    """True if headers are checked once a wave has been moved, rather than when it is unpacked."""

    def __init__(self, memory: NodeMemory, context: TransferContext, timeout: timedelta) -> None:
        """
        Args:
            memory: with buffers for the largest wave.
            timeout: of one wait for another rank of the node.
        """
        self.memory = memory
        self._context = context
        self._flow = context.flow
        self._timeout = timeout
        self._before = memory.waves_before

    def enter_thread(self) -> None:
        """Prepares a thread that uses the ring, other than the one that made it."""

    def wait(self, step: str, wave: Wave) -> None:
        """Waits until a step may begin: "read" until the buffer is free, "move" until it is and what this node reads is in it,
        "unpack" until the whole wave has arrived, and "end", with the last wave, until all that this rank sends and receives has
        arrived."""
        if step in ("read", "move") and (count := wave.index + 1 - len(self.memory.buffers)) > 0:
            self._wait("unpack", count, self._flow.sharers)
            self._wait("check", count, self._flow.relays)
        if step == "unpack":
            self._wait("move", wave.index + 1, self._flow.relays)
        if step in ("move", "unpack"):
            readers = set(map(self._flow.reader, wave.numbers))
            self._wait("read", wave.index + 1, sorted(readers & set(self._flow.sharers)))

    def done(self, step: str, wave: Wave, last: bool = False) -> None:
        """Says that this rank has done a step, or has queued the work for it. "move" returns when all ranks that move the wave
        through this buffer have; "check" is that of headers of a moved wave; after "unpack" this rank needs the wave no more.

        Args:
            last: True if this rank does the step for no other wave.
        """
        self._post(step, _ENDED if last else wave.index + 1)
        if step == "move":
            # The next wave comes only if no reader aborted this one, and the headers of this one may be in what others received.
            self._wait("move", wave.index + 1, self._flow.relays)

    def bucket(self, wave: Wave, i: int | None = None) -> Tensor:
        """Returns the buffer of the bucket at position ``i``, or of the whole wave; uint8."""
        buffer = self.memory.buffers[wave.index % len(self.memory.buffers)]
        return buffer if i is None else buffer[wave.begins[i] : wave.ends[i]]

    def header(self, wave: Wave, i: int) -> Tensor:
        """Returns the header of a bucket that has arrived; uint8 on CPU."""
        return self.bucket(wave, i)[:HEADER_BYTES]

    def verify(self, wave: Wave, check: Callable[[int], None]) -> None:
        """Calls ``check`` with the position of each bucket whose checksum is for this rank to check; returns when all of the wave
        are checked."""
        sharers = self._flow.sharers
        for i, number in enumerate(wave.numbers):
            if sharers[number % len(sharers)] == self._flow.rank:
                check(i)
        self._post("verify", wave.index + 1)
        self._wait("verify", wave.index + 1, sharers)

    def stop(self, failed: bool = True) -> None:
        """Ends all steps: wakes all waits, now and later, with an error, or without ``failed`` in order, as a reader has aborted
        the transfer."""
        if failed:
            self.memory.fail()
        else:
            self._post("unpack", _ENDED)

    def _post(self, step: str, count: int) -> None:
        self.memory.post(step, self._before + count)

    def _wait(self, step: str, count: int, ranks: Sequence[int]) -> None:
        if not ranks:
            return
        names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        what, context = f"{names} has {STEPS[step]} wave {count - 1}", self._context
        with context.control.activity(f"waits until {what}"), context.report.timed("wait", what, ranks):
            self.memory.wait(step, self._before + count, ranks, self._timeout)
