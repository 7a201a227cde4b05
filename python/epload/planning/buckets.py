"""Buckets: the messages of a load or a sync, and what a rank copies into or out of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from epload.core.copy_table import CopyTable
from epload.core.pieces import Pieces

HEADER_BYTES = 64
"""Bytes of the header in front of every bucket's slots."""


@dataclass(frozen=True, eq=False)
class BucketCopies:
    """A bucket with one rank's copies between it and the rank's tensors."""

    nbytes: int
    """Size of the bucket, its header included if it has one."""
    rows: CopyTable
    """The copies; targets are numbers of the rank's tensors."""

    @property
    def targets(self) -> list[int]:
        """Numbers of the tensors that the rank copies from or into."""
        return self._renumbered[0]

    @property
    def copies(self) -> CopyTable:
        """:attr:`rows` with targets that count in :attr:`targets`."""
        return self._renumbered[1]

    @cached_property
    def copied(self) -> int:
        """Bytes that are copied."""
        return int(self.rows.nbytes().sum())

    @cached_property
    def is_dense(self) -> bool:
        """True if copies follow one another, each without gaps in the bucket."""
        offset, spans = self.rows.offset, self.rows.spans()
        return torch.equal(spans, self.rows.nbytes()) and bool((offset[1:] >= (offset + spans)[:-1]).all())

    @cached_property
    def _renumbered(self) -> tuple[list[int], CopyTable]:
        table = self.rows.clone()
        return table.renumber_targets(), table


@dataclass(frozen=True, eq=False)
class Bucket(BucketCopies):
    """One message of a load. The copies and their origins are this rank's; the rest is equal on all ranks."""

    pieces: Pieces
    """The pieces of checkpoint tensors that a reader fills it with."""
    origins: Tensor
    """int64 [n, 2]: where each row of ``copies`` starts: index into the manifest, and offset in that tensor in bytes."""
