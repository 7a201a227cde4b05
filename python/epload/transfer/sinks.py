"""Sinks: where a transfer's bytes end up."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor


class Sink(Protocol):
    """Used by one thread, within :meth:`entered`."""

    def entered(self) -> AbstractContextManager[None]:
        """Around the whole transfer."""
        ...

    def unpack(self, number: int, bucket: Tensor) -> None:
        """Takes what this rank keeps, if anything, out of a bucket (uint8). The sink no longer needs it when this returns, or
        when the work that it has queued on its stream is done."""
        ...

    def abandon(self) -> None:
        """Keeps the memory of a transfer that failed until the process ends, if something may still write to it."""
        ...


class PlainSink:
    """Implements what is common to every :class:`Sink` that is done with a bucket when :meth:`Sink.unpack` returns."""

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def abandon(self) -> None:
        pass
