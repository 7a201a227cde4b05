"""Sources: where a transfer's bytes come from. A checkpoint, or the shards of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from epload.checkpoint.base import Checkpoint
from epload.planning.plan import LoadPlan


class BucketSource(Protocol):
    """Used by one thread."""

    def fill(self, number: int, buffer: Tensor) -> None:
        """Fills a bucket behind its header.

        Args:
            buffer: the whole bucket; uint8 on CPU.

        Raises:
            CheckpointError: what is in it cannot be read.
        """
        ...


class CheckpointSource:
    """Buckets of a checkpoint that this rank has opened."""

    def __init__(self, plan: LoadPlan, checkpoint: Checkpoint) -> None:
        self._plan = plan
        self._checkpoint = checkpoint

    def fill(self, number: int, buffer: Tensor) -> None:
        self._checkpoint.fill(buffer, self._plan.pieces(self._plan.buckets[number]))
