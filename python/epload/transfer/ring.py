"""The staging buffers of one transfer as a ring.

Reading, moving and unpacking go through the waves in order, each at its own pace. A ring holds each back until the buffer that it
is about to use is in the right state, over counters that processes share or over events of a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from epload.planning.waves import Wave


class Ring(Protocol):
    """Methods that wait raise RemoteFailure after :meth:`stop`, and WaitTimeout where another rank takes too long."""

    @property
    def lanes(self) -> Sequence[Sequence[str]]:
        """The steps "read", "move" and "unpack": each lane runs on a thread of its own, the last on the calling thread, and takes
        its steps in turn for each wave."""
        ...

    @property
    def checks_moved(self) -> bool:
        """True if headers are checked once a wave has been moved, rather than when it is unpacked. Then a transfer can end in
        order; otherwise whoever fails interrupts the others."""
        ...

    def enter_thread(self) -> None:
        """Called first in each thread that uses the ring, but for the one that made it."""
        ...

    def wait(self, step: str, wave: Wave) -> None:
        """Waits until a step may begin: "read" until the buffer is free, "move" until it is and what this node reads is in it,
        "unpack" until the whole wave has arrived, and "end", with the last wave, until all that this rank sends and receives has
        arrived."""
        ...

    def done(self, step: str, wave: Wave, last: bool = False) -> None:
        """Says that this rank has done a step, or has queued the work for it. "move" returns when all ranks that move the wave
        through this buffer have; "check" is that of headers of a moved wave; after "unpack" this rank needs the wave no more.

        Args:
            last: True if this rank does the step for no other wave.
        """
        ...

    def bucket(self, wave: Wave, i: int) -> Tensor:
        """Returns the buffer of the bucket at position ``i``; uint8."""
        ...

    def header(self, wave: Wave, i: int) -> Tensor:
        """Returns the header of a bucket that has arrived; uint8 on CPU."""
        ...

    def verify(self, wave: Wave, check: Callable[[int], None]) -> None:
        """Calls ``check`` with the position of each bucket whose checksum is for this rank to check; returns when all of the wave
        are checked."""
        ...

    def stop(self, failed: bool = True) -> None:
        """Ends all steps: wakes all waits, now and later, with an error, or without ``failed`` in order, as a reader has aborted
        the transfer."""
        ...

    def abandon(self) -> None:
        """Keeps the memory of a transfer that failed until the process ends, if something may still write to it."""
        ...
