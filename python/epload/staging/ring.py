"""The staging buffers of one transfer as a ring: acquire, ready, moved, release.

Reading, moving and unpacking go through the waves in order, each at its own pace. A ring holds each back until the buffer that it
is about to use is in the right state, over counters that processes share or over events of a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from epload.planning.waves import Wave


class Ring(Protocol):
    """Methods that wait raise RemoteFailure after :meth:`fail`, and WaitTimeout where another rank takes too long."""

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

    # Reading
    def acquire(self, wave: Wave) -> None:
        """Waits until the wave may be read into its buffer."""
        ...

    def read_buffer(self, wave: Wave, i: int) -> Tensor:
        """Returns the buffer that the bucket at position ``i`` of the wave is read into; uint8."""
        ...

    def ready(self, wave: Wave) -> None:
        """This rank's buckets of the wave have been read."""
        ...

    # Moving
    def begin_move(self, wave: Wave) -> None:
        """Waits until the wave's buffer is free for what arrives, and what this node reads is in it."""
        ...

    def bucket(self, wave: Wave, i: int) -> Tensor:
        """Returns the buffer that the bucket at position ``i`` is moved from and to, and unpacked from; uint8."""
        ...

    def sent(self, wave: Wave, i: int) -> Tensor:
        """The same, and bytes without meaning behind it that make whole stripes of it."""
        ...

    def moved(self, wave: Wave) -> None:
        """The wave has been moved by this rank; returns when all ranks that move it through this buffer have."""
        ...

    def header(self, wave: Wave, i: int) -> Tensor:
        """The header of a bucket that has arrived; uint8 on CPU."""
        ...

    def checked(self, wave: Wave, last: bool) -> None:
        """This rank has checked the headers of a wave that it moved. ``last``: it moves no more."""
        ...

    # Unpacking
    def begin_unpack(self, wave: Wave) -> None:
        """Waits until the whole wave has arrived."""
        ...

    def to_verify(self, wave: Wave) -> list[int]:
        """Positions of the buckets whose checksum is for this rank to check."""
        ...

    def verified(self, wave: Wave) -> None:
        """This rank has found those checksums right; returns when all of the wave's are."""
        ...

    def unpacked(self, wave: Wave) -> None:
        """This rank has taken out of the wave what it keeps, or has queued that."""
        ...

    def release(self, wave: Wave) -> None:
        """This rank needs neither the wave nor its headers any more."""
        ...

    # Ending
    def finish(self) -> None:
        """Waits until what this rank has sent and received through the ring has arrived."""
        ...

    def end(self) -> None:
        """A reader has aborted the transfer: this rank unpacks no more."""
        ...

    def fail(self) -> None:
        """Wakes all waits, now and later, with an error: this rank or another cannot go on."""
        ...

    def drained(self) -> bool:
        """Returns True if nothing writes to its memory any more, after a transfer that failed. Waits a little for that."""
        ...

    def abandon(self) -> None:
        """Keeps the memory until the process ends, where something may still write to it."""
        ...
