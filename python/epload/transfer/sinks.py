"""Sinks: where a transfer's bytes end up."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor


class Sink:
    """Takes buckets. Used by one thread, within :meth:`entered`."""

    def entered(self) -> AbstractContextManager[None]:
        """Returns a context for the whole transfer."""
        return nullcontext()

    def unpack(self, number: int, bucket: Tensor) -> None:
        """Takes what this rank keeps, if anything, out of a bucket (uint8). The sink no longer needs it when this returns, or
        when the work that it has queued on its stream is done."""
        raise NotImplementedError
