"""Buckets: the messages of a load or a sync, and what a rank copies into or out of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from epload.core.copy_table import CopyTable
from epload.core.pieces import Pieces

SEGMENT_BYTES = 4 << 20
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
    def segments(self) -> list[tuple[int, int, BucketCopies]]:
        """The bucket behind its header in parts of about ``SEGMENT_BYTES``, which fit into a processor's cache: the begin and the
        end of each (bytes), and its copies, whose offsets count from the begin. No copy is divided."""
        rows = self.rows.select(self.rows.offset.argsort(stable=True))
        ends = (rows.offset + rows.spans()).cummax(0).values
        apart = torch.cat([ends.new_ones(1, dtype=torch.bool), rows.offset[1:] >= ends[:-1]])
        starts = apart.nonzero().flatten()
        full = (rows.offset[starts] - HEADER_BYTES) // SEGMENT_BYTES
        starts = starts[torch.cat([full.new_ones(1), full.diff()]) > 0]
        begins = [HEADER_BYTES, *rows.offset[starts[1:]].tolist(), self.nbytes]
        parts = []
        for begin, end, first, last in zip(begins, begins[1:], starts, [*starts[1:], None], strict=False):
            table = rows.select(slice(first, last)).clone()
            table.offset.sub_(begin)
            parts.append((begin, end, BucketCopies(end - begin, table)))
        return parts

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
    """int64 [n, 2]: where each row of ``copies`` starts in the checkpoint, as index into the manifest and offset in that tensor
    in bytes."""
